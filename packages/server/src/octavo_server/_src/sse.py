"""Server-sent events over plain ASGI. Awaits every send, so a slow reader slows its own stream and nothing piles up."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Send

from octavo_server._src.openai_errors import error_body, status_of

LOG = logging.getLogger("octavo.server")
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Clients that split lines as Python does would cut an event at these.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def encode_event(value: Any) -> bytes:
    """One event with a JSON payload."""
    data = msgspec.json.encode(value)
    for raw, escaped in _LINE_ENDS:
        if raw in data:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def send_events(send: Send, events: AsyncGenerator[dict[str, Any], None]) -> None:
    """Send a stream and its `[DONE]`. A failure before the first event is raised; a later one becomes an error event.

    Raises:
        Exception: What `events` raised before anything was sent.
    """
    async with aclosing(events):
        try:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            await _send(send, encode_event(first))
        except StopAsyncIteration:
            raise RuntimeError("a stream has at least one event") from None
        try:
            async for event in events:
                await _send(send, encode_event(event))
        except Exception as error:
            if status_of(error) == 500:
                LOG.error("a stream failed", exc_info=error)
            await _send(send, encode_event(error_body(error)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
