"""Time as a process lives it: a machine that slept, or a process that was stopped and goes on, has not waited."""

from __future__ import annotations

import time
from typing import Final

_MOST_S: Final = 0.5


class AwakeClock:
    """Counts seconds between calls of `tick`, of a long pause only half a second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._last_s = time.monotonic()

    def tick(self) -> float:
        """The time now."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._last_s, _MOST_S)
        self._last_s = now_s
        return self.now_s
