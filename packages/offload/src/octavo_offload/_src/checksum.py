"""The checksum every stored block carries: xxh3, seeded by its key, so that right bytes under a wrong name are wrong."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xxhash

_PART: Final = 128 << 10
"""Bytes that are hashed right after they were copied: they are in the core's cache then."""


def checksum(key: bytes, data: memoryview) -> int:
    """64 bits over the bytes. Not cryptographic: it finds damage, not forgery."""
    return xxhash.xxh3_64_intdigest(data, seed=int.from_bytes(key[:8], "little"))


def copy(into: Any, data: Any) -> None:
    """Copy bytes without holding the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def copy_and_seal(key: bytes, into: Any, data: Any) -> int:
    """Copy bytes without holding the interpreter's lock; answers the checksum of the copy. Cost: memory is read once."""
    target, source = np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8)
    hasher = xxhash.xxh3_64(seed=int.from_bytes(key[:8], "little"))
    for start in range(0, len(source), _PART):
        part = target[start : start + _PART]
        np.copyto(part, source[start : start + _PART])
        hasher.update(part.data)
    return hasher.intdigest()
