"""Host memory cut into slots: mapped once, aligned for direct I/O, in huge pages and locked where the system allows, near a NUMA node.

Touches memory outside Python's allocator. Knows no keys.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from octavo_offload._src import numa

PAGE: Final = 4096
"""Alignment of slots: that of direct I/O, and a multiple of the 64 bytes XLA wants."""
_HUGE: Final = 2 << 20
_MAP_HUGETLB: Final = 0x40000
_FREE_HUGE: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def aligned(size: int, to: int = PAGE) -> int:
    """The next multiple of a page."""
    return -(-size // to) * to


class Slab:
    """Anonymous memory of `num_slots` slots.

    Args:
        num_slots: How many.
        slot_bytes: Of each; rounded up to a page.
        lock: Keep it from being swapped out, as an accelerator's transfers want.
        node: Memory node to take it from; None: wherever it is first written.

    Attributes:
        told: What the system granted, in words.
        whole: All of it.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, lock: bool = False, node: int | None = None) -> None:
        self.num_slots, self.slot_bytes = num_slots, aligned(slot_bytes)
        size = num_slots * self.slot_bytes
        self._map, pages = _map(size)
        words = [pages]
        if node is not None:  # before anything is written or locked: pages that are there stay where they are
            is_bound = numa.prefer(address(memoryview(self._map)), len(self._map), node)
            words.append(f"node {node}" if is_bound else f"not bound to node {node} (mbind is not allowed)")
        if lock:
            words.append(self._lock())
        self.told = ", ".join(words)
        self._view = self.whole = memoryview(self._map)[:size]

    def _lock(self) -> str:
        try:
            status = ctypes.CDLL(None, use_errno=True).mlock(
                ctypes.c_void_p(address(memoryview(self._map))), ctypes.c_size_t(len(self._map))
            )
        except (OSError, AttributeError):
            status = -1
        return "locked" if status == 0 else "not locked (raise the memlock limit)"

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        start = index * self.slot_bytes
        return self._view[start : start + self.slot_bytes]


def _map(size: int) -> tuple[mmap.mmap, str]:
    """Memory, and in which pages: reserved huge ones where enough of them are free, else transparent ones where the system has them."""
    with contextlib.suppress(OSError, ValueError):
        if int(_FREE_HUGE.read_text()) * _HUGE >= aligned(size, _HUGE) > 0:
            return mmap.mmap(-1, aligned(size, _HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB), "2 MiB pages"
    memory = mmap.mmap(-1, size)
    with contextlib.suppress(OSError, AttributeError, ValueError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        return memory, "huge pages where free"
    return memory, "small pages"


class Slabs:
    """One slab for each memory node, numbered as one.

    Args:
        num_slots: Of all together.
        slot_bytes: Of each.
        lock: As of `Slab`.
        nodes: Memory nodes; with fewer than two there is one slab, wherever it is first written.

    Attributes:
        told: What the system granted, in words.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, lock: bool = False, nodes: Sequence[int] = ()) -> None:
        wanted: Sequence[int | None] = nodes if 1 < len(nodes) <= num_slots else (None,)
        shares = [num_slots // len(wanted) + (i < num_slots % len(wanted)) for i in range(len(wanted))]
        self.parts = [Slab(n, slot_bytes, lock=lock, node=node) for n, node in zip(shares, wanted, strict=True)]
        self.num_slots, self.slot_bytes = num_slots, aligned(slot_bytes)
        self._places = [(part, i) for i in range(max(shares)) for part in self.parts if i < part.num_slots]
        self.told = "; ".join(dict.fromkeys(part.told for part in self.parts))

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot. Neighbours lie on different nodes, so that what is written one after the other uses the memory of all."""
        part, place = self._places[index]
        return part.slot(place)


def address(view: memoryview) -> int:
    """Where a buffer begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
