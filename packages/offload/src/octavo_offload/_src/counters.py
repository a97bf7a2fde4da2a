"""What a tier counts. Incremented by its threads under the tier's own lock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager


@dataclasses.dataclass
class Counters:
    """Since the start.

    Attributes:
        hits, misses: Blocks asked for, by answer. A corrupt block is a miss too.
        verified, corrupt: Blocks whose checksum was compared, by outcome.
        stored, dropped: Blocks handed over, by whether they were stored.
        evicted: Blocks that made room.
        errors: Calls the storage failed.
        read_bytes, written_bytes, read_s, write_s: Moved, and the seconds that took, summed over threads.
    """

    hits: int = 0
    misses: int = 0
    verified: int = 0
    corrupt: int = 0
    stored: int = 0
    dropped: int = 0
    evicted: int = 0
    errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


@contextmanager
def timed() -> Iterator[list[float]]:
    """Fills a list with the seconds the body took."""
    start, taken = time.perf_counter(), [0.0]
    try:
        yield taken
    finally:
        taken[0] = time.perf_counter() - start
