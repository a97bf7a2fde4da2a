"""Fetch or recompute: what reading blocks costs, measured, against what computing them costs, measured.

Knows numbers only. A tier that has become slow is not waited for; now and then one block is read beside serving, to see whether it
has become fast again.
"""

from __future__ import annotations

import threading
from typing import Final, Literal

WORTH: Final = 0.8
"""Share of the time of recomputing that fetching may take."""

_KEEP_SLOWER: Final = 0.7
_KEEP_FASTER: Final = 0.4
_PROBE_EVERY: Final = 8
_LEAST_S: Final = 0.002

Choice = Literal["all", "host", "nothing"]


class Meter:
    """Seconds a block takes, as a moving average that believes good news sooner than bad.

    Args:
        first_s: Assumed until something was measured.
    """

    def __init__(self, first_s: float) -> None:
        self.block_s = first_s
        self._lock = threading.Lock()

    def saw(self, num_blocks: int, seconds: float) -> None:
        """So many blocks took so long together."""
        if num_blocks > 0:
            seen = seconds / num_blocks
            with self._lock:
                keep = _KEEP_SLOWER if seen > self.block_s else _KEEP_FASTER
                self.block_s = keep * self.block_s + (1 - keep) * seen


class Chooser:
    """Decides for each request.

    Args:
        host, disk: What blocks of each tier take.
    """

    def __init__(self, host: Meter, disk: Meter) -> None:
        self.host, self.disk = host, disk
        self._refusals = 0

    def choose(self, num_host: int, num_disk: int, pending: int, recompute_block_s: float) -> tuple[Choice, float]:
        """Which blocks to fetch, and how long to wait for the disk.

        Args:
            num_host: Leading blocks in host memory.
            num_disk: Those after them, some of which are on disk.
            pending: Blocks that other requests wait for on the disk.
            recompute_block_s: What the engine needs to compute a block.
        """
        num = num_host + num_disk
        fetch_s = num * self.host.block_s + (num_disk + pending) * self.disk.block_s
        if fetch_s < WORTH * num * recompute_block_s:
            return "all", max(_LEAST_S, WORTH * num * recompute_block_s)
        if num_host and self.host.block_s < WORTH * recompute_block_s:
            return "host", 0.0
        return "nothing", 0.0

    def should_probe(self) -> bool:
        """Whether it is time to look again at a disk that was not worth it."""
        self._refusals += 1
        return self._refusals % _PROBE_EVERY == 1
