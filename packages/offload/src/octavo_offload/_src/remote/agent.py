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

import msgspec

from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote import transports
from octavo_offload._src.remote.errors import PeerError
from octavo_offload._src.remote.onesided import LateError, Reader
from octavo_offload._src.remote.peer import Peer
from octavo_offload._src.remote.shared import Pipe, SharedSlab

BEAT_S: Final = 0.2
FATAL_FAILURES: Final = 3
_BACKOFF_S: Final = (0.2, 5.0)
READERS: Final = 3
WRITERS: Final = 2
BATCH_BYTES: Final = 8 << 20
_LATE_S: Final = 0.05


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
        self._transports = list(start.transports)
        self._readers: dict[str, Reader] = {}
        self._late: list[tuple[LateError, list[m.Work]]] = []

    def run(self) -> None:
        """Serve until the engine is gone."""
        for target in (self._keep_joined, self._end_late_on, *[self._read_on] * READERS, *[self._write_on] * WRITERS):
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
                peer = self._join()
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
            self._send(m.Peer(True, peer.told))
            why = self._beat_on(peer, beaten.cursor)
            self._peer = None
            peer.close()
            self._send(m.Peer(False, why))

    def _join(self) -> Peer:
        """Join, and be able to read as was settled, or by gRPC; a library that does not work here is not tried again."""
        peer = Peer(msgspec.structs.replace(self._start, transports=self._transports))
        name = peer.told = peer.joined.transport
        if name not in transports.ONE_SIDED:
            return peer
        try:
            reader = self._readers[name] = self._readers.get(name) or transports.reader(name, self._slab)
            peer.remote = reader.join(peer.joined.metadata)
            peer.told = reader.told
            return peer
        except (OSError, PeerError) as error:
            peer.leave()
            if isinstance(error, OSError):
                self._transports.remove(name)
            peer = Peer(msgspec.structs.replace(self._start, transports=[transports.GRPC]))
            peer.told = f"{transports.GRPC} ({error})"
            return peer

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
            seals: list[int | None] = [None] * len(batch)
            peer, leased = self._peer, None
            try:
                if peer is not None:
                    leased = peer.lease([work.key for work in batch])
                    self._read(peer, leased, batch)
                    seals = [None if entry is None else entry.seal for entry in leased.entries]
                    self._failures = 0
            except LateError as error:  # the slots are in quarantine, and so is the lease: it ends with its time
                self._failed()
                with self._lock:
                    self._late.append((error, batch))
                continue
            except PeerError:
                self._failed()
            for work, seal in zip(batch, seals, strict=True):
                self._send(m.Result(work.ticket, seal is not None, seal or 0))
            self._give_back(peer, leased)

    def _read(self, peer: Peer, leased: m.Leased, batch: list[m.Work]) -> None:
        """Have the leased blocks in their slots."""
        pairs = [(entry.address, work.slot) for entry, work in zip(leased.entries, batch, strict=True) if entry is not None]
        if peer.remote is None:
            peer.read(leased.lease, [self._slot(slot) for _, slot in pairs])
        elif pairs:
            peer.remote.read(pairs, self._start.block_bytes, self._start.deadline_s)

    def _give_back(self, peer: Peer | None, leased: m.Leased | None) -> None:
        """End a lease that no stream ends."""
        if peer is None or leased is None or peer.remote is None:
            return
        try:
            peer.release(leased.lease)
        except PeerError:
            self._failed()

    def _end_late_on(self) -> None:
        """Say that late transfers have ended, when they have."""
        while True:
            time.sleep(_LATE_S)
            with self._lock:
                ended = [late for late in self._late if late[0].has_ended()]
                self._late = [late for late in self._late if late not in ended]
            for _, batch in ended:
                for work in batch:
                    self._send(m.Result(work.ticket, False))

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
