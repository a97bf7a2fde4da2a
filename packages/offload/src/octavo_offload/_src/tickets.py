"""Calls with several blocks, each done by a thread of its own; answered once, when the last of them is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

from octavo_core.tiers import Answer, Done
from octavo_offload._src.jobs import Jobs


class Tickets:
    """The calls of one tier that have not been answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: dict[int, list[Answer | None]] = {}
        self._done: list[Done] = []

    def start(self, jobs: Jobs, works: Sequence[Callable[[], Answer]], *, most: int = 1, urgent: bool = False) -> int:
        """Run every work, at most so many in one job, every thread with a share; answers the ticket of all. One that raises is a MISS."""
        ticket = self.open(len(works))
        size = max(1, min(most, -(-len(works) // jobs.num_threads)))
        for first in range(0, len(works), size):
            jobs.submit(functools.partial(self._run, ticket, first, works[first : first + size]), urgent=urgent)
        return ticket

    def open(self, count: int) -> int:
        """A ticket for so many blocks."""
        with self._lock:
            ticket, self._next = self._next, self._next + 1
            if count:
                self._open[ticket] = [None] * count
            else:
                self._done.append(Done(ticket, ()))
            return ticket

    def each(
        self,
        block_bytes: int,
        keys: Sequence[bytes],
        blocks: Sequence[memoryview],
        begin: Callable[[bytes, memoryview, Callable[[Answer], None]], None],
    ) -> int:
        """Begin every block, which says by itself when it is done; answers the ticket of all. One of another size is a MISS."""
        ticket = self.open(len(keys))
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            done = functools.partial(self.answer, ticket, i)
            if len(block) == block_bytes:
                begin(key, block, done)
            else:
                done(Answer.MISS)
        return ticket

    def _run(self, ticket: int, first: int, works: Sequence[Callable[[], Answer]]) -> None:
        answers = [Answer.MISS] * len(works)
        try:
            for i, work in enumerate(works):
                answers[i] = work()
        finally:
            self.answer(ticket, first, *answers)

    def answer(self, ticket: int, first: int, *given: Answer) -> None:
        """Blocks from `first` on are done."""
        with self._lock:
            answers = self._open[ticket]
            answers[first : first + len(given)] = given
            if None not in answers:
                del self._open[ticket]
                self._done.append(Done(ticket, tuple(a or Answer.MISS for a in answers)))

    def poll(self) -> list[Done]:
        """What has ended since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done
