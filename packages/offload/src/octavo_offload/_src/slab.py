"""One piece of host memory cut into slots: mapped once, aligned for direct I/O, in huge pages and locked where the system allows.

Touches memory outside Python's allocator. Knows no keys.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

import numpy as np

PAGE: Final = 4096
"""Alignment of slots: that of direct I/O, and a multiple of the 64 bytes XLA wants."""


def aligned(size: int) -> int:
    """The next multiple of a page."""
    return -(-size // PAGE) * PAGE


class Slab:
    """Anonymous memory of `num_slots` slots.

    Args:
        num_slots: How many.
        slot_bytes: Of each; rounded up to a page.
        lock: Keep it from being swapped out, as an accelerator's transfers want.

    Attributes:
        told: What the system granted, in words.
        whole: All of it.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, lock: bool = False) -> None:
        self.num_slots, self.slot_bytes = num_slots, aligned(slot_bytes)
        self._map = mmap.mmap(-1, num_slots * self.slot_bytes)
        words = [self._want_huge_pages()]
        if lock:
            words.append(self._lock())
        self.told = ", ".join(words)
        self._view = self.whole = memoryview(self._map)

    def _want_huge_pages(self) -> str:
        with contextlib.suppress(OSError, AttributeError, ValueError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
            return "huge pages where free"
        return "small pages"

    def _lock(self) -> str:
        start = np.frombuffer(self._map, np.uint8).ctypes.data
        try:
            status = ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(start), ctypes.c_size_t(len(self._map)))
        except (OSError, AttributeError):
            status = -1
        return "locked" if status == 0 else "not locked (raise the memlock limit)"

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        start = index * self.slot_bytes
        return self._view[start : start + self.slot_bytes]


def address(view: memoryview) -> int:
    """Where a buffer begins."""
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
