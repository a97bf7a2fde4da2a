"""Huge pages for what every step reads: weights and KV pools of the CPU device.

A block of KV lies anywhere in the pool; with pages of 4 KiB most of its reads miss the translation cache, and the processor's prefetching
stops at every page. Linux swaps a populated range for pages of 2 MiB in place (`MADV_COLLAPSE`, Linux 6.1); contents and addresses stay, so it is
done beside the first requests. A system set to `never` is left alone; where the call is unknown nothing changes.

Knows addresses; knows nothing of what lies there.
"""

from __future__ import annotations

import ctypes
import errno
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import jax

PAGE: Final = 2 << 20
_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_FINAL: Final = {errno.EINVAL, errno.EAGAIN}
_ENOUGH: Final = 0.9
"""Share of a page that must be ours: what else lies in it comes along."""


def begin(arrays: Any) -> tuple[str, str]:
    """Start to move the arrays of a tree to huge pages, in a thread of its own; answers what the start-up table says.

    The arrays may be donated or freed meanwhile: nobody reads or writes through the addresses.
    """
    setting = _setting()
    if setting is None or "[never]" in setting:
        return (
            "4 KiB",
            "this system has no transparent huge pages" if setting is None else "transparent huge pages are set to never",
        )
    pages = pages_of(ranges(arrays))
    threading.Thread(target=collapse, args=(pages,), name="octavo-huge-pages", daemon=True).start()
    return f"{len(pages)} of 2 MiB", "asked for in the background: weights and KV pools"


def ranges(arrays: Any) -> list[tuple[int, int]]:
    """Address and bytes of every array's part on every device of this process."""
    parts = (shard.data for array in jax.tree.leaves(arrays) if isinstance(array, jax.Array) for shard in array.addressable_shards)
    return [(part.unsafe_buffer_pointer(), part.nbytes) for part in parts]


def pages_of(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Addresses of the huge pages that the ranges nearly fill, in order."""
    filled: Counter[int] = Counter()
    for address, size in set(ranges):
        for page in range(address // PAGE, (address + size + PAGE - 1) // PAGE):
            filled[page] += min(address + size, (page + 1) * PAGE) - max(address, page * PAGE)
    return sorted(page * PAGE for page, share in filled.items() if share >= _ENOUGH * PAGE)


def collapse(pages: Iterable[int]) -> int:
    """Swap the pages at these addresses for huge ones, one call each; answers how many were.

    A page that is gone or busy is left out. Ends where the system does not know the call, or has no room left.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    for address in pages:
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), _MADV_HUGEPAGE)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), _MADV_COLLAPSE):
            if ctypes.get_errno() in _FINAL:
                break
        else:
            done += 1
    return done


def _setting() -> str | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return _SETTING.read_text()
    except OSError:
        return None
