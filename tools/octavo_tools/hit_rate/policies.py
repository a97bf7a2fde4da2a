"""Which block goes: rules for the stamp of a block, in plain Python.

A block has a stamp of two integers. When a sequence ends, every block of its path gets `touch(stamp, use)`, and eviction takes the
smallest (stamp, -depth). `touch` never lowers a stamp and keeps the order of two stamps, so an ancestor's stamp is never
below its descendant's, and no block goes before those that need it. The first part of a stamp counts only for `lifetime`
sequences after the last use. Time is the number of sequences that have ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

Stamp = tuple[int, int]
"""A value, then a time."""

NEW: Stamp = (0, 0)
"""Stamp of a block that no ended sequence had."""

MAX_VALUE = 15


class Use(NamedTuple):
    """The end of a sequence.

    Attributes:
        clock: Now, from 1 up.
        floor: Time in the stamp of the block evicted last, 0 before.
        is_new: The path was extended by this sequence.
        path_len: Blocks of the path.
        output_len: Tokens the sequence generated.
        priority: Of the request.
    """

    clock: int
    floor: int
    is_new: bool
    path_len: int
    output_len: int
    priority: int


class Policy(Protocol):
    """An order of eviction."""

    @property
    def lifetime(self) -> int | None:
        """How long a value counts after the last use; None: it always does."""

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """The stamp of one block of a path that was used."""


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """By the last use."""

    lifetime: int | None = None

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """Now."""
        return 0, use.clock


@dataclasses.dataclass(frozen=True)
class FirstInFirstOut:
    """By the last time the path grew."""

    lifetime: int | None = None

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """Now, if the path grew."""
        return (0, use.clock) if use.is_new else stamp


@dataclasses.dataclass(frozen=True)
class LeastFrequentlyUsed:
    """By the number of uses up to 15, then by the last one."""

    lifetime: int | None = 1 << 12

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """One more."""
        return min(stamp[0] + 1, MAX_VALUE), use.clock


@dataclasses.dataclass(frozen=True)
class PriorityThenRecency:
    """By the highest priority a path was used with, then by the last use."""

    lifetime: int | None = 1 << 12

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """Part by part the larger."""
        return max(stamp[0], use.priority), use.clock


@dataclasses.dataclass(frozen=True)
class CostAware:
    """Greedy-dual: the floor or now, whichever is later, plus what the path is worth if it was used without growing.

    Attributes:
        again: Worth of any such path, in sequences; its blocks are added.
    """

    again: int = 256
    lifetime: int | None = None

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """Later by the worth."""
        worth = 0 if use.is_new else self.again + use.path_len
        return 0, max(stamp[1], max(use.floor, use.clock) + worth)


@dataclasses.dataclass(frozen=True)
class TwoLifetimes:
    """The least recently used goes first, but what promises to return stays twice as long.

    `clock - floor` is how long a block now stays without being used. A block that was in the cache before this use, or whose sequence
    had a short answer, is stamped that much later than now. No time is configured: a busier or smaller pool
    shortens the bonus by itself, and a pool in which even the bonus runs out falls back to the last use.

    Attributes:
        short: Longest answer, in tokens, that counts as short.
    """

    short: int = 64
    lifetime: int | None = None

    def touch(self, stamp: Stamp, use: Use) -> Stamp:
        """Now, or one lifetime later."""
        returns = stamp != NEW or use.output_len <= self.short
        return 0, max(stamp[1], use.clock + (max(0, use.clock - use.floor) if returns else 0))


POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "priority": PriorityThenRecency,
    "cost": CostAware,
    "two-lifetimes": TwoLifetimes,
}
"""By the name a row has."""
