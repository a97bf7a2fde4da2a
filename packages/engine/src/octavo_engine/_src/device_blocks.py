"""Books on the device's blocks, by key: where each of them is, and how much of a prompt is there.

Knows no tier and no bytes. A block of tokens has a device block in each *part*: one for all groups that keep every block (where there are
such groups), and one for each group that keeps the last few only. Parts come and go by themselves; a part that is not in the books may be
on the device nevertheless, never the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from octavo_core.specs import CacheSpec

Name = tuple[int, int, int]
"""Part, block, generation."""


@dataclasses.dataclass(frozen=True)
class There:
    """Which leading blocks of a prompt are there: in the groups that keep every block, and in each of the others."""

    whole: list[bool]
    sides: list[list[bool]]

    def joined(self, brought: Mapping[int, bool]) -> There:
        """With blocks from elsewhere, by column: True for those with the bytes of every group."""
        whole = [is_there or i in brought for i, is_there in enumerate(self.whole)]
        sides = [[is_there or brought.get(i, False) for i, is_there in enumerate(side)] for side in self.sides]
        return There(whole, sides)


class DeviceBlocks:
    """One cache's.

    Args:
        spec: Of the cache.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.has_whole, self.reaches = bool(spec.whole_groups), spec.reaches
        parts = [spec.whole_groups] if self.has_whole else []
        self.groups: list[tuple[int, ...]] = [*parts, *((g,) for g in spec.side_groups)]
        self._part_of = {groups[0]: part for part, groups in enumerate(self.groups)}
        self._names: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._ids: dict[bytes, list[int]] = {}

    @property
    def first_side(self) -> int:
        """Part of the first group that keeps the last few blocks only."""
        return int(self.has_whole)

    def named(self, listed: Iterable[Sequence[int]]) -> list[Name]:
        """Events of groups as those of parts: a part's first group speaks for it."""
        return [(part, block, gen) for group, block, gen, *_ in listed if (part := self._part_of.get(group)) is not None]

    def enter(self, name: Name, key: bytes) -> None:
        """A block can be found under its key."""
        part, block, generation = name
        old = self._names.get((part, block))
        if old is not None:
            self.strike((part, block, old[0]))
        self._names[part, block] = generation, key
        self._ids.setdefault(key, [0] * len(self.groups))[part] = block

    def strike(self, name: Name) -> None:
        """A block is gone."""
        key = self.key_of(name)
        if key is None:
            return
        part, block, _ = name
        del self._names[part, block]
        ids = self._ids[key]
        if ids[part] == block:
            ids[part] = 0
            if not any(ids):
                del self._ids[key]

    def key_of(self, name: Name) -> bytes | None:
        """The key of a block in this use of it."""
        part, block, generation = name
        known = self._names.get((part, block))
        return known[1] if known is not None and known[0] == generation else None

    def ids(self, key: bytes) -> tuple[int, ...]:
        """The block of each part; 0 where there is none."""
        return tuple(self._ids.get(key, [0] * len(self.groups)))

    def items(self) -> Iterable[tuple[Name, bytes]]:
        """All that is known."""
        return [((part, block, gen), key) for (part, block), (gen, key) in self._names.items()]

    def clear(self) -> None:
        """Nothing is known any more."""
        self._names.clear()
        self._ids.clear()

    def of(self, keys: Sequence[bytes]) -> There:
        """What of a prompt is on the device. Where no group keeps every block there is nothing of it to be missed."""
        ids = [self.ids(key) for key in keys]
        whole = [not self.has_whole or row[0] > 0 for row in ids]
        first = longest_run(whole)
        sides = [[row[part] > 0 for row in ids] for part in range(self.first_side, len(self.groups))]
        return There([i < first for i in range(len(keys))], sides)

    def end(self, there: There) -> int:
        """Blocks of the longest prefix that a sequence can go on from: `longest_end` for these groups."""
        return longest_end(there, self.reaches)

    def lacking(self, there: There, end: int) -> list[int]:
        """Columns that are needed for a prefix of `end` blocks and are not all there."""
        needed = [i for i in range(end) if not there.whole[i]]
        for side, reach in zip(there.sides, self.reaches, strict=True):
            needed += [i for i in range(max(end - reach, 0), end) if not side[i]]
        return sorted(set(needed))


def longest_run(flags: Sequence[bool]) -> int:
    """Leading entries that are true."""
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


def longest_end(there: There, reaches: Sequence[int]) -> int:
    """The longest prefix whose every block is there in the groups that keep all, and whose last `reach` blocks are in each of the others."""
    best, runs = 0, [0] * len(reaches)
    for i in range(longest_run(there.whole)):
        runs = [run + 1 if side[i] else 0 for run, side in zip(runs, there.sides, strict=True)]
        if all(run >= min(reach, i + 1) for run, reach in zip(runs, reaches, strict=True)):
            best = i + 1
    return best
