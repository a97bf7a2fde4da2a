"""The checksum every stored block carries: xxh3, seeded by its key, so that right bytes under a wrong name are wrong."""

from __future__ import annotations

import xxhash


def checksum(key: bytes, data: memoryview) -> int:
    """64 bits over the bytes. Not cryptographic: it finds damage, not forgery."""
    return xxhash.xxh3_64_intdigest(data, seed=int.from_bytes(key[:8], "little"))
