"""Which memory nodes this machine has, and memory that belongs to one of them. Reads `/sys` and `/proc`; calls `mbind`.

Every call that the system refuses is answered in words: memory that is not where it was wanted is slower, not wrong.
"""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Final

_PREFERRED: Final = 1
_CALLS: Final = {"x86_64": (237, 239), "aarch64": (235, 236)}
"""Numbers of `mbind` and `get_mempolicy`: the C library has neither."""
_AT_ADDRESS: Final = 2
_MASK_BITS: Final = 1024
_MAX_NODE: Final = _MASK_BITS + 1
"""The kernel reads one bit less than it is told."""


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """Nodes that have memory and that this process may use; none where the system does not tell."""
    there = _parse(_read(root / "sys/devices/system/node/has_memory"))
    status = _read(root / "proc/self/status").splitlines()
    allowed = next((_parse(line.partition(":")[2]) for line in status if line.startswith("Mems_allowed_list")), there)
    return sorted(there & allowed)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _parse(text: str) -> set[int]:
    """Numbers of a list such as `0-1,4`; none of one that cannot be read."""
    nodes: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal():
            return set()
        nodes |= set(range(int(first), int(last) + 1))
    return nodes


def prefer(address: int, size: int, node: int) -> bool:
    """Have pages that are not there yet taken from a node while it has some; whether the system agreed."""
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    return _call(0, ctypes.c_void_p(address), ctypes.c_ulong(size), _PREFERRED, mask, ctypes.c_ulong(_MAX_NODE), 0) == 0


def preferred(address: int) -> int | None:
    """The node that was asked for at an address; None: none was, or the system does not tell."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * (_MASK_BITS // 64))()
    status = _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(_MAX_NODE), ctypes.c_void_p(address), _AT_ADDRESS)
    if status != 0 or mode.value != _PREFERRED:
        return None
    return next((64 * i + word.bit_length() - 1 for i, word in enumerate(mask) if word), None)


def _call(which: int, *arguments: object) -> int:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return -1
    try:
        call = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError):
        return -1
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(numbers[which]), *arguments))
