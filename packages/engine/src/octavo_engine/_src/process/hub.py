"""The core's side of every frontend: who is attached, whose sequence is whose, what waits to be taken.

Runs in the step loop's thread and never waits for a frontend: one that does not take its outputs for `LOST_S`, or whose frames do
not add up, is given up and its sequences are aborted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import zmq

from octavo_core.errors import FrameError, OctavoError, RequestError
from octavo_core.frames import pack_outputs
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FrameHeader, FrameKind, Refusal, decode, encode
from octavo_engine._src.process import messages
from octavo_engine._src.process.bell import Bell, Ringer
from octavo_engine._src.process.link import Incoming, Outgoing
from octavo_engine._src.process.transport import Transport

logger = logging.getLogger(__name__)

LOST_S: Final = 10.0
"""A frontend that takes nothing for so long is given up."""
MAX_BACKLOG_BYTES: Final = 64 * 2**20
"""And so is one for which so much waits."""
FLUSH_S: Final = 0.005
READ_AT_ONCE: Final = 256
"""Messages of one frontend between two steps."""


@runtime_checkable
class StepCore(Protocol):
    """What the step loop turns: `octavo_engine`'s core, or a smaller one in tests."""

    has_work: bool

    def check(self, requests: list[EngineRequest]) -> None:
        """Refuse requests that cannot be served or have no room together."""

    def add(self, request: EngineRequest) -> None:
        """Queue a checked request."""

    def abort(self, request_id: str) -> None:
        """End a request, if there is such a one."""

    def turn(self) -> list[EngineOutput]:
        """One step and what came of it."""

    def stats(self) -> EngineStats:
        """Gauges and counters."""


class _Peer:
    """One attached frontend."""

    def __init__(self, name: str, identity: bytes, transport: Transport, folder: Path) -> None:
        self.name, self.identity = name, identity
        self.incoming = Incoming(transport.receiver(f"{name}/requests"))
        self.outgoing = Outgoing(transport.sender(f"{name}/outputs"))
        self.ringer = Ringer(folder / f"{name}.bell")
        self.requests: set[str] = set()

    def close(self) -> None:
        for end in (self.incoming, self.outgoing, self.ringer):
            end.close()


class Hub:
    """All frontends of a core.

    Args:
        core: Told what they ask for.
        folder: Of this server: sockets and bells.
        endpoint: Where frontends attach.
    """

    def __init__(self, core: StepCore, transport: Transport, folder: Path, endpoint: str) -> None:
        self._core, self._transport, self._folder = core, transport, folder
        self._context: Any = zmq.Context()
        self._router: Any = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._bell = Bell(folder / f"{endpoint.rpartition('/')[2]}.bell")
        self._router.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._bell.fileno(), zmq.POLLIN)
        self._peers: dict[str, _Peer] = {}
        self._owners: dict[str, tuple[_Peer, int]] = {}

    # Coming in --------------------------------------------------------------------------------------------------------

    def take_in(self, stats: EngineStats | None = None) -> None:
        """Read everything that frontends have sent."""
        while self._router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._control(*self._router.recv_multipart()[:2], stats=stats or self._core.stats())
        for peer in list(self._peers.values()):
            try:
                for header, payload in itertools.islice(peer.incoming.messages(), READ_AT_ONCE):
                    self._take(peer, header, payload)
            except FrameError as error:
                self._drop(peer, f"what it sent cannot be read: {error}")

    def _control(self, identity: bytes, data: bytes, *, stats: EngineStats) -> None:
        try:
            message: messages.Attach | messages.Detach = messages.decode(data, messages.Attach | messages.Detach)
        except msgspec.MsgspecError as error:
            logger.warning("a control message was not understood: %s", error)
            return
        known = next((peer for peer in self._peers.values() if peer.identity == identity), None)
        if known is not None:
            self._drop(known, "it has gone")
        if isinstance(message, messages.Attach):
            self._attach(identity, message.name, stats)

    def _attach(self, identity: bytes, name: str, stats: EngineStats) -> None:
        answer: messages.Attached | messages.Detached = messages.Attached(stats)
        try:
            self._peers[name] = _Peer(name, identity, self._transport, self._folder)
        except OSError as error:
            logger.error("a frontend cannot be served: %s", error.strerror)
            answer = messages.Detached(f"there is no way to it: {error.strerror}")
        self._router.send_multipart([identity, messages.encode(answer)])

    def _take(self, peer: _Peer, header: FrameHeader, payload: bytes) -> None:
        message: Any = decode(header.kind, payload)
        if header.kind == FrameKind.REQUEST:
            self._queue(peer, header.request, message)
        elif header.kind == FrameKind.ABORT and message in peer.requests:
            self._core.abort(message)

    def _queue(self, peer: _Peer, first: int, requests: list[EngineRequest]) -> None:
        """All of them or none."""
        names = [request.request_id for request in requests]
        try:
            taken = next((name for i, name in enumerate(names) if name in self._owners or name in names[:i]), None)
            if taken is not None:
                raise RequestError(f"request id '{taken}' is in use; ids of live requests are unique")
            self._core.check(requests)
        except OctavoError as error:
            peer.outgoing.post(FrameKind.REFUSED, encode(Refusal.of(error, len(requests))), request=first)
            self._ring(peer)
            return
        for handle, request in enumerate(requests, first):
            self._owners[request.request_id] = (peer, handle)
            peer.requests.add(request.request_id)
            self._core.add(request)

    # Going out --------------------------------------------------------------------------------------------------------

    def hand_out(self, outputs: Sequence[EngineOutput], step: int) -> None:
        """Send the outputs of a turn to those who asked for them."""
        batches: dict[str, list[tuple[int, EngineOutput]]] = {}
        for output in outputs:
            ends = output.finish_reason is not None
            owner = self._owners.pop(output.request_id, None) if ends else self._owners.get(output.request_id)
            if owner is None:
                continue
            peer, handle = owner
            batches.setdefault(peer.name, []).append((handle, output))
            if ends:
                peer.requests.discard(output.request_id)
        for name, batch in batches.items():
            if peer_of_batch := self._peers.get(name):
                peer_of_batch.outgoing.post(FrameKind.OUTPUT, pack_outputs(batch), step=step)
                self._ring(peer_of_batch)

    def tell(self, stats: EngineStats) -> None:
        """Send everybody a reading; also the sign of life they look for."""
        payload = encode(stats)
        for peer in list(self._peers.values()):
            peer.outgoing.post(FrameKind.STATS, payload)
            self._ring(peer)

    def flush(self) -> None:
        """Send what had no room, and give up those who take nothing."""
        for peer in list(self._peers.values()):
            if peer.outgoing.flush():
                self._ring(peer)
            if peer.outgoing.stalled_s > LOST_S or peer.outgoing.backlog_bytes > MAX_BACKLOG_BYTES:
                self._drop(peer, f"it has taken nothing for {peer.outgoing.stalled_s:.0f} s")

    def _ring(self, peer: _Peer) -> None:
        if not peer.ringer.ring():
            self._drop(peer, "it has died")

    def _drop(self, peer: _Peer, reason: str) -> None:
        if self._peers.pop(peer.name, None) is None:
            return
        logger.debug("frontend %s is detached with %d sequences: %s", peer.name, len(peer.requests), reason)
        for name in peer.requests:
            self._owners.pop(name, None)
            self._core.abort(name)
        peer.close()
        self._router.send_multipart([peer.identity, messages.encode(messages.Detached(reason))], zmq.NOBLOCK)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def sleep(self, most_s: float) -> None:
        """Until somebody rings, or for so long."""
        waits = any(peer.outgoing.backlog_bytes for peer in self._peers.values())
        self._poller.poll(int(1000 * (FLUSH_S if waits else most_s)))
        self._bell.silence()

    def close(self) -> None:
        """Give everybody a moment to take the last outputs, then close."""
        end_s = time.monotonic() + 0.5
        while time.monotonic() < end_s and any(peer.outgoing.backlog_bytes for peer in self._peers.values()):
            self.flush()
            time.sleep(FLUSH_S)
        for peer in list(self._peers.values()):
            self._drop(peer, "the core ends")
        self._bell.close()
        self._context.destroy(linger=100)
