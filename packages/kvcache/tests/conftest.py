"""Shape checks in every test run, and a driver that audits the cache after each operation."""

from __future__ import annotations

from jaxtyping import install_import_hook

with install_import_hook("octavo_kvcache", "beartype.beartype"):
    import octavo_kvcache

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.plan import CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache, audit


class Driver:
    """A cache, its state and its jitted operations, spoken to in lists. Every operation is followed by an audit."""

    def __init__(self, spec: CacheSpec, **options: Any) -> None:
        options.setdefault("partial", False)
        self.spec, self.object = spec, RadixCache(spec, **options)
        quick = {"xla_backend_optimization_level": 0}  # compiling takes longer than these tests run
        names = ("admit", "grow", "commit", "release")
        self.jitted = {n: jax.jit(getattr(self.object, n), donate_argnums=0, compiler_options=quick) for n in names}
        self.reset()

    def reset(self) -> None:
        self.state = self.object.init()

    def audited(self) -> None:
        problems = audit(self.state, self.spec)
        assert problems == [], "\n".join(problems)

    def pad(self, tokens: Sequence[int]) -> np.ndarray:
        row = np.full(self.spec.max_len, -7, np.int32)
        row[: len(tokens)] = tokens
        return row

    def admit(
        self,
        sequence: int,
        tokens: Sequence[int],
        *,
        space: int = 0,
        tenant: int = 0,
        want: int = 0,
        reserve: int = 0,
        length: int | None = None,
    ) -> tuple[int, int]:
        """Admit one; answers (cached_len, status)."""
        groups = self.spec.groups
        self.state, got = self.jitted["admit"](
            self.state,
            jnp.array([sequence], jnp.int32),
            jnp.asarray(self.pad(tokens))[None],
            jnp.array([len(tokens) if length is None else length], jnp.int32),
            jnp.array([[space, 0]], jnp.uint32),
            jnp.array([tenant], jnp.int32),
            jnp.full((1, groups), want, jnp.int32),
            jnp.full(groups, reserve, jnp.int32),
        )
        self.audited()
        return int(got.cached_len[0]), int(got.status[0])

    def grow(self, need: dict[int, int], rank: dict[int, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Grow some; answers (table of group 0, status)."""
        wanted, ranks = np.zeros((self.spec.max_sequences, self.spec.groups), np.int32), np.arange(self.spec.max_sequences)
        for s, n in need.items():
            wanted[s] = n
        for s, r in (rank or {}).items():
            ranks[s] = r
        self.state, table, self.copies, status = self.jitted["grow"](self.state, jnp.asarray(wanted), jnp.asarray(ranks, jnp.int32))
        self.audited()
        return np.asarray(table[0]), np.asarray(status)

    def commit(self, tokens: dict[int, Sequence[int]]) -> np.ndarray:
        """Commit all of the tokens given; answers the table of group 0."""
        rows = np.stack([self.pad(tokens.get(s, ())) for s in range(self.spec.max_sequences)])
        upto = np.array([len(tokens.get(s, ())) for s in range(self.spec.max_sequences)], np.int32)
        self.state, table = self.jitted["commit"](self.state, jnp.asarray(rows), jnp.asarray(upto))
        self.audited()
        return np.asarray(table[0])

    def release(self, *sequences: int) -> CacheEvents:
        done = np.zeros(self.spec.max_sequences, bool)
        done[list(sequences)] = True
        self.state, events = self.jitted["release"](self.state, jnp.asarray(done))
        self.audited()
        return jax.device_get(events)

    def serve(self, sequence: int, tokens: Sequence[int], *, space: int = 0, tenant: int = 0) -> int:
        """A whole life up to, but without, the release: admit, grow, commit. Answers the tokens found."""
        blocks = -(-len(tokens) // self.spec.block_size)
        found, status = self.admit(sequence, tokens, space=space, tenant=tenant, want=blocks)
        assert status == 0
        assert self.grow({sequence: blocks})[1][sequence] == 0
        self.commit({sequence: tokens})
        return found

    def handles(self, ids: Sequence[int]) -> list[int]:
        return np.asarray(octavo_kvcache.handle(self.state.radix, jnp.array(ids, jnp.int32))).tolist()

    def current(self, ids: Sequence[int], generations: Sequence[int]) -> list[bool]:
        ids, generations = jnp.array(ids, jnp.int32), jnp.array(generations, jnp.int32)
        return np.asarray(octavo_kvcache.is_current(self.state.radix, ids, generations)).tolist()


_DRIVERS: dict[Any, Driver] = {}


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """A driver for given sizes, in the empty state; compiled once for each set of sizes."""

    def make(
        num_blocks: tuple[int, ...] = (12, 14), block_size: int = 2, sequences: int = 4, max_blocks: int = 6, **options: Any
    ) -> Driver:
        key = (num_blocks, block_size, sequences, max_blocks, *options.items())
        if key not in _DRIVERS:
            _DRIVERS[key] = Driver(CacheSpec(num_blocks, block_size, sequences, max_blocks), **options)
        _DRIVERS[key].reset()
        return _DRIVERS[key]

    return make


@pytest.fixture
def fresh_driver() -> type[Driver]:
    """The driver class, for tests that change what is traced."""
    return Driver
