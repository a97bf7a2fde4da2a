"""The checksum every stored block carries: xxh3, seeded by its key, so that right bytes under a wrong name are wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import xxhash

_PART: Final = 512 << 10
"""Bytes that are hashed right after they were copied: they are in the core's cache then, and few calls take the interpreter's lock."""


def checksum(key: bytes, data: memoryview) -> int:
    """64 bits over the bytes. Not cryptographic: it finds damage, not forgery."""
    return xxhash.xxh3_64_intdigest(data, seed=int.from_bytes(key[:8], "little"))


def copy(into: Any, data: Any) -> None:
    """Copy bytes without holding the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def copy_and_seal(key: bytes, pairs: Iterable[tuple[Any, Any]]) -> int:
    """Copy bytes, each pair's second over its first, without holding the interpreter's lock; answers the checksum of the copies, one after the other.

    Cost: memory is read once.
    """
    hasher = xxhash.xxh3_64(seed=int.from_bytes(key[:8], "little"))
    for into, data in pairs:
        target, source = np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
        for start in range(0, len(source), _PART):
            part = target[start : start + _PART]
            np.copyto(part, source[start : start + _PART])
            hasher.update(part.data)
    return hasher.intdigest()
