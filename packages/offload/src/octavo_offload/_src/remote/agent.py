"""The process that moves blocks between an engine and a store: `python -m octavo_offload._src.remote.agent PIPE MEMORY`.

It is apart from the engine so that nothing a transport does can take the engine down: when it dies, what was under way is missed and another is
started. Engine and agent share a slab; a pipe carries which block is to go from or to which slot. A `Result` is sent when nobody
writes into the slot any more, however late; so a transfer that ran past its deadline keeps its slot, in quarantine, until it has ended.

It joins the store, keeps the directory current, drops a store that fails and joins again, under a new number, when it answers.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Final

from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote.peer import Peer, PeerError
from octavo_offload._src.remote.shared import Pipe, SharedSlab

BEAT_S: Final = 0.2
FATAL_FAILURES: Final = 3
_BACKOFF_S: Final = (0.2, 5.0)
READERS: Final = 3
WRITERS: Final = 2
BATCH_BYTES: Final = 8 << 20


class Agent:
    """One engine's.

    Args:
        pipe: To the engine.
        start: What it said first.
        slab: Shared with it.
    """

    def __init__(self, pipe: Pipe, start: m.Start, slab: SharedSlab) -> None:
        self._pipe, self._start, self._slab = pipe, start, slab
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._reads: deque[m.Work] = deque()
        self._writes: deque[m.Work] = deque()
        self._peer: Peer | None = None
        self._failures = 0
        self._dropped = threading.Event()
        self._batch = max(1, BATCH_BYTES // start.block_bytes)

    def run(self) -> None:
        """Serve until the engine is gone."""
        for target in (self._keep_joined, *[self._read_on] * READERS, *[self._write_on] * WRITERS):
            threading.Thread(target=target, daemon=True).start()
        try:
            while True:
                work = self._pipe.receive(None)
                with self._ready:
                    (self._reads if work.seal is None else self._writes).append(work)
                    self._ready.notify_all()
        except (EOFError, OSError):
            peer = self._peer
            if peer is not None:
                peer.leave()

    def _send(self, message: m.FromAgent) -> None:
        with self._sending:
            try:
                self._pipe.send(message)
            except OSError:
                os._exit(0)  # the engine is gone

    # Membership -------------------------------------------------------------------------------------------------------

    def _keep_joined(self) -> None:
        pause_s = _BACKOFF_S[0]
        while True:
            try:
                peer = Peer(self._start)
                beaten = peer.beat(0)
            except PeerError as error:
                self._send(m.Peer(False, str(error), error.is_final))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _BACKOFF_S[1])
                continue
            pause_s = _BACKOFF_S[0]
            self._send(m.News(beaten))
            self._failures = 0
            self._dropped.clear()
            self._peer = peer
            self._send(m.Peer(True, peer.joined.transport))
            why = self._beat_on(peer, beaten.cursor)
            self._peer = None
            peer.close()
            self._send(m.Peer(False, why))

    def _beat_on(self, peer: Peer, cursor: int) -> str:
        """Stay joined; answers why that ended."""
        while not self._dropped.wait(BEAT_S):
            try:
                beaten = peer.beat(cursor)
                self._failures = 0
            except PeerError as error:
                if self._failed():
                    return str(error)
                continue
            if beaten.cursor != cursor or beaten.reset:
                self._send(m.News(beaten))
            cursor = beaten.cursor
        return f"{FATAL_FAILURES} calls failed one after the other"

    def _failed(self) -> bool:
        """A call failed; whether that is once too often."""
        self._failures += 1
        if self._failures >= FATAL_FAILURES:
            self._dropped.set()
        return self._dropped.is_set()

    # Blocks -----------------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> memoryview:
        return self._slab.slot(slot)[: self._start.block_bytes]

    def _next(self, queue: deque[m.Work], most: int) -> list[m.Work]:
        with self._ready:
            self._ready.wait_for(lambda: bool(queue))
            return [queue.popleft() for _ in range(min(most, len(queue)))]

    def _read_on(self) -> None:
        while True:
            batch = self._next(self._reads, self._batch)
            seals = [0] * len(batch)
            good = [False] * len(batch)
            peer = self._peer
            if peer is not None:
                self._read(peer, batch, seals, good)
            for work, is_good, seal in zip(batch, good, seals, strict=True):
                self._send(m.Result(work.ticket, is_good, seal))

    def _read(self, peer: Peer, batch: list[m.Work], seals: list[int], good: list[bool]) -> None:
        try:
            leased = peer.lease([work.key for work in batch])
            found = [i for i, entry in enumerate(leased.entries) if entry is not None]
            peer.read(leased.lease, [self._slot(batch[i].slot) for i in found])
            self._failures = 0
        except PeerError:
            self._failed()
            return
        for i in found:
            entry = leased.entries[i]
            seals[i], good[i] = (entry.seal, True) if entry is not None else (0, False)

    def _write_on(self) -> None:
        while True:
            (work,) = self._next(self._writes, 1)
            peer, is_kept = self._peer, False
            if peer is not None and work.seal is not None:
                try:
                    is_kept = peer.put(work.key, work.seal, self._slot(work.slot))
                    self._failures = 0
                except PeerError:
                    self._failed()
            self._send(m.Result(work.ticket, is_kept, work.seal or 0))


def main() -> None:
    """Serve the engine at the other end of a pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to engine and agent; the engine says when
    pipe_fd, memory_fd = map(int, sys.argv[1:3])
    pipe = Pipe(pipe_fd, m.ToAgent)
    start = pipe.receive(None)
    Agent(pipe, start, SharedSlab(start.num_slots, start.slot_bytes, memory_fd)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
