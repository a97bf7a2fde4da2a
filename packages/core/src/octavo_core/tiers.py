"""What lies below device memory: the protocol of a tier of KV blocks, and what it answers.

Floor 1: a tier needs neither jax nor the sizes of a cache. Blocks are bytes under keys (`octavo_core.keys.tier_root`); what is in them is
the business of whoever gathered them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Answer(enum.IntEnum):
    """All that a tier ever says of a block. Whatever is in doubt is a MISS."""

    MISS = 0
    HIT_VERIFIED = 1


class Done(NamedTuple):
    """The end of one call: an answer for each of its keys, in order."""

    ticket: int
    answers: tuple[Answer, ...]


class Capacity(NamedTuple):
    """How much a tier may hold and holds, in bytes of its storage; `num_blocks` can be found."""

    total_bytes: int
    used_bytes: int
    num_blocks: int


@runtime_checkable
class Tier(Protocol):
    """Keeps blocks of one size under 32-byte keys. No method raises for what the storage does, and none waits for it.

    Buffers handed over belong to the tier until `poll` answers their ticket. Every ticket is answered once. A block can be found only
    when it is whole; a call that meets one half-written misses it.
    """

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Store blocks; answers a ticket. HIT_VERIFIED: the block can be found from now on, or could already; MISS: it was not stored."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Read blocks; answers a ticket. HIT_VERIFIED: the buffer holds what was stored under the key; MISS: it holds anything."""

    def poll(self) -> list[Done]:
        """What has ended since the last call."""

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys could be found now. A hint: a later `get` may miss."""

    def capacity(self) -> Capacity:
        """How full it is."""
