"""Trying an eviction policy's promises on random histories of a random tree; for tests of policies, here and elsewhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from octavo_kvcache._src.policy import LATEST, EvictionPolicy, Now, Use

_NODES = 24
_WIDTHS = (12, 20, 28)
_REWIND = LATEST // 2


def check_policy(policy: EvictionPolicy, *, uses: int = 300, seed: int = 0) -> None:
    """Use random paths of a random tree and look at every block and its parent after each use.

    Args:
        policy: The policy to try.
        uses: Ends of leases in the history.
        seed: Of the history.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    history = _History(policy, np.random.default_rng(seed))
    for _ in range(uses):
        history.use()
        history.look(history.clock)
        history.look(history.clock + int(history.rng.integers(1, 1 << 14)))
        if history.clock >= LATEST - LATEST // 8 or history.rng.random() < 0.02:
            history.rewind()


@dataclasses.dataclass
class _History:
    """A tree of blocks and their stamps. Block 0 is the root and no block."""

    policy: EvictionPolicy
    rng: np.random.Generator

    def __post_init__(self) -> None:
        self.parent = np.array([0, *(int(self.rng.integers(0, n)) for n in range(1, _NODES))])
        self.stamp, self.clock, self.floor = np.zeros(_NODES, np.int32), 0, 0
        self._touch = jax.jit(self.policy.touch)
        self._rank = jax.jit(self.policy.rank, static_argnums=2)

    def use(self) -> None:
        """End a lease on the path to a random block; now and then a leaf was evicted, or much time has passed."""
        self.clock += int(self.rng.choice([1, 1, 1, 40, 1 << 13, 1 << 20]))
        path: list[int] = []
        block = int(self.rng.integers(1, _NODES))
        while block:
            path.insert(0, block)
            block = int(self.parent[block])
        before = self.stamp[path]
        length, answer = jnp.int32(len(path)), jnp.int32(self.rng.integers(0, 200))
        use = Use(
            jnp.int32(self.clock), jnp.int32(self.floor), jnp.int32(self.rng.integers(0, 3)), jnp.any(before == 0), length, answer
        )
        self.stamp[path] = self._touch(jnp.asarray(before), use)
        _expect(bool(np.all(self.stamp[path] >= before)), "`touch` lowers a stamp")
        _expect(bool(np.all(self.stamp > -1)), "a stamp is negative")
        self.evict()

    def now(self, clock: int) -> Now:
        """The clock and the floor as the cache hands them over."""
        return Now(jnp.int32(clock), jnp.int32(self.floor))

    def evict(self) -> None:
        """Evict the leaf that goes first; a new block takes its place."""
        leaves = np.setdiff1d(np.arange(1, _NODES), self.parent)
        rank = np.asarray(self._rank(jnp.asarray(self.stamp), self.now(self.clock), _WIDTHS[-1]))
        victim = leaves[np.argmin(rank[leaves])]
        if self.rng.random() < 0.3:
            self.floor, self.stamp[victim] = max(self.floor, int(self.stamp[victim])), 0

    def look(self, clock: int) -> None:
        """A block never goes after the one it follows, whatever the width of ranks."""
        child = np.arange(1, _NODES)[self.parent[1:] > 0]
        parent = self.parent[child]
        _expect(bool(np.all(self.stamp[parent] >= self.stamp[child])), "the stamp of a block is above that of the block it follows")
        for bits in _WIDTHS:
            rank = np.asarray(self._rank(jnp.asarray(self.stamp), self.now(clock), bits))
            _expect(bool(np.all((rank >= 0) & (rank < 1 << bits))), f"a rank of {bits} bits is outside 0..{(1 << bits) - 1}")
            _expect(bool(np.all(rank[parent] >= rank[child])), "the rank of a block is above that of the block it follows")

    def rewind(self) -> None:
        """Set the clock back as far as the cache does."""
        by = min(_REWIND, self.clock - 1)
        before, floor = self.stamp, self.policy.rewind(jnp.asarray([self.floor], jnp.int32), by)
        self.stamp = np.array(self.policy.rewind(jnp.asarray(before), by))
        self.clock, self.floor = self.clock - by, int(floor[0])
        _expect(bool(np.all(self.stamp <= before)), "`rewind` raises a stamp")
        _expect(
            bool(np.all((self.stamp >= 0) & ((before > 0) | (self.stamp == 0)))),
            "`rewind` makes a new block old, or a stamp negative",
        )
        self.look(self.clock)


def _expect(promise: bool, what: str) -> None:
    if not promise:
        raise AssertionError(f"EvictionPolicy promise broken: {what}")
