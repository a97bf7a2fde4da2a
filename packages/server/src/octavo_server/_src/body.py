"""From bytes to a validated request: bounded reading, strict JSON, pydantic. Knows no endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from octavo_core.errors import OverloadedError, RequestError
from octavo_server._src.openai_errors import BodyTooLargeError, SlowBodyError

M = TypeVar("M", bound=BaseModel)
_DRAINED_BODIES = 4
_PIECE = 64 * 1024
_PIECES_DEPTH = 4
"""Of a body, a list of messages, a message, its parts; deeper, each look at what is nested would cost as much as the whole."""
_LOOKED_AT = 64
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
BODIES_AT_ONCE = 16
"""Of the largest size; there may be any number of small ones."""


class ClientGoneError(Exception):
    """The client went away before its request was read; there is nobody to answer."""


class Bodies:
    """The bytes of bodies that are held at once, by all requests of a server: many large ones together are as bad as a huge one.

    Args:
        most: Bytes in all.
    """

    def __init__(self, most: int) -> None:
        self._most, self.held_bytes = most, 0

    @contextlib.contextmanager
    def of_one_request(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that counts bytes on account of one request, until that is over; it raises when there are too many."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held_bytes + size > self._most:
                raise OverloadedError(f"the bodies of all requests have at most {self._most} bytes together; try again later")
            self.held_bytes += size
            mine += size

        try:
            yield take
        finally:
            self.held_bytes -= mine


async def read_body(receive: Receive, limit: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
    """The request's body; `take` is told of its bytes as they come.

    A body over the limit is read on (and dropped) for a while, so that the client gets to read the refusal.

    Raises:
        BodyTooLargeError: More than `limit` bytes.
        SlowBodyError: It was not there in time.
        ClientGoneError: The connection ended.
        OverloadedError: All bodies together are too large.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, limit, take)
    except TimeoutError:
        raise SlowBodyError(f"a request body comes within {timeout_s:g} s (--body-timeout); this one did not") from None


async def _read(receive: Receive, limit: int, take: Callable[[int], None]) -> bytes:
    chunks, size, more = [], 0, True
    while more and size <= _DRAINED_BODIES * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunk = message.get("body", b"")
        size += len(chunk)
        more = message.get("more_body", False)
        if size <= limit:
            take(len(chunk))
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > limit:
        raise BodyTooLargeError(f"a request body has at most {limit} bytes (--max-body-bytes), got more")
    return b"".join(chunks)


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RequestError: For anything else: broken JSON, NaN, invalid UTF-8, lone surrogates, deep nesting, another type.
    """
    try:
        value = _decoded(body)
    except RecursionError:
        raise RequestError("the request body is nested too deeply", code="invalid_json") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"wanted a JSON object as request body, got {_kind(value)}", code="invalid_json")
    return value


def _decoded(body: bytes) -> Any:
    with contextlib.suppress(msgspec.MsgspecError):
        return _in_pieces(body, 0)
    return msgspec.json.decode(body)  # what is wrong is said with its place in the whole


def _in_pieces(data: bytes | msgspec.Raw, depth: int) -> Any:
    """What is large, an array of objects or texts above all, one item after the other: no call in C keeps Python's lock for long."""
    begins = bytes(memoryview(data)[:_LOOKED_AT]).lstrip() if len(data) > _PIECE and depth < _PIECES_DEPTH else b""
    if begins.startswith(b"{"):
        return {name: _in_pieces(value, depth + 1) for name, value in _OBJECT.decode(data).items()}
    if begins.startswith(b"[") and begins[1:].lstrip().startswith((b"{", b"[", b'"')):
        return [_in_pieces(item, depth + 1) for item in _ARRAY.decode(data)]
    return msgspec.json.decode(data)


def validate(model: type[M], value: dict[str, Any], *, ignore_unknown: bool) -> M:
    """A request of the given model.

    Raises:
        RequestError: Naming the first offending field.
    """
    try:
        return model.model_validate(value, context={"ignore_unknown": ignore_unknown})
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        got = "" if first["type"] == "missing" else f", got {_shown(first['input'])}"
        raise RequestError(f"{path}: {first['msg']}{got}", param=path) from None


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'an array' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
