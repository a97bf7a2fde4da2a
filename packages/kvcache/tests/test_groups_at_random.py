"""Random histories of caches with windows, recurrent states and full attention together, against a model of what each group keeps.

The model says how many tokens a prompt finds, whom a full pool refuses and what is given up; its KV memory says whether every block in
reach contains what a model would read there.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec

pytestmark = pytest.mark.slow

BS, ROWS, MOST = 2, 3, 5
SPECS = {
    "full and window": CacheSpec((14, 6), BS, ROWS, MOST, ("full", "window"), (0, 3)),
    "full and long window": CacheSpec((14, 7), BS, ROWS, MOST, ("full", "window"), (0, 4)),
    "full and state": CacheSpec((14, 6), BS, ROWS, MOST, ("full", "state")),
    "latent, window and state": CacheSpec((14, 7, 6), BS, ROWS, MOST, ("latent", "window", "state"), (0, 2, 0)),
    "window": CacheSpec((6,), BS, ROWS, MOST, ("window",), (3,)),
    "window and state": CacheSpec((6, 7), BS, ROWS, MOST, ("window", "state"), (1, 0)),
}
TOKENS = st.lists(st.integers(0, 1), max_size=BS * MOST)
MASK = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)


@dataclasses.dataclass
class Row:
    """A sequence; `columns` are those of its blocks that it still leases, for each side group."""

    tokens: list[int]
    held: int
    committed: int
    computed: int
    columns: list[set[int]]
    tail: tuple[int, ...] | None = None

    def prefix(self, blocks: int) -> tuple[int, ...]:
        return tuple(self.tokens[: blocks * BS])


def machine_for(driver):
    spec = driver.spec
    sides = [g for g in range(spec.groups) if spec.kinds[g] in ("window", "state")]
    reach = [1 if spec.kinds[g] == "state" else (spec.windows[g] - 1 + BS - 1) // BS for g in sides]
    offset = 0 if len(sides) < spec.groups else 1

    class Histories(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            driver.reset()
            self.rows: dict[int, Row] = {}
            self.nodes: dict[tuple[int, ...], int] = {}
            self.owned: list[dict[tuple[int, ...], int]] = [{} for _ in sides]
            self.memory: dict[tuple[int, int], object] = {}

        # -- what the cache says

        def read(self) -> None:
            """Which prefixes the tree has, and which blocks they own in side groups."""
            radix = driver.host.radix
            name: dict[int, tuple[int, ...]] = {0: ()}
            for block in sorted(np.flatnonzero(radix.slot >= 0).tolist(), key=lambda b: int(radix.depth[b])):
                name[block] = (*name[int(radix.parent[block])], *radix.tokens[block].tolist())
            self.nodes = {p: b for b, p in name.items() if b}
            self.owned = [{p: int(side.node_block[b]) for p, b in self.nodes.items() if side.node_block[b]} for side in radix.sides]

        def table(self, index: int, group: int) -> np.ndarray:
            return driver.host.sequences.block_table[offset + group, index]

        def leased(self, number: int) -> set[int]:
            """Blocks of a side group that rows or copies to come lease."""
            blocks = {int(self.table(i, sides[number])[c]) for i, row in self.rows.items() for c in row.columns[number]}
            return blocks | {self.owned[number][row.tail] for row in self.rows.values() if row.tail}

        def room(self, number: int) -> int:
            return spec.num_blocks[sides[number]] - 1 - len(self.leased(number))

        # -- what must hold after each rule

        def check(self) -> None:
            before = set(self.nodes)
            self.read()
            assert set(self.nodes) == before
            for number, side in enumerate(driver.host.radix.sides):
                assert side.counts.sum() == self.room(number)
            for index, row in self.rows.items():
                for number, group in enumerate(sides):
                    assert set(np.flatnonzero(self.table(index, group)).tolist()) == row.columns[number]
                for group in range(spec.groups):
                    self.check_content(index, row, group)

        def check_content(self, index: int, row: Row, group: int) -> None:
            """What the next token reads is there."""
            upto = min(row.computed, row.held * BS)
            if spec.kinds[group] == "state":
                assert self.snapshot(index, row, group, upto), "no snapshot to go on from"
                return
            first = max(0, upto + 1 - spec.windows[group]) if spec.kinds[group] == "window" else 0
            for at in range(first, upto):
                block = int(self.table(index, group)[at // BS])
                assert block, "a token in reach has no block"
                assert self.memory[(group, block)][at % BS] == tuple(row.tokens[: at + 1]), "a block holds other KV"

        def snapshot(self, index: int, row: Row, group: int, upto: int) -> bool:
            """Whether the state after `upto` tokens is in the block they end in, or in the one the next block was copied from."""
            columns = {max(upto - 1, 0) // BS, upto // BS}
            blocks = [int(self.table(index, group)[c]) for c in columns if c < spec.max_blocks]
            return upto == 0 or any(b and self.memory.get((group, b)) == tuple(row.tokens[:upto]) for b in blocks)

        # -- rules

        def matched(self, tokens: list[int]) -> int:
            """Blocks found: the longest cached prefix whose last blocks every side group has."""
            found = 0
            for n in range(1, max(len(tokens) - 1, 0) // BS + 1):
                if tuple(tokens[: n * BS]) not in self.nodes:
                    break
                near = [[tuple(tokens[: m * BS]) for m in range(max(1, n - r + 1), n + 1)] for r in reach]
                if all(p in own for own, prefixes in zip(self.owned, near, strict=True) for p in prefixes):
                    found = n
            return found

        def partly(self, tokens: list[int], blocks: int) -> int:
            """Tokens of the next block that a cached block of every group has."""
            start, most = tuple(tokens[: blocks * BS]), len(tokens) - 1 - blocks * BS
            there = [p for p in self.nodes if p[:-BS] == start and all(p in own for own in self.owned)]
            return 1 if most >= 1 and any(p[-BS] == tokens[blocks * BS] for p in there) else 0

        @rule(index=st.integers(0, ROWS - 1), tokens=TOKENS)
        def admit(self, index, tokens) -> None:
            blocks, tail = self.matched(tokens), self.partly(tokens, self.matched(tokens))
            found, status = driver.admit(index, tokens, want=0)
            old = self.rows.get(index)
            if old and (old.held or old.tail):
                assert (found, status) == (0, OUT_OF_BLOCKS)
                return self.check()
            expected = {blocks * BS + tail} if tail and driver.object.partial else {blocks * BS}
            if tail and driver.object.partial:
                expected.add(blocks * BS)  # where the block to copy is the last one there is
            assert status == OK
            assert found in expected
            self.rows[index] = row = Row(tokens, blocks, blocks, found, [set(range(max(0, blocks - r), blocks)) for r in reach])
            node = int(driver.host.sequences.tail[index])
            row.tail = next((p for p, b in self.nodes.items() if b == node), None)
            assert bool(row.tail) == (found % BS > 0)
            self.check()

        @rule(need=st.lists(st.integers(0, MOST + 1), min_size=ROWS, max_size=ROWS), rank=st.permutations(range(ROWS)))
        def grow(self, need, rank) -> None:
            for row in self.rows.values():
                for number, back in enumerate(reach):
                    limit = min(row.held - 1, row.committed) - back
                    row.columns[number] -= set(range(limit))
            rooms = [self.room(n) for n in range(len(sides))]
            held = sum(row.held - row.committed for row in self.rows.values())
            paths = {row.prefix(n) for row in self.rows.values() for n in range(1, row.committed + 1)}
            paths |= {row.tail for row in self.rows.values() if row.tail}
            rooms.append(driver.host.radix.free.shape[0] - 1 - held - len(paths))
            refused, given = False, {}
            for index in sorted(self.rows, key=lambda i: rank[i]):
                lack = max(need[index] - self.rows[index].held, 0)
                refused = refused or (lack > 0 and (need[index] > MOST or lack > min(rooms)))
                given[index] = 0 if refused else lack
                rooms = [n - given[index] for n in rooms]
            before, owned, leased = set(self.nodes), self.owned, [self.leased(n) for n in range(len(sides))]
            status = driver.grow({i: need[i] for i in self.rows}, dict(enumerate(rank)))[1]
            lacks = {i: max(need[i] - row.held, 0) for i, row in self.rows.items()}
            assert {i: status[i] for i in self.rows} == {i: OK if given[i] == lacks[i] else OUT_OF_BLOCKS for i in self.rows}
            self.follow(before, owned, leased, paths)
            self.copy(given)
            for index, more in given.items():
                row = self.rows[index]
                for columns in row.columns:
                    columns |= set(range(row.held, row.held + more))
                row.held += more
                row.tail = None if more else row.tail
            self.check()

        def follow(self, before, owned, leased, paths) -> None:
            """What went was leased by nobody, and in the tree nothing before its descendants."""
            self.read()
            gone = before - set(self.nodes)
            assert not gone & paths
            assert not any(p[: len(q)] == q for q in gone for p in self.nodes)
            for number in range(len(sides)):
                lost = {p: b for p, b in owned[number].items() if p not in self.owned[number]}
                assert not set(lost.values()) & leased[number], "a leased block of a side group went"

        def copy(self, given) -> None:
            """Every copy is planned that is needed and no other; all are read before any is written."""
            read = {}
            for group in range(spec.groups):
                for index in range(ROWS):
                    source, target = driver.copies[group, index].tolist()
                    row = self.rows.get(index)
                    grows = bool(row) and given.get(index, 0) > 0
                    wanted = grows and (row.held > 0 if spec.kinds[group] == "state" else row.tail is not None)
                    assert (source >= 0) == wanted
                    if wanted:
                        assert target == self.table(index, group)[row.held]
                        content = self.memory.get((group, source))
                        read[(group, target)] = list(content) if isinstance(content, list) else content
            self.memory.update(read)

        @rule(mask=MASK)
        def compute(self, mask) -> None:
            """What a step does: every token reads what is in reach and writes its own KV or state."""
            for index, row in self.rows.items():
                if not mask[index] or row.tail:
                    continue
                for at in range(row.computed, min(len(row.tokens), row.held * BS)):
                    for group in range(spec.groups):
                        block = int(self.table(index, group)[at // BS])
                        assert block
                        if spec.kinds[group] == "state":
                            self.memory[(group, block)] = tuple(row.tokens[: at + 1])
                        else:
                            content = self.memory.setdefault((group, block), [None] * BS)
                            content[at % BS] = tuple(row.tokens[: at + 1])
                row.computed = max(row.computed, min(len(row.tokens), row.held * BS))
            self.check()

        @rule(mask=MASK)
        def commit(self, mask) -> None:
            chosen = {i: row for i, row in self.rows.items() if mask[i] and not row.tail}
            driver.commit({i: row.tokens[: row.computed] for i, row in chosen.items()})
            for row in chosen.values():
                row.committed = max(row.committed, min(row.computed // BS, row.held))
            for index, row in self.rows.items():
                assert driver.host.sequences.committed[index] == row.committed
                self.nodes |= {row.prefix(n): 0 for n in range(1, row.committed + 1)}
            self.check()

        @rule(index=st.integers(0, ROWS - 1), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
        def decode(self, index, more) -> None:
            if row := self.rows.get(index):
                row.tokens = [*row.tokens, *more][: BS * MOST]

        @rule(mask=MASK)
        def release(self, mask) -> None:
            for index in [i for i in self.rows if mask[i]]:
                del self.rows[index]
            events = driver.release(*np.flatnonzero(mask))
            for number, group in enumerate(sides):
                assert events.num_free[group] + events.num_evictable[group] == self.room(number)
            self.check()

        @rule(index=st.integers(0, ROWS - 1), tokens=TOKENS, leave=st.booleans())
        def live(self, index, tokens, leave) -> None:
            """A whole life in steps of a block."""
            only = [i == index for i in range(ROWS)]
            self.release(only)
            self.admit(index, tokens)
            for blocks in range(1, -(-len(tokens) // BS) + 1):
                self.grow([blocks * now for now in only], list(range(ROWS)))
                self.compute(only)
                self.commit(only)
            if leave:
                self.release(only)

    return Histories


@pytest.mark.parametrize("name", list(SPECS))
def test_a_random_history_finds_and_keeps_what_the_model_says(fresh_driver, search, name):
    driver = fresh_driver(SPECS[name], partial=True, max_commits=8, max_events=64)
    search(machine_for(driver), examples=30, steps=10)
