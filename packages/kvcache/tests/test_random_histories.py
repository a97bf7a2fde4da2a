"""Random histories against a plain model: a dict of prefixes, a dict of sequences, and what each block contains."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys

pytestmark = pytest.mark.slow

SPEC = CacheSpec(num_blocks=(10, 12), block_size=2, max_sequences=4, max_blocks=6)
USABLE, MAX_COMMITS = SPEC.usable_blocks, 3
OK, OUT_OF_BLOCKS = 0, 1

Prefix = tuple[int, ...]
"""Namespace, then the tokens of whole blocks."""


class Sequence:
    def __init__(self, space: int, tokens: list[int], blocks: int) -> None:
        self.space, self.tokens, self.held, self.committed = space, tokens, blocks, blocks

    def prefix(self, blocks: int) -> Prefix:
        return (self.space, *self.tokens[: blocks * SPEC.block_size])


def machine_for(driver, exact: bool) -> type[RuleBasedStateMachine]:
    """A state machine over `driver`; unless `exact`, the index may lose what it should know, but never lie."""

    class Histories(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            driver.reset()
            self.cached: dict[Prefix, int] = {}
            self.sequences: dict[int, Sequence] = {}
            self.content: dict[int, Prefix] = {}
            self.issued: dict[int, int] = {}
            self.clock = 0
            self.followed: set[tuple[int, int, int]] = set()

        # -- what the model knows

        def leased(self) -> set[Prefix]:
            return {s.prefix(n) for s in self.sequences.values() for n in range(1, s.committed + 1)}

        def evictable(self) -> list[tuple[int, int, Prefix]]:
            leased = self.leased()
            return sorted((used, -len(p), p) for p, used in self.cached.items() if p not in leased)

        def num_free(self) -> int:
            return USABLE - len(self.cached) - sum(s.held - s.committed for s in self.sequences.values())

        def in_index(self) -> set[Prefix]:
            state, result = driver.state.radix, {0: ()}
            parent, depth, slot = (np.asarray(x) for x in (state.parent, state.depth, state.slot))
            tokens, space = np.asarray(state.tokens), np.asarray(state.namespace)[:, 0]
            for block in sorted(np.flatnonzero(slot >= 0).tolist(), key=lambda b: depth[b]):
                before = result[int(parent[block])] or (int(space[block]),)
                result[block] = (*before, *tokens[block].tolist())
            return set(result.values()) - {()}

        # -- what must hold after each rule

        def check(self) -> None:
            assert self.in_index() == set(self.cached)
            counters = driver.state.radix.read()
            assert int(counters.num_free) == self.num_free()
            assert int(counters.num_evictable) == len(self.evictable())
            table = np.asarray(driver.state.sequences.block_table[0])
            for index, sequence in self.sequences.items():
                for n in range(sequence.held):
                    block = int(table[index, n])
                    wanted = sequence.prefix(n + 1)
                    if n < sequence.committed:
                        assert self.content[block] == wanted, "a leased block holds another prefix"
                    elif self.content[block] != wanted:
                        self.content[block] = wanted
            ids = sorted(self.issued)
            assert all(now >= self.issued[i] for i, now in zip(ids, driver.handles(ids), strict=True))

        # -- rules

        @rule(
            index=st.integers(-1, 4),
            space=st.integers(0, 1),
            tokens=st.lists(st.integers(0, 1), max_size=12),
            want=st.integers(0, 7),
            reserve=st.integers(0, 3),
        )
        def admit(self, index: int, space: int, tokens: list[int], want: int, reserve: int) -> None:
            longest = max(
                (n for n in range(7) if n == 0 or (n * 2 < len(tokens) and (space, *tokens[: n * 2]) in self.cached)), default=0
            )
            leased, before = self.leased(), [tuple(tokens[: n * 2]) for n in range(1, longest + 1)]
            idle = sum((space, *p) not in leased for p in before)
            lack = max(want - longest, 0)
            fits = want <= 6 and reserve + lack + idle <= self.num_free() + len(self.evictable())
            found, status = driver.admit(index, tokens, space=space, want=want, reserve=reserve)
            if not 0 <= index < 4:
                assert (found, status) == (0, OK)
            elif index in self.sequences and self.sequences[index].held:
                assert (found, status) == (0, OUT_OF_BLOCKS)
            elif exact:
                assert (found, status) == ((longest * 2, OK) if fits else (0, OUT_OF_BLOCKS))
            assert found <= longest * 2
            assert found == 0 or found < len(tokens)
            if status == OK and 0 <= index < 4:
                self.sequences[index] = Sequence(space, tokens, found // 2)
            self.check()

        @rule(need=st.lists(st.integers(0, 7), min_size=4, max_size=4), rank=st.lists(st.integers(0, 3), min_size=4, max_size=4))
        def grow(self, need: list[int], rank: list[int]) -> None:
            order = sorted(self.sequences, key=lambda s: (rank[s], s))
            room, refused, wanted = self.num_free() + len(self.evictable()), False, {}
            for s in order:
                lack = max(need[s] - self.sequences[s].held, 0)
                refused = refused or (lack > 0 and (need[s] > 6 or lack > room))
                wanted[s] = (lack, OUT_OF_BLOCKS if refused and lack else OK)
                room -= 0 if refused else lack
            given = {s: lack for s, (lack, status) in wanted.items() if status == OK}
            missing = sum(given.values()) - self.num_free()
            order_of_going, index_before = self.evictable(), self.in_index()
            table_before = np.asarray(driver.state.sequences.block_table[0])
            table, status = driver.grow({s: need[s] for s in order}, dict(enumerate(rank)))
            assert {s: status[s] for s in order} == {s: st for s, (_, st) in wanted.items()}
            gone = index_before - self.in_index()
            assert len(gone) == max(missing, 0), "evicts exactly what is missing"
            keys_gone = sorted((used, depth) for used, depth, p in order_of_going if p in gone)
            assert keys_gone == [(used, depth) for used, depth, _ in order_of_going[: len(gone)]], "oldest first, deepest first"
            for p in gone:
                del self.cached[p]
            for s, lack in given.items():
                held = self.sequences[s].held
                assert (table[s, :held] == table_before[s, :held]).all(), "what was held stays"
                new = table[s, held : held + lack].tolist()
                assert all(g > self.issued.get(b, 0) for b, g in zip(new, driver.handles(new), strict=True)), "a new generation"
                self.issued.update(zip(new, driver.handles(new), strict=True))
                self.content.update((b, (-1,)) for b in new)
                self.sequences[s].held += lack
            self.check()

        @rule(index=st.integers(0, 3), tokens=st.lists(st.integers(0, 1), min_size=5, max_size=12), leave=st.booleans())
        def live(self, index: int, tokens: list[int], leave: bool) -> None:
            """A whole life, so that histories fill the pool and reach deep prefixes."""
            if index in self.sequences:
                self.release([s == index for s in range(4)])
            blocks = len(tokens) // 2
            self.admit(index, 0, tokens, blocks, 0)
            if index in self.sequences:
                self.grow([blocks if s == index else 0 for s in range(4)], [0, 1, 2, 3])
                for _ in range(2):
                    self.commit([s == index for s in range(4)])
                if leave:
                    self.release([s == index for s in range(4)])

        @rule(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=8), fork=st.integers(0, 8))
        def race(self, tokens: list[int], fork: int) -> None:
            """Two sequences with a common prefix, computed side by side and committed in one call."""
            self.release([True, True, False, False])
            blocks = len(tokens) // 2
            for index, last in ((0, []), (1, tokens[fork:])):
                self.admit(index, 0, [*tokens[: len(tokens) - len(last)], *(2 - t for t in last)], 0, 0)
            self.grow([blocks, blocks, 0, 0], [0, 1, 2, 3])
            self.commit([True, True, False, False])

        @rule(pick=st.integers(0, 3), more=st.lists(st.integers(0, 1), max_size=5))
        def decode(self, pick: int, more: list[int]) -> None:
            if pick in self.sequences:
                sequence = self.sequences[pick]
                sequence.tokens = [*sequence.tokens, *more][: SPEC.max_len]

        @rule(mask=st.lists(st.booleans(), min_size=4, max_size=4))
        def commit(self, mask: list[bool]) -> None:
            chosen = {s: q for s, q in self.sequences.items() if mask[s]}
            budget, expected = MAX_COMMITS, {}
            for s, q in sorted(chosen.items()):
                full = min(len(q.tokens) // 2, q.held)
                expected[s] = q.committed + max(0, min(full - q.committed, budget))
                budget -= expected[s] - q.committed
            driver.commit({s: q.tokens for s, q in chosen.items()})
            for s, q in chosen.items():
                reached = int(driver.state.sequences.committed[s])
                assert reached == expected[s] if exact else q.committed <= reached <= len(q.tokens) // 2
                q.committed = reached
            for prefix in self.leased() - set(self.cached):
                self.cached[prefix] = 0
            self.check()

        @rule(mask=st.lists(st.booleans(), min_size=4, max_size=4))
        def release(self, mask: list[bool]) -> None:
            self.clock += 1
            for s in [s for s in self.sequences if mask[s]]:
                q = self.sequences.pop(s)
                self.cached.update((q.prefix(n), self.clock) for n in range(1, q.committed + 1))
            events = driver.release(*np.flatnonzero(mask))
            if not events.overflow:
                self.follow(events)
            assert events.num_free.tolist() == [self.num_free(), self.num_free() + 2]
            assert events.num_evictable.tolist() == [len(self.evictable())] * 2
            self.check()

        def follow(self, events) -> None:
            """What a listener knows is what the index holds, in every group."""
            self.followed |= {tuple(e[:3]) for e in events.stored.tolist() if e[0] >= 0}
            self.followed -= {tuple(e) for e in events.removed.tolist() if e[0] >= 0}
            blocks = np.flatnonzero(np.asarray(driver.state.radix.slot) >= 0).tolist()
            assert self.followed == {(g, b, i) for g in (0, 1) for b, i in zip(blocks, driver.handles(blocks), strict=True)}

    return Histories


def test_random_histories_agree_with_a_dict_of_prefixes(fresh_driver, search):
    search(machine_for(fresh_driver(SPEC, max_commits=MAX_COMMITS, max_events=64), exact=True), examples=40, steps=40)


def test_colliding_keys_cost_hits_but_never_give_a_wrong_block(fresh_driver, search, monkeypatch):
    good = keys.address

    def poor(key, buckets):
        bucket, tag = good(key, buckets)
        return bucket * 0, tag & np.uint32(3)

    monkeypatch.setattr(keys, "address", poor)
    search(machine_for(fresh_driver(SPEC, max_commits=MAX_COMMITS, max_events=64), exact=False), examples=15, steps=30)
