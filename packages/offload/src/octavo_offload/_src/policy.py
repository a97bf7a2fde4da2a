"""Fetch or recompute: what reading blocks costs, measured, against what computing them costs, measured.

Knows numbers only. A tier that has become slow is not waited for; now and then one block is read beside serving, to see whether it
has become fast again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

WORTH: Final = 0.8
"""Share of the time of recomputing that fetching may take."""

_KEEP_SLOWER: Final = 0.7
_KEEP_FASTER: Final = 0.4
_PROBE_EVERY: Final = 8
_LEAST_S: Final = 0.002


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
        host: What blocks of host memory take.
        lower: What blocks of the tiers below it take, in order.
    """

    def __init__(self, host: Meter, *lower: Meter) -> None:
        self.host, self.lower = host, lower
        self._refusals = 0

    def choose(self, places: Sequence[int], pending: Sequence[int], recompute_block_s: float) -> tuple[int, float]:
        """How many leading blocks to fetch, and how long to wait for tiers below host memory.

        Args:
            places: Of each leading block where it is: 0 in host memory, from 1 on in a tier below.
            pending: Blocks that other requests wait for, in each of the tiers below.
            recompute_block_s: What the engine needs to compute a block.
        """
        for deepest in range(max(places, default=0), -1, -1):
            num = next((i for i, place in enumerate(places) if place > deepest), len(places))
            used = set(places[:num])
            fetch_s = num * self.host.block_s
            for place, (meter, waits) in enumerate(zip(self.lower, pending, strict=True), 1):
                fetch_s += (places[:num].count(place) + waits) * meter.block_s * (place in used)
            if num and fetch_s < WORTH * num * recompute_block_s:
                return num, max(_LEAST_S, WORTH * num * recompute_block_s) if max(used) else 1e9
        return 0, 0.0

    def should_probe(self) -> bool:
        """Whether it is time to look again at a tier that was not worth it."""
        self._refusals += 1
        return self._refusals % _PROBE_EVERY == 1
