"""Conformance of a `PrefixCache`: every promise of the seam's docstrings, tried through the seam's methods alone.

`check_prefix_cache(make)` runs all of it and raises `AssertionError` naming the promise that was broken. A cache need not find
anything: one that never matches conforms. What it does report is checked against simulated KV memory, in
which every sequence writes its tokens to the blocks it was given, as a model would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.plan import OK, OUT_OF_BLOCKS, CacheEvents
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec

Make = Callable[[CacheSpec], PrefixCache[Any]]
"""Builds the cache under test for given sizes."""

_SMALL = CacheSpec(num_blocks=(9, 11), block_size=2, max_sequences=3, max_blocks=6)
_LEAST = CacheSpec(num_blocks=(2,), block_size=2, max_sequences=2, max_blocks=2)


def check_prefix_cache(make: Make, *, steps: int = 120, seed: int = 0) -> None:
    """Try every promise of `PrefixCache` on caches that `make` builds.

    Args:
        steps: Operations in each random history.
        seed: Of the random histories.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    for spec in (_SMALL, _LEAST):
        cache = CacheUnderTest(make, spec)
        check_empty(cache)
        check_shapes(cache)
        check_random_history(cache, steps=steps, seed=seed)
        if spec is _SMALL:
            check_admission(cache)
            check_growth(cache)
            check_sharing(cache)
            check_prefixes(cache)


class CacheUnderTest:
    """A cache driven through its seam, next to a simulated KV memory.

    Attributes:
        held: Blocks each sequence should hold.
        tail: Tokens found beyond the whole blocks of a sequence, until `grow` has had their block copied.
        memory: What each (group, block) contains: for each offset the namespace and the tokens up to there.
    """

    def __init__(self, make: Make, spec: CacheSpec) -> None:
        self.spec, self.cache = spec, make(spec)
        _expect(self.cache.spec == spec, "the cache's `spec` is the one it was built for")
        self.jitted = {n: jax.jit(getattr(self.cache, n), donate_argnums=0) for n in ("admit", "grow", "commit", "release")}
        self.begin()

    def begin(self) -> None:
        """Start over with an empty cache; what was compiled is kept."""
        spec = self.spec
        self.state = self.cache.init()
        self.tables = np.zeros((spec.groups, spec.max_sequences, spec.max_blocks), np.int32)
        self.held = [0] * spec.max_sequences
        self.tail = [0] * spec.max_sequences
        self.prompts: dict[int, tuple[int, list[int]]] = {}
        self.memory: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        self.stored: set[tuple[int, ...]] = set()
        self.missed_events = False

    # -- the four methods

    def admit(
        self, sequence: int, tokens: Sequence[int], *, namespace: int = 0, want: int = 0, reserve: int = 0
    ) -> tuple[int, int]:
        """Admit one sequence; answers (cached_len, status) after checking the promises about them."""
        row = np.full((1, self.spec.max_len), -1, np.int32)
        row[0, : len(tokens)] = tokens
        self.state, answer = self.jitted["admit"](
            self.state,
            jnp.array([sequence], jnp.int32),
            jnp.asarray(row),
            jnp.array([len(tokens)], jnp.int32),
            jnp.array([[namespace, 0]], jnp.uint32),
            jnp.zeros(1, jnp.int32),
            jnp.full((1, self.spec.groups), want, jnp.int32),
            jnp.full(self.spec.groups, reserve, jnp.int32),
        )
        found, status = int(answer.cached_len[0]), int(answer.status[0])
        _expect(status in (OK, OUT_OF_BLOCKS), f"admit answers OK or OUT_OF_BLOCKS, not {status}")
        _expect(0 <= found <= max(len(tokens) - 1, 0), f"at most lengths - 1 tokens are cached, got {found} of {len(tokens)}")
        _expect(found == 0 or (status == OK and sequence >= 0), "an entry that is skipped or refused leases nothing")
        if sequence >= 0 and status == OK:
            self.prompts[sequence] = (namespace, list(tokens))
            self.held[sequence], self.tail[sequence] = divmod(found, self.spec.block_size)
            self.grow({})
            self._check_content(sequence, self.held[sequence] * self.spec.block_size)
        return found, status

    def grow(self, need: Mapping[int, int], rank: Sequence[int] | None = None) -> list[int]:
        """Let some sequences hold more blocks; answers every status after checking the promises about them."""
        count = self.spec.max_sequences
        wanted = np.zeros((count, self.spec.groups), np.int32)
        for sequence, blocks in need.items():
            wanted[sequence] = blocks
        order = list(range(count)) if rank is None else list(rank)
        self.state, table, copies, status = self.jitted["grow"](self.state, jnp.asarray(wanted), jnp.array(order, jnp.int32))
        answer, before = [int(s) for s in status], list(self.held)
        refused = [order[s] for s in range(count) if answer[s] != OK]
        for sequence in range(count):
            lacks = int(wanted[sequence, 0]) > self.held[sequence]
            _expect(answer[sequence] == OK or lacks, "a sequence that lacks nothing is not refused")
            _expect(
                not (lacks and answer[sequence] == OK and refused and order[sequence] > min(refused)),
                "nobody after the first refusal",
            )
            if answer[sequence] == OK:
                self.held[sequence] = max(self.held[sequence], int(wanted[sequence, 0]))
        self._take_table(table, may_move=False)
        self._copy(np.asarray(copies), before)
        return answer

    def commit(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """Commit the tokens of some sequences."""
        rows = np.full((self.spec.max_sequences, self.spec.max_len), -1, np.int32)
        upto = np.zeros(self.spec.max_sequences, np.int32)
        for sequence, ids in tokens.items():
            rows[sequence, : len(ids)], upto[sequence] = ids, len(ids)
        self.state, table = self.jitted["commit"](self.state, jnp.asarray(rows), jnp.asarray(upto))
        self._take_table(table, may_move=True)
        for sequence, ids in tokens.items():
            self._check_content(sequence, len(ids))

    def release(self, *sequences: int) -> CacheEvents:
        """End some sequences; answers the events after checking them."""
        done = np.zeros(self.spec.max_sequences, bool)
        done[list(sequences)] = True
        self.state, events = self.jitted["release"](self.state, jnp.asarray(done))
        for sequence in sequences:
            self.held[sequence] = self.tail[sequence] = 0
            self.tables[:, sequence] = 0
            self.prompts.pop(sequence, None)
        self._check_events(events)
        return events

    # -- the simulated memory

    def write(self, sequence: int) -> None:
        """What a model does: store the KV of all tokens of a sequence that its blocks have room for."""
        namespace, tokens = self.prompts[sequence]
        for at in range(min(len(tokens), self.held[sequence] * self.spec.block_size)):
            for group in range(self.spec.groups):
                block = int(self.tables[group, sequence, at // self.spec.block_size])
                content = self.memory.setdefault((group, block), {})
                wanted = (namespace, *tokens[: at + 1])
                shared = int(np.sum(self.tables[group] == block)) > 1
                _expect(
                    not shared or content.get(at % self.spec.block_size) == wanted,
                    "a block two sequences write is one they agree on",
                )
                content[at % self.spec.block_size] = wanted

    def _copy(self, copies: np.ndarray, held_before: list[int]) -> None:
        """Copy blocks as a device would, all read before any is written, and look at what sequences were promised."""
        spec = self.spec
        _expect(copies.shape == (spec.groups, spec.max_sequences, 2), f"one copy for each group and sequence, got {copies.shape}")
        read = {}
        for group, sequence in np.argwhere(copies[:, :, 0] >= 0).tolist():
            source, target = copies[group, sequence].tolist()
            _expect(self.tail[sequence] > 0, f"sequence {sequence} has no block to copy, got {source} -> {target}")
            _expect(bool(target == self.tables[group, sequence, held_before[sequence]]), "a copy goes to the first new block")
            read[(group, target)] = dict(self.memory.get((group, source), {}))
        self.memory.update(read)
        for sequence, tail in enumerate(self.tail):
            if tail and self.held[sequence] > held_before[sequence]:
                self._check_content(sequence, held_before[sequence] * spec.block_size + tail)
                self.tail[sequence] = 0

    def check_all_content(self) -> None:
        """Every block a sequence holds contains what the sequence wrote there."""
        for sequence, (_, tokens) in self.prompts.items():
            self._check_content(sequence, min(len(tokens), self.held[sequence] * self.spec.block_size))

    def _check_content(self, sequence: int, length: int) -> None:
        namespace, tokens = self.prompts[sequence]
        for at in range(length):
            for group in range(self.spec.groups):
                block = int(self.tables[group, sequence, at // self.spec.block_size])
                got = self.memory.get((group, block), {}).get(at % self.spec.block_size)
                _expect(
                    got == (namespace, *tokens[: at + 1]), f"token {at} of sequence {sequence} is in its block {block}, found {got}"
                )

    # -- promises about tables and events

    def _take_table(self, table: Any, *, may_move: bool) -> None:
        new = np.asarray(table)
        _expect(new.shape == self.tables.shape, f"a block table has shape {self.tables.shape}, got {new.shape}")
        for group, blocks in enumerate(self.spec.num_blocks):
            _expect(bool(np.all((new[group] >= 0) & (new[group] < blocks))), f"ids of group {group} lie in 0..{blocks - 1}")
            for sequence, held in enumerate(self.held):
                row = new[group, sequence]
                _expect(bool(np.all(row[:held] > 0)), f"sequence {sequence} holds {held} blocks, and never block 0: {row}")
                _expect(bool(np.all(row[held:] == 0)), f"beyond {held} blocks the table points at block 0: {row}")
                _expect(len(set(row[:held].tolist())) == held, f"sequence {sequence} holds no block twice: {row}")
        if not may_move:
            for sequence in self.prompts:
                old = self.tables[:, sequence]
                _expect(bool(np.all((old == 0) | (old == new[:, sequence]))), "growing moves no block that was held")
        self.tables = new.copy()

    def _check_events(self, events: CacheEvents) -> None:
        for name, kind in (("stored", events.stored), ("removed", events.removed)):
            for group, block, *_ in (e for e in np.asarray(kind).tolist() if e[0] >= 0):
                inside = group < self.spec.groups and 0 < block < self.spec.num_blocks[group]
                _expect(inside, f"{name} events name blocks of the pool, got {(group, block)}")
        self._follow(events)
        for group, blocks in enumerate(self.spec.num_blocks):
            leased = {int(b) for s, n in enumerate(self.held) for b in self.tables[group, s, :n]}
            free, cached = int(events.num_free[group]), int(events.num_evictable[group])
            to_copy = sum(tail > 0 for tail in self.tail)  # a block to be copied is leased and in no table
            _expect(
                free >= 0 and cached >= 0 and 0 <= blocks - 1 - (free + cached + len(leased)) <= to_copy,
                f"free + cached + leased = total in group {group}: {free} + {cached} + {len(leased)} of {blocks - 1}",
            )

    def _follow(self, events: CacheEvents) -> None:
        """A follower that missed nothing knows every cached block, and is told only of removals of blocks it knows."""
        self.missed_events |= bool(events.overflow)
        if self.missed_events:
            return
        self.stored |= {tuple(e[:3]) for e in np.asarray(events.stored).tolist() if e[0] >= 0}
        removed = {tuple(e) for e in np.asarray(events.removed).tolist() if e[0] >= 0}
        _expect(removed <= self.stored, f"what is removed was stored before, in the same generation: {removed - self.stored}")
        self.stored -= removed
        for group, cached in enumerate(np.asarray(events.num_evictable).tolist()):
            known = sum(e[0] == group for e in self.stored)
            _expect(known >= cached, f"every cached block of group {group} was announced: {known} known, {cached} cached")


def _expect(promise: bool, what: str) -> None:
    if not promise:
        raise AssertionError(f"PrefixCache promise broken: {what}")


def check_empty(cache: CacheUnderTest) -> None:
    """`init` gives a cache with everything free; releasing nothing changes nothing."""
    cache.begin()
    for _ in range(2):
        events = cache.release()
        _expect(np.asarray(events.num_evictable).tolist() == [0] * cache.spec.groups, "an empty cache has nothing to evict")
        _expect(not bool(events.overflow), "an empty cache has no events")
        _expect(bool(np.all(np.asarray(events.stored) == -1) and np.all(np.asarray(events.removed) == -1)), "unused events are -1")


def check_admission(cache: CacheUnderTest) -> None:
    """`admit` skips −1, serves when there is room, honours `reserve`, and leases nothing when it refuses."""
    cache.begin()
    spec = cache.spec
    usable = min(spec.usable_blocks, spec.max_blocks)
    cache.admit(-1, [1, 2, 3], want=2)
    _expect(cache.admit(0, [1] * usable * spec.block_size, want=usable)[1] == OK, "an empty pool admits what fits")
    cache.release(0)
    over = spec.usable_blocks - usable + 1
    _expect(cache.admit(0, [1, 2, 3], want=usable, reserve=over)[1] == OUT_OF_BLOCKS, "blocks in reserve are not given away")
    _expect(cache.admit(0, [1, 2, 3], want=usable, reserve=over - 1)[1] == OK, "what the reserve leaves is given")
    cache.release(0)
    _expect(cache.admit(0, [], want=0)[1] == OK, "an empty prompt is admitted")
    _expect(cache.admit(1, [5], want=1) == (0, OK), "the only token of a prompt is left to compute")


def check_growth(cache: CacheUnderTest) -> None:
    """`grow` gives all or nothing, in rank order, and nobody passes a refusal."""
    cache.begin()
    spec, usable = cache.spec, cache.spec.usable_blocks
    for sequence in range(3):
        cache.admit(sequence, [sequence] * spec.max_len, want=1)
    half = usable // 2 + 1
    _expect(cache.grow({0: half, 1: half, 2: 1}, [2, 0, 1]) == [OUT_OF_BLOCKS, OK, OK], "lower rank first, all or nothing")
    _expect(cache.grow({0: half, 2: 2}, [0, 1, 2]) == [OUT_OF_BLOCKS, OK, OUT_OF_BLOCKS], "nobody of higher rank after a refusal")
    _expect(cache.grow({0: 1, 1: 1, 2: 1}) == [OK, OK, OK], "a need below what is held is met and shrinks nothing")
    _expect(cache.grow({2: spec.max_blocks + 1})[2] == OUT_OF_BLOCKS, "no sequence is longer than max_blocks")
    cache.release(0, 1, 2)


def check_sharing(cache: CacheUnderTest) -> None:
    """Two equal prompts computed at the same time stay right after `commit`, whoever's blocks are kept."""
    cache.begin()
    spec, tokens = cache.spec, [3] * (3 * cache.spec.block_size)
    for sequence in (0, 1):
        cache.admit(sequence, tokens, want=3)
    cache.grow({0: 4, 1: 4})
    for sequence in (0, 1):
        cache.write(sequence)
    cache.commit({0: tokens, 1: tokens})
    cache.release(0)
    cache.admit(2, [4] * spec.max_len, want=4)
    cache.grow({2: 4})
    cache.write(2)
    cache.check_all_content()


def check_prefixes(cache: CacheUnderTest) -> None:
    """A reported prefix is a true one: same tokens, same namespace, in place; another namespace shares nothing."""
    cache.begin()
    spec, tokens = cache.spec, list(range(3 * cache.spec.block_size))
    cache.admit(0, tokens, namespace=7, want=3)
    cache.grow({0: 3})
    cache.write(0)
    cache.commit({0: tokens})
    _expect(cache.admit(1, tokens, namespace=8, want=0)[0] == 0, "namespaces share nothing")
    cache.admit(2, [*tokens[:-1], 99], namespace=7, want=0)
    cache.release(0, 1, 2)
    shifted = tokens[spec.block_size :]
    _expect(cache.admit(0, [*shifted, 1, 1], namespace=7)[0] == 0, "a block is found only below its own prefix")


def check_shapes(cache: CacheUnderTest) -> None:
    """State keeps its shapes and types through every method, so that each is compiled once and the state can be donated."""
    spec, state = cache.spec, cache.cache.init()
    groups, sequences = spec.groups, spec.max_sequences

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros(shape, jnp.int32)

    namespace, done = jnp.zeros((2, 2), jnp.uint32), jnp.zeros(sequences, bool)
    arguments: dict[str, tuple[jax.Array, ...]] = {
        "admit": (ints(2), ints(2, spec.max_len), ints(2), namespace, ints(2), ints(2, groups), ints(groups)),
        "grow": (ints(sequences, groups), ints(sequences)),
        "commit": (ints(sequences, spec.max_len), ints(sequences)),
        "release": (done,),
    }
    for name, args in arguments.items():
        after = jax.eval_shape(getattr(cache.cache, name), state, *args)[0]
        _expect(_shapes(after) == _shapes(state), f"`{name}` gives the state back with the shapes and types it had")


def _shapes(state: Any) -> tuple[str, list[tuple[Any, ...]]]:
    return str(jax.tree.structure(state)), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def check_random_history(cache: CacheUnderTest, *, steps: int, seed: int) -> None:
    """A random history of prompts from a small alphabet, every promise checked after each operation."""
    cache.begin()
    rng, spec = np.random.default_rng(seed), cache.spec
    for _ in range(steps):
        sequence = int(rng.integers(spec.max_sequences))
        if sequence not in cache.prompts:
            tokens = rng.integers(0, 2, int(rng.integers(1, spec.max_len + 1))).tolist()
            want = -(-len(tokens) // spec.block_size)
            cache.admit(sequence, tokens, namespace=int(rng.integers(2)), want=want, reserve=int(rng.integers(3)))
            continue
        action = int(rng.integers(4))
        if action < 2:
            need = {s: -(-len(t) // spec.block_size) for s, (_, t) in cache.prompts.items()}
            cache.grow(need, rng.permutation(spec.max_sequences).tolist())
            for held in cache.prompts:
                cache.write(held)
        elif action == 2:
            done = {s: t[: cache.held[s] * spec.block_size] for s, (_, t) in cache.prompts.items()}
            cache.commit(done)
        else:
            cache.release(sequence)
        cache.check_all_content()
    events = cache.release(*range(spec.max_sequences))
    total = np.asarray(events.num_free) + np.asarray(events.num_evictable)
    _expect(total.tolist() == [n - 1 for n in spec.num_blocks], "an idle cache leases nothing")
