"""`RemoteEngine`: the engine seam in a process without jax; the core is elsewhere. Belongs to one event loop.

Attaches to the core the supervisor names, and to the next one when that is gone; what was running then fails with `EngineDeadError`.
Requests and outputs travel through `link`, a bell wakes the event loop, and a task of this engine's own follows the supervisor.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from octavo_core.errors import EngineDeadError, FrameError, OverloadedError, RequestError
from octavo_core.frames import unpack_outputs
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FrameHeader, FrameKind, ModelCard, decode, encode
from octavo_engine._src.process import messages
from octavo_engine._src.process.awake import AwakeClock
from octavo_engine._src.process.bell import Bell, Ringer
from octavo_engine._src.process.link import Incoming, Outgoing
from octavo_engine._src.process.messages import Phase, State
from octavo_engine._src.process.transport import Transport, open_transport

logger = logging.getLogger(__name__)

FOLLOW_S: Final = 0.1
ATTACH_S: Final = 2.0
"""A core that does not answer for so long is asked again."""
SILENT_FACTOR: Final = 1.5
"""A core that says nothing for so many times what the watchdog allows is attached to anew, if the supervisor finds it well."""
RETRY_S: Final = 1.0
"""Between attempts to attach to a core that is well but cannot be reached."""
MAX_BACKLOG_BYTES: Final = 64 * 2**20
READ_AT_ONCE: Final = 8
MAX_UNREAD: Final = 16384
"""Outputs that may wait for their reader; a client that reads nothing is usually cut off long before."""


class RemoteStream(AsyncIterator[EngineOutput]):
    """The outputs of one request on their way to its reader. Ending it early, read or not, aborts the request."""

    def __init__(self, engine: RemoteEngine, request_id: str, handle: int) -> None:
        self._engine, self.request_id, self.handle = engine, request_id, handle
        self._outputs: deque[EngineOutput] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._finished = False

    def put(self, output: EngineOutput) -> None:
        """One more."""
        self._outputs.append(output)
        self._news.set()
        if len(self._outputs) > MAX_UNREAD and not self._finished:
            self._engine.drop(self)
            self.fail(OverloadedError(f"{MAX_UNREAD} outputs were not read in time: the sequence was ended"))

    def fail(self, error: Exception) -> None:
        """No more will come."""
        self._error = error
        self._news.set()

    async def __anext__(self) -> EngineOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self._outputs:
            if self._error is not None:
                self._finished = True
                raise self._error
            await self._news.wait()
            self._news.clear()
        output = self._outputs.popleft()
        self._finished = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        if not self._finished:
            self._finished = True
            self._engine.drop(self)


class _Streams:
    """Streams that are under way, by handle and by request id."""

    def __init__(self) -> None:
        self._by_handle: dict[int, RemoteStream] = {}
        self._by_name: dict[str, RemoteStream] = {}
        self._handle = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_name

    def add(self, engine: RemoteEngine, names: Sequence[str]) -> tuple[int, list[RemoteStream]]:
        """New streams and the handle of the first; the others follow it.

        Raises:
            RequestError: A name is in use.
        """
        taken = next((name for i, name in enumerate(names) if name in self._by_name or name in names[:i]), None)
        if taken is not None:
            raise RequestError(f"request id '{taken}' is in use; ids of live requests are unique")
        first = self._handle + 1
        streams = [RemoteStream(engine, name, handle) for handle, name in enumerate(names, first)]
        self._handle += len(streams)
        self._by_handle.update((stream.handle, stream) for stream in streams)
        self._by_name.update((stream.request_id, stream) for stream in streams)
        return first, streams

    def take_out(self, handle: int) -> RemoteStream | None:
        """The stream of a handle, which is over."""
        stream = self._by_handle.pop(handle, None)
        if stream is not None:
            del self._by_name[stream.request_id]
        return stream

    def name_of(self, handle: int) -> str:
        """Its request id; nothing for one that nobody reads any more."""
        stream = self._by_handle.get(handle)
        return stream.request_id if stream is not None else ""

    def give(self, handle: int, output: EngineOutput) -> None:
        """An output for it."""
        stream = self._by_handle.get(handle) if output.finish_reason is None else self.take_out(handle)
        if stream is not None:
            stream.put(output)

    def fail_all(self, error: Exception) -> None:
        """None of them goes on."""
        for handle in list(self._by_handle):
            stream = self.take_out(handle)
            if stream is not None:
                stream.fail(error)


class _Attachment:
    """The way to one core, and what is under way on it."""

    def __init__(self, folder: Path, transport: Transport, state: State, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        self.generation, self.silent_s = state.generation, SILENT_FACTOR * state.watchdog_s
        self.name = f"f-{uuid.uuid4().hex[:16]}"
        self.heard_s = now_s
        self.incoming: Incoming | None = None
        self.outgoing = Outgoing(transport.sender(f"{self.name}/requests"))
        self.bell = Bell(folder / f"{self.name}.bell")
        self.ringer = Ringer(folder / f"core-{state.generation}.bell")
        self._context: Any = zmq.Context.instance()
        self.control: Any = self._context.socket(zmq.DEALER)
        self.control.linger = 0
        self.control.connect(messages.core_endpoint(str(folder), state.generation))
        self.control.send(messages.encode(messages.Attach(self.name)))
        self._loop = loop

    def close(self) -> None:
        self._loop.remove_reader(self.bell.fileno())
        self.control.linger = 200
        self.control.send(messages.encode(messages.Detach()), zmq.NOBLOCK)
        for end in (self.control, self.bell, self.ringer, self.outgoing):
            end.close()
        if self.incoming is not None:
            self.incoming.close()


class RemoteEngine:
    """The engine seam over a core in another process.

    Args:
        folder: The supervisor's.
        ipc: Its transport.
    """

    def __init__(self, folder: str, ipc: str) -> None:
        self._folder, self._transport = Path(folder), open_transport(ipc, Path(folder))
        self._streams = _Streams()
        self._clock = AwakeClock()
        self._next_attach_s = 0.0
        self._attachment: _Attachment | None = None
        self._is_attached = False
        self._reason = "the engine core is starting"
        self._stats = EngineStats()
        self.card: ModelCard | None = None
        self.table: messages.Table = []
        self._states: Any = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.is_final = False

    @classmethod
    async def start(cls, folder: str, ipc: str) -> RemoteEngine:
        """Begin to follow the supervisor; returns at once. `ready` waits."""
        engine = cls(folder, ipc)
        engine._states = zmq.Context.instance().socket(zmq.SUB)
        engine._states.linger = 0
        engine._states.subscribe(b"")
        engine._states.connect(messages.state_endpoint(folder))
        engine._task = asyncio.create_task(engine._follow())
        return engine

    async def ready(self) -> ModelCard:
        """Wait until requests are served."""
        await self._ready.wait()
        assert self.card is not None
        return self.card

    # The seam ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """See the seam."""
        async with aclosing(self.submit([request])[0]) as outputs:
            async for output in outputs:
                yield output

    def submit(self, requests: Sequence[EngineRequest]) -> list[RemoteStream]:
        """See the seam. What the core refuses is raised by the iterators, all of them."""
        attachment = self._attachment
        if attachment is None or not self._is_attached:
            raise EngineDeadError(self._reason)
        if attachment.outgoing.backlog_bytes > MAX_BACKLOG_BYTES:
            raise OverloadedError("requests come faster than the engine core takes them; try again later")
        payload = encode(list(requests))
        first, streams = self._streams.add(self, [request.request_id for request in requests])
        attachment.outgoing.post(FrameKind.REQUEST, payload, request=first)
        attachment.ringer.ring()
        return streams

    async def abort(self, request_id: str) -> None:
        """See the seam."""
        if request_id in self._streams:
            self._send_abort(request_id)

    def stats(self) -> EngineStats:
        """See the seam. `is_ready` only while a core is attached; its age counts from the last word of it."""
        if not self._is_attached or self._attachment is None:
            return msgspec.structs.replace(self._stats, is_ready=False, error=self._reason, num_running=0, num_waiting=0)
        age_s = self._clock.now_s - self._attachment.heard_s
        return msgspec.structs.replace(self._stats, last_step_age_s=age_s)

    def drop(self, stream: RemoteStream) -> None:
        """Nobody reads this stream any more."""
        if self._streams.take_out(stream.handle) is not None:
            self._send_abort(stream.request_id)

    def _send_abort(self, request_id: str) -> None:
        if self._attachment is not None and self._is_attached:
            self._attachment.outgoing.post(FrameKind.ABORT, encode(request_id))
            self._attachment.ringer.ring()

    async def aclose(self) -> None:
        """Stop following; streams that still run fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose("the server is shutting down")
        if self._states is not None:
            self._states.close()
        self._transport.close()

    # Following the supervisor -----------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            try:
                self._turn()
            except OSError as error:
                logger.error("there is no way to the engine core: %s", error.strerror)
                self._lose(f"there is no way to the engine core: {error.strerror}", pause_s=RETRY_S)
            except Exception as error:  # a fault here must not leave streams waiting for ever
                logger.exception("the way to the engine core is lost")
                self._lose(f"the way to the engine core is lost: {type(error).__name__}: {error}", pause_s=RETRY_S)
            await asyncio.sleep(FOLLOW_S)

    def _turn(self) -> None:
        self._clock.tick()
        while (data := _received(self._states)) is not None:
            self._obey(messages.decode(data, State))
        attachment = self._attachment
        if attachment is None:
            return
        while (data := _received(attachment.control)) is not None:
            self._answer(attachment, messages.decode(data, messages.Attached | messages.Detached))
            if self._attachment is not attachment:
                return
        if self._is_attached:
            if attachment.outgoing.flush():
                attachment.ringer.ring()
            self._read()
        silent_s = self._clock.now_s - attachment.heard_s
        if silent_s > (attachment.silent_s if self._is_attached else ATTACH_S):
            self._lose(f"the engine core has said nothing for {silent_s:.0f} s")

    def _obey(self, state: State) -> None:
        if self._attachment is not None and (state.generation != self._attachment.generation or state.phase is not Phase.READY):
            self._lose(state.reason or "the engine core is starting")
        if state.phase is Phase.READY and self._attachment is None and self._clock.now_s >= self._next_attach_s:
            self.card, self.table = state.card, state.table
            self._attachment = _Attachment(self._folder, self._transport, state, asyncio.get_running_loop(), self._clock.now_s)
        elif state.phase is not Phase.READY:
            self._reason = state.reason or "the engine core is starting"
            self.is_final = state.phase is Phase.STOPPED

    def _answer(self, attachment: _Attachment, message: messages.Attached | messages.Detached) -> None:
        if isinstance(message, messages.Detached):
            self._lose(
                f"the engine core has let go of this frontend: {message.reason}", pause_s=0.0 if self._is_attached else RETRY_S
            )
            return
        attachment.incoming = Incoming(self._transport.receiver(f"{attachment.name}/outputs"))
        asyncio.get_running_loop().add_reader(attachment.bell.fileno(), self._hear)
        attachment.heard_s = self._clock.now_s
        attachment.ringer.ring()  # what the core has for us since it answered can come now
        self._stats = message.stats
        self._is_attached = True
        self._ready.set()

    def _lose(self, reason: str, *, pause_s: float = 0.0) -> None:
        """The core is gone, for us: everything that runs fails. The next one, or this one again, is looked for after a pause."""
        self._next_attach_s = self._clock.now_s + pause_s
        attachment, self._attachment = self._attachment, None
        self._is_attached, self._reason = False, reason
        self._ready.clear()
        self._streams.fail_all(EngineDeadError(reason))
        if attachment is not None:
            attachment.close()

    # Outputs ----------------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """The bell rang."""
        if self._attachment is not None:
            self._attachment.bell.silence()
            self._read()

    def _read(self) -> None:
        attachment = self._attachment
        if attachment is None or attachment.incoming is None:
            return
        try:
            for count, (header, payload) in enumerate(attachment.incoming.messages(), 1):
                attachment.heard_s = self._clock.now_s
                self._take(header, payload)
                if count == READ_AT_ONCE:  # others have a turn between, however fast the core is
                    asyncio.get_running_loop().call_soon(self._read)
                    return
        except FrameError as error:
            logger.error("the engine core cannot be understood: %s", error)
            self._lose(f"outputs of the engine core were lost: {error}")

    def _take(self, header: FrameHeader, payload: bytes) -> None:
        if header.kind == FrameKind.OUTPUT:
            for handle, output in unpack_outputs(payload, self._streams.name_of):
                self._streams.give(handle, output)
            return
        message: Any = decode(header.kind, payload)
        if header.kind == FrameKind.STATS:
            self._stats = message
        elif header.kind == FrameKind.REFUSED:
            for handle in range(header.request, header.request + message.count):
                if (stream := self._streams.take_out(handle)) is not None:
                    stream.fail(message.error())


def _received(socket: Any) -> bytes | None:
    try:
        data: bytes = socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
    return data
