"""HTTP/1.1 as uvicorn speaks it, with bounds on what one connection may hold: time for a head, time without reading, their number.

Hands connections that speak HTTP/2 (by ALPN, or from their first bytes on) to `http2`. Knows sockets and times; what a request means is the application's.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo_core.errors import RequestError
from octavo_server._src.bounds import Bounds, too_many
from octavo_server._src.http2 import PREFACE, Http2
from octavo_server._src.openai_errors import error_body

MAX_HEAD_BYTES: Final = 64 * 1024


class BoundedHttp1(HttpToolsProtocol):
    """uvicorn's protocol within bounds."""

    bounds: Bounds
    speaks_http2: bool = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._beginning: bytes | None = b"" if self.speaks_http2 else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it; a connection too many is answered by `too_many`, twice too many is closed."""
        super().connection_made(transport)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None:
            self._beginning = None
            if encrypted.selected_alpn_protocol() == "h2":
                self._become_http2(b"")
                return
        count = len(self.connections)
        if count > 2 * self.bounds.connections:
            transport.abort()
        elif count > self.bounds.connections:
            self.app = too_many
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Time runs from the first byte of a head on. A connection that begins as HTTP/2 does goes on as such."""
        if self._beginning is not None:
            data = self._beginning + data
            if data[: len(PREFACE)] == PREFACE[: len(data)]:
                self._beginning = data
                if len(data) >= len(PREFACE):
                    self._become_http2(data)
                return
            self._beginning = None
        if self._head_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()
        if self._head_timer is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            error = RequestError(f"the head of a request has at most {MAX_HEAD_BYTES} bytes", code="head_too_large")
            self._refuse(431, error)

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._stop("_head_timer")
        self._head_bytes = 0
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client does not keep up."""
        super().pause_writing()
        self._stop("_write_timer")
        self._write_timer = self.loop.call_later(self.bounds.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._stop("_write_timer")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop("_head_timer")
        self._stop("_write_timer")
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, in the shape of every other error."""
        self._refuse(400, RequestError("this is not a valid HTTP/1.1 request", code="invalid_http"))

    def _refuse(self, status: int, error: RequestError) -> None:
        body = msgspec.json.encode(error_body(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _become_http2(self, data: bytes) -> None:
        self._stop("_head_timer")
        self.connections.discard(self)
        other = Http2(self.app, self.server_state, self.bounds, scheme=self.scheme or "http", root_path=self.root_path)
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        if data:
            other.data_received(data)

    def _stop(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._late)

    def _late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
