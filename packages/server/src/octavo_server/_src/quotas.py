"""What each key uses now: requests at once and tokens per minute, counted over all frontends. Touches a small shared file.

Every frontend writes the number of its own requests into a row of its own, so that a frontend that dies takes its count with it (its
successor begins with zeroes); the sum is compared under a lock that the system gives back when its holder dies. The token buckets are shared.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo_server._src.keys import KeyEntry
from octavo_server._src.openai_errors import RateLimitedError

_WINDOW_S = 60.0
_CELL = 8


class Quotas:
    """The counts of one frontend.

    Args:
        entries: All keys, in the same order in every frontend.
        path: The shared file, made by whoever comes first; None: one frontend only.
        row, num_rows: This frontend's place among so many.
        clock: Seconds, the same for all frontends of the machine.
    """

    def __init__(
        self, entries: Sequence[KeyEntry], path: Path | None = None, *, row: int = 0, num_rows: int = 1, clock: object = None
    ) -> None:
        self._entries, self._row, self._num_rows = entries, row, num_rows
        self._now_s = clock if callable(clock) else time.monotonic
        size = max(1, len(entries)) * (num_rows + 2) * _CELL
        self._file = -1 if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._file >= 0:
            with self._locked():
                if os.fstat(self._file).st_size < size:
                    os.ftruncate(self._file, size)
        self._map = mmap.mmap(self._file, size)
        view = memoryview(self._map)
        counts = max(1, len(entries)) * num_rows * _CELL
        self._counts, self._buckets = view[:counts].cast("q"), view[counts:].cast("d")
        for index in range(len(entries)):
            self._counts[self._cell(row, index)] = 0

    def _cell(self, row: int, index: int) -> int:
        return row * len(self._entries) + index

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if self._file < 0:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def enter(self, index: int) -> None:
        """Count a request of a key.

        Raises:
            RateLimitedError: It has too many, or has used up its tokens.
        """
        entry = self._entries[index]
        with self._locked():
            running = sum(self._counts[self._cell(row, index)] for row in range(self._num_rows))
            if entry.max_concurrent_requests and running >= entry.max_concurrent_requests:
                raise RateLimitedError(
                    f"this key may have {entry.max_concurrent_requests} requests at once and has {running}; wait for one to end",
                    retry_after_s=1.0,
                )
            level = self._level(index)
            if entry.max_tokens_per_minute and level <= 0:
                wait_s = math.ceil((1 - level) / entry.max_tokens_per_minute * _WINDOW_S)
                raise RateLimitedError(
                    f"this key may use {entry.max_tokens_per_minute} tokens a minute and has used them; try again in {wait_s} s",
                    retry_after_s=float(wait_s),
                )
            self._counts[self._cell(self._row, index)] += 1

    def leave(self, index: int) -> None:
        """A request that was counted has ended."""
        self._counts[self._cell(self._row, index)] -= 1

    def spend(self, index: int, tokens: int) -> None:
        """Count tokens; they may bring the key below zero, and then it waits."""
        if self._entries[index].max_tokens_per_minute:
            with self._locked():
                self._level(index)
                self._buckets[2 * index] -= tokens

    def _level(self, index: int) -> float:
        """Tokens left to a key now. A cell's time of zero: it has never been used, and is full."""
        most = float(self._entries[index].max_tokens_per_minute)
        now_s, last_s = self._now_s(), self._buckets[2 * index + 1]
        level = most if last_s == 0 else min(most, self._buckets[2 * index] + (now_s - last_s) * most / _WINDOW_S)
        self._buckets[2 * index], self._buckets[2 * index + 1] = level, now_s
        return level
