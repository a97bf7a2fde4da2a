"""What connections may take, whatever they speak."""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo_core.errors import OverloadedError
from octavo_server._src.openai_errors import error_response


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Of one frontend.

    Attributes:
        connections: Open at once in this process; further ones are told 503.
        head_s: From the first byte expected to the end of a request's head.
        write_s: Without the client reading anything, while something waits for it.
    """

    connections: int
    head_s: float
    write_s: float


async def too_many(scope: Any, receive: Any, send: Any) -> None:
    """The application of a connection that is one too many."""
    error = OverloadedError("this server has as many connections as it may (--max-connections); try again later")
    response = error_response(error)
    response.headers["connection"] = "close"
    await response(scope, receive, send)
