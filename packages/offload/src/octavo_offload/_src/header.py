"""The page in front of every block on disk: whose it is, which write it comes from, what its bytes must hash to.

A header and its block are written in one call; a crash amid it leaves a header whose own checksum fails, or a block that does not
hash to what the header says. Both are as if nothing were there.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import xxhash

from octavo_offload._src.slab import PAGE

MAGIC: Final = b"OCTVKV01"
_FIELDS: Final = struct.Struct("<8sQ32s32sQQ")
_SEAL: Final = struct.Struct("<Q")


class Header(NamedTuple):
    """Of one slot. `sequence` rises with every write to a folder: of two slots with one key the later counts."""

    sequence: int
    key: bytes
    identity: bytes
    length: int
    seal: int


def pack(header: Header, page: memoryview) -> None:
    """Write a header over a page."""
    _FIELDS.pack_into(page, 0, MAGIC, header.sequence, header.key, header.identity, header.length, header.seal)
    _SEAL.pack_into(page, _FIELDS.size, xxhash.xxh3_64_intdigest(page[: _FIELDS.size]))


def unpack(page: memoryview) -> Header | None:
    """Read a header; None where there is no whole one."""
    if len(page) < PAGE:
        return None
    magic, sequence, key, identity, length, seal = _FIELDS.unpack_from(page, 0)
    (own,) = _SEAL.unpack_from(page, _FIELDS.size)
    if magic != MAGIC or own != xxhash.xxh3_64_intdigest(page[: _FIELDS.size]):
        return None
    return Header(sequence, key, identity, length, seal)
