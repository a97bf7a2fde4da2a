"""Worker threads with two lanes: urgent jobs, on which a request waits, pass the others.

A job must not raise; one that does is counted and logged, and its worker goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class Jobs:
    """A bounded number of threads.

    Args:
        threads: How many.
        name: Of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._lanes: tuple[deque[Callable[[], None]], ...] = (deque(), deque())
        self._ready = threading.Condition()
        self._closing = False
        self._running = 0
        self.num_failed, self.num_threads = 0, threads
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None], *, urgent: bool = False) -> None:
        """Run a job some time; after `close` it is dropped."""
        with self._ready:
            if not self._closing:
                self._lanes[0 if urgent else 1].append(job)
                self._ready.notify()

    def __len__(self) -> int:
        """Jobs that wait or run."""
        with self._ready:
            return sum(map(len, self._lanes)) + self._running

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing waits or runs; False when that took too long."""
        with self._ready:
            return self._ready.wait_for(lambda: not any(self._lanes) and not self._running, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Finish what waits, for so long at most, and end the threads. What is left then is dropped."""
        self.wait_idle(timeout_s)
        with self._ready:
            self._closing = True
            for lane in self._lanes:
                lane.clear()
            self._ready.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._closing or any(self._lanes))
                if self._closing:
                    return
                job = next(lane for lane in self._lanes if lane).popleft()
                self._running += 1
            try:
                job()
            except Exception:
                self.num_failed += 1
                _LOG.exception("a job of the tiers failed")
            del job
            with self._ready:
                self._running -= 1
                if not self._running and not any(self._lanes):
                    self._ready.notify_all()  # for those that wait until nothing runs
