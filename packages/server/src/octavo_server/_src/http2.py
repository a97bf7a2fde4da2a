"""HTTP/2 for the same application: one protocol object per connection over the `h2` state machine (RFC 9113; no `Upgrade: h2c`).

Back-pressure in both directions: a body's window opens again only as the application reads it, an answer waits for the client's window.
A stream that is reset is a client that went away. Clients that reset streams as fast as they open them are cut off (CVE-2023-44487).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from octavo_server._src.bounds import Bounds, too_many

LOG = logging.getLogger("octavo.server")
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_STREAMS: Final = 256
_MAX_HEADERS_BYTES: Final = 64 * 1024
_BODY_WINDOW: Final = 256 * 1024
_MAX_RESETS: Final = 200
"""Streams a client may reset before their answer, beyond those it let be answered."""
_IDLE_S: Final = 75.0
_HEAD_BYTES: Final = 9
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})


class Http2(asyncio.Protocol):
    """One connection.

    Args:
        app: Every stream's application.
        shared: uvicorn's books: connections, tasks, default headers.
        scheme, root_path: For the scope.
    """

    def __init__(self, app: Any, shared: Any, bounds: Bounds, *, scheme: str, root_path: str) -> None:
        self._app, self._shared, self.bounds = app, shared, bounds
        self._scheme, self._root_path = scheme, root_path
        self._loop = asyncio.get_running_loop()
        settings = {
            h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
            h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADERS_BYTES,
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _BODY_WINDOW,
            h2.settings.SettingCodes.ENABLE_PUSH: 0,
        }
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=settings)
        self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.transport: asyncio.Transport
        self._streams: dict[int, _Stream] = {}
        self._writable = asyncio.Event()
        self._writable.set()
        self._write_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._resets = 0
        self._frames = _FrameLengths(self.h2.max_inbound_frame_size)
        self._is_closing = False

    # The connection ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._shared.connections.add(self)
        if len(self._shared.connections) > self.bounds.connections:
            self._app = too_many
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(_MAX_STREAMS * _BODY_WINDOW // 16)
        self.flush()
        self._rest()

    def data_received(self, data: bytes) -> None:
        """Take frames in."""
        try:
            self._frames.check(data)
            for event in self.h2.receive_data(data):
                self._take(event)
        except h2.exceptions.ProtocolError as error:
            LOG.info("an HTTP/2 connection is closed: %s", error)
            self._end()
            return
        self.flush()

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._begin(event.stream_id, event.headers)
        elif isinstance(event, h2.events.ConnectionTerminated):
            self._end()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for waiting in self._streams.values():
                waiting.window.set()
        elif (stream := self._streams.get(getattr(event, "stream_id", None) or 0)) is not None:
            if isinstance(event, h2.events.DataReceived):
                stream.take(event.data, event.flow_controlled_length)
            elif isinstance(event, h2.events.StreamEnded):
                stream.end_body()
            elif isinstance(event, h2.events.StreamReset):
                self._resets += 1
                stream.disconnect()
                if self._resets > _MAX_RESETS:
                    self._end(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
        elif isinstance(event, h2.events.DataReceived):  # of a stream that was answered already
            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    def _begin(self, stream_id: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        stream = self._streams[stream_id] = _Stream(self, stream_id, _scope(headers, self))
        self._rest()
        task = self._loop.create_task(stream.run(self._app))
        self._shared.tasks.add(task)
        task.add_done_callback(self._shared.tasks.discard)

    def ended(self, stream_id: int, *, was_answered: bool) -> None:
        """A stream is over."""
        self._streams.pop(stream_id, None)
        self._shared.total_requests += 1
        if was_answered:
            self._resets = max(0, self._resets - 1)
        if self._is_closing and not self._streams:
            self._end()
        self._rest()

    def _rest(self) -> None:
        """An idle connection does not stay for ever."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = None if self._streams else self._loop.call_later(_IDLE_S, self.shutdown)

    def flush(self) -> None:
        """Send what the state machine has written."""
        data = self.h2.data_to_send()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def shutdown(self) -> None:
        """Take no more streams; close when the last one is answered."""
        self._is_closing = True
        if not self._streams:
            self._end()
            return
        with contextlib.suppress(h2.exceptions.ProtocolError):
            # The state machine sends nothing after its own GOAWAY, so this one is written by hand: streams go on below it.
            last = self.h2.highest_inbound_stream_id
            self.transport.write(b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + last.to_bytes(4, "big") + bytes(4))

    def _end(self, code: h2.errors.ErrorCodes = h2.errors.ErrorCodes.NO_ERROR) -> None:
        if self.transport.is_closing():
            return
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.h2.close_connection(code)
        self.flush()
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read."""
        self._writable.clear()
        self._write_timer = self._loop.call_later(self.bounds.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        self._writable.set()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Every stream's client has gone."""
        self._shared.connections.discard(self)
        self.resume_writing()
        for stream in list(self._streams.values()):
            stream.disconnect()
        if self._idle_timer is not None:
            self._idle_timer.cancel()

    async def writable(self) -> None:
        """Wait until the client reads."""
        await self._writable.wait()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """What every answer carries."""
        return list(self._shared.default_headers)

    @property
    def addresses(self) -> dict[str, Any]:
        """Both ends, and how they speak."""
        peer, own = (self.transport.get_extra_info(name) for name in ("peername", "sockname"))
        ends = {"client": tuple(peer[:2]) if peer else None, "server": tuple(own[:2]) if own else None}
        return {**ends, "scheme": self._scheme, "root_path": self._root_path}


def _scope(headers: Iterable[tuple[bytes, bytes]], connection: Http2) -> dict[str, Any]:
    pseudo: dict[bytes, bytes] = {}
    plain: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.startswith(b":"):
            pseudo[name] = value
        else:
            plain.append((name, value))
    if b":authority" in pseudo and not any(name == b"host" for name, _ in plain):
        plain.insert(0, (b"host", pseudo[b":authority"]))
    raw_path, _, query = pseudo.get(b":path", b"/").partition(b"?")
    addresses = connection.addresses
    root = addresses["root_path"]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",
        "method": pseudo.get(b":method", b"GET").decode("latin-1"),
        "path": root + unquote(raw_path.decode("latin-1")),
        "raw_path": root.encode() + raw_path,
        "query_string": query,
        "headers": plain,
        "state": {},
        **addresses,
    }


class _FrameLengths:
    """Refuses a frame that is too long from its first bytes on; the state machine would collect all of it first."""

    def __init__(self, most: int) -> None:
        self._most, self._left, self._head = most, len(PREFACE), b""

    def check(self, data: bytes) -> None:
        """Follow the frames in what has come.

        Raises:
            h2.exceptions.FrameTooLargeError: One is too long.
        """
        at = 0
        while at < len(data):
            step = min(self._left, len(data) - at)
            self._left, at = self._left - step, at + step
            if self._left or at == len(data):
                continue
            part = data[at : at + _HEAD_BYTES - len(self._head)]
            self._head, at = self._head + part, at + len(part)
            if len(self._head) == _HEAD_BYTES:
                self._left, self._head = int.from_bytes(self._head[:3], "big"), b""
                if self._left > self._most:
                    raise h2.exceptions.FrameTooLargeError(f"a frame of {self._left} bytes; at most {self._most}")


class _Stream:
    """One request and its answer."""

    def __init__(self, connection: Http2, stream_id: int, scope: dict[str, Any]) -> None:
        self._connection, self._id, self._scope = connection, stream_id, scope
        self._body, self._unacknowledged, self._more_body = bytearray(), 0, True
        self._news, self.window = asyncio.Event(), asyncio.Event()
        self._has_started = self._is_complete = self._is_gone = False

    def take(self, data: bytes, flow_controlled_length: int) -> None:
        """Part of the body; its window opens again when the application has read it."""
        self._body += data
        self._unacknowledged += flow_controlled_length
        self._news.set()

    def end_body(self) -> None:
        """The body is whole."""
        self._more_body = False
        self._news.set()

    def disconnect(self) -> None:
        """The client has gone."""
        self._is_gone = True
        self._news.set()
        self.window.set()

    async def run(self, app: Any) -> None:
        """Let the application answer; what it leaves open is reset."""
        try:
            await app(self._scope, self._receive, self._send)
        except Exception:
            LOG.exception("a request over HTTP/2 failed")
        finally:
            if not self._is_complete and not self._is_gone:
                self._reset(h2.errors.ErrorCodes.INTERNAL_ERROR)
            elif self._is_complete and self._more_body:
                self._reset(h2.errors.ErrorCodes.NO_ERROR)  # the rest of the body is not wanted
            self._connection.ended(self._id, was_answered=self._is_complete)

    def _reset(self, code: h2.errors.ErrorCodes) -> None:
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self._connection.h2.reset_stream(self._id, code)
            self._connection.flush()

    async def _receive(self) -> dict[str, Any]:
        if not self._body and self._more_body is False and not self._is_gone and not self._is_complete and self._was_read:
            await self._news.wait()
        while not self._body and self._more_body and not self._is_gone:
            self._news.clear()
            await self._news.wait()
        if self._is_gone or self._is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._acknowledge()
        self._was_read = not self._more_body
        self._news.clear()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    _was_read = False

    def _acknowledge(self) -> None:
        size, self._unacknowledged = self._unacknowledged, 0
        if size:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self._connection.h2.acknowledge_received_data(size, self._id)
                self._connection.flush()

    async def _send(self, message: dict[str, Any]) -> None:
        if self._is_gone:
            return
        try:
            if message["type"] == "http.response.start":
                self._has_started = True
                headers = [(b":status", str(message["status"]).encode()), *self._connection.default_headers]
                headers += [(n.lower(), v) for n, v in message.get("headers", []) if n.lower() not in _HOP_BY_HOP]
                self._connection.h2.send_headers(self._id, headers)
            else:
                body = b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
                await self._send_body(body, ends=not message.get("more_body", False))
        except (h2.exceptions.ProtocolError, KeyError):
            self._is_gone = True  # reset or closed while this was on its way
            return
        self._connection.flush()
        await self._connection.writable()

    async def _send_body(self, body: bytes, *, ends: bool) -> None:
        machine = self._connection.h2
        while body:
            room = min(machine.local_flow_control_window(self._id), machine.max_outbound_frame_size)
            if room <= 0:
                await self._wait_for_window()
                if self._is_gone:
                    return
                continue
            machine.send_data(self._id, body[:room])
            body = body[room:]
            self._connection.flush()
            await self._connection.writable()
        if ends:
            self._is_complete = True
            machine.end_stream(self._id)
            self._news.set()

    async def _wait_for_window(self) -> None:
        self.window.clear()
        try:
            async with asyncio.timeout(self._connection.bounds.write_s):
                await self.window.wait()
        except TimeoutError:
            self._reset(h2.errors.ErrorCodes.CANCEL)
            self.disconnect()
