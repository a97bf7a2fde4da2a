"""A plain model of the cache: a set of prefixes, what each sequence holds, who pins and borrows what, and what KV memory contains.

Written from the docstrings, in sets and loops, without the cache's code. Loaded by the fixture `model`, so that tests need
no package around them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_kvcache._src.share import MARKS

Prefix = tuple[int, ...]
"""Tenant, namespace, then the tokens of whole blocks."""


@dataclasses.dataclass
class Row:
    """A sequence: what it is to hold and how far its KV is right.

    Attributes:
        tail: The cached block whose first tokens are to be copied, until it is.
        computed: Tokens whose KV is stored in the row's blocks (or will be, once `tail` is copied).
        is_loading: Its KV is on the way from elsewhere.
    """

    tenant: int
    space: int
    tokens: list[int]
    held: int = 0
    committed: int = 0
    computed: int = 0
    tail: Prefix | None = None
    is_loading: bool = False

    def prefix(self, blocks: int, block_size: int) -> Prefix:
        return (self.tenant, self.space, *self.tokens[: blocks * block_size])


class Model:
    """See the module. Sizes are those of a spec whose groups all keep every block."""

    def __init__(self, spec: Any, quotas: tuple[int, ...], max_commits: int) -> None:
        self.spec, self.size, self.quotas, self.max_commits = spec, spec.block_size, quotas or (0,), max_commits
        self.cached: set[Prefix] = set()
        self.rows: dict[int, Row] = {}
        self.pins: list[tuple[Prefix, list[int], list[int]]] = []
        self.loans: list[tuple[list[Prefix], Any]] = []
        self.memory: dict[tuple[int, int], list[Prefix | None]] = {}

    # -- the books

    def path(self, prefix: Prefix) -> list[Prefix]:
        """A prefix and what it follows, first block first."""
        return [prefix[:n] for n in range(2 + self.size, len(prefix) + 1, self.size)]

    def leases(self) -> Counter[Prefix]:
        """Leases on each cached prefix."""
        ends = [row.prefix(row.committed, self.size) for row in self.rows.values()]
        ends += [prefix for prefix, _, _ in self.pins]
        ends += [prefix for lent, _ in self.loans for prefix in lent]
        count = Counter(p for end in ends for p in self.path(end))
        count.update(row.tail for row in self.rows.values() if row.tail)
        return count

    def idle(self) -> list[Prefix]:
        """Cached prefixes that nobody leases."""
        leases = self.leases()
        return sorted(p for p in self.cached if not leases[p])

    def by_tenant(self, prefixes: Iterable[Prefix]) -> list[int]:
        """How many belong to each tenant."""
        count = Counter(p[0] for p in prefixes)
        return [count[t] for t in range(len(self.quotas))]

    def used(self) -> list[int]:
        """Blocks of each tenant, cached and private."""
        used = self.by_tenant(self.cached)
        for row in self.rows.values():
            used[row.tenant] += row.held - row.committed
        return used

    def num_free(self) -> int:
        """Blocks nobody uses."""
        return self.spec.usable_blocks - sum(self.used())

    # -- what the operations should answer

    def matched(self, tenant: int, space: int, tokens: list[int]) -> tuple[int, int, list[Prefix]]:
        """Blocks found, tokens of the next block found, and the blocks that have those."""
        size, most = self.size, len(tokens) - 1
        start: Prefix = (tenant, space)
        while len(start) - 2 + size <= most and (*start, *tokens[len(start) - 2 :][:size]) in self.cached:
            start = (*start, *tokens[len(start) - 2 :][:size])
        found, best = (len(start) - 2) // size, 0
        common: dict[Prefix, int] = {}
        for child in (p for p in self.cached if len(p) == len(start) + size and p[: len(start)] == start):
            same = [a == b for a, b in zip(child[len(start) :], tokens[len(start) - 2 : most], strict=False)]
            common[child] = same.index(False) if False in same else len(same)
            best = max(best, common[child])
        return found, best, [p for p, n in common.items() if n == best > 0]

    def spare(self, tenant: int) -> int:
        """Blocks that a tenant could be given: free ones, its own idle ones, and others' idle ones beyond their quotas."""
        idle = self.by_tenant(self.idle())
        beyond = [min(i, max(u - q, 0)) for i, u, q in zip(idle, self.used(), self.quotas, strict=True)]
        return self.num_free() + sum(beyond) - beyond[tenant] + idle[tenant]

    def can_give(self, given: list[int]) -> bool:
        """Whether each tenant could be given so many blocks at once."""
        idle, used = self.by_tenant(self.idle()), self.used()
        may_lose = [min(i, max(u - q, 0) + g) for i, u, q, g in zip(idle, used, self.quotas, given, strict=True)]
        return sum(given) <= self.num_free() + sum(may_lose)

    def growth(self, need: list[int], rank: list[int]) -> dict[int, tuple[int, int]]:
        """For each row the blocks it is given and its status."""
        given, refused, answer = [0] * len(self.quotas), False, {}
        for index in sorted(self.rows, key=lambda r: (rank[r], r)):
            row = self.rows[index]
            lack = max(need[index] - row.held, 0)
            more = [g + lack * (t == row.tenant) for t, g in enumerate(given)]
            refused = refused or (lack > 0 and (need[index] > self.spec.max_blocks or not self.can_give(more)))
            answer[index] = (0, OUT_OF_BLOCKS if lack else OK) if refused else (lack, OK)
            given = given if refused else more
        return answer

    def commits(self, mask: list[bool]) -> dict[int, int]:
        """Blocks each row has committed after a call."""
        budget, answer = self.max_commits, {}
        for index in sorted(i for i in self.rows if mask[i]):
            row = self.rows[index]
            more = max(0, min(min(row.computed // self.size, row.held) - row.committed, budget))
            answer[index] = row.committed + more
            budget -= more
        return answer

    def settled(self, lent: list[Prefix], stored: list[bool]) -> set[Prefix]:
        """What goes when a loan, already taken off the books, ends."""
        leases = self.leases()
        gone = {p for p, there in zip(lent, stored, strict=True) if there and not leases[p]}
        while bad := {p for p in gone if any(q[: -self.size] == p and q not in gone for q in self.cached)}:
            gone -= bad
        return gone

    # -- KV memory

    def write(self, row: Row, tables: np.ndarray, upto: int) -> None:
        """Store the KV of a row's tokens from where it is right up to `upto`, in every group."""
        for at in range(row.computed, upto):
            for group in range(self.spec.groups):
                block = self.memory.setdefault((group, int(tables[group, at // self.size])), [None] * self.size)
                block[at % self.size] = (row.tenant, row.space, *row.tokens[: at + 1])
        row.computed = max(row.computed, upto)

    def copy(self, copies: np.ndarray) -> None:
        """Copy blocks as a device would: all are read before any is written."""
        pairs = [(g, *pair) for g, group in enumerate(copies.tolist()) for pair in group if pair[0] >= 0]
        read = {(group, target): list(self.memory[(group, source)]) for group, source, target in pairs}
        self.memory.update(read)

    def contains(self, group: int, block: int, prefix: Prefix, length: int) -> bool:
        """Whether a block has the KV of the first `length` tokens of the last block of a prefix."""
        start = 2 + (len(prefix) - 3) // self.size * self.size
        wanted = [prefix[: start + n + 1] for n in range(length)]
        return self.memory.get((group, block), [None] * self.size)[:length] == wanted


def blocks_of(radix: Any) -> dict[Prefix, int]:
    """The block of each prefix in a tree's index, read from the tree."""
    name: dict[int, Prefix] = {}
    for block in sorted(np.flatnonzero(radix.slot >= 0).tolist(), key=lambda b: int(radix.depth[b])):
        parent = int(radix.parent[block])
        tenant = int(radix.tenant[block])
        root = (tenant, int(radix.namespace[block, 0]) ^ tenant * int(MARKS[0]) % 2**32)
        name[block] = (*(name[parent] if parent else root), *radix.tokens[block].tolist())
    return {prefix: block for block, prefix in name.items()}
