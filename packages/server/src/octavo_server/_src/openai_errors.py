"""Exceptions as OpenAI error bodies: `{"error": {"message", "type", "param", "code"}}`. Never shows a traceback to a client."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo_core.errors import EngineDeadError, OctavoError, OverloadedError, RequestError

_INTERNAL = "the server failed to answer this request; its log says why"


class UnauthorizedError(RequestError):
    """No key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class RateLimitedError(RequestError):
    """A key has used up what it may."""

    http_status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SlowBodyError(RequestError):
    """The request body did not come in time."""

    http_status = 408
    code = "request_timeout"


class BodyTooLargeError(RequestError):
    """The request body is over the limit."""

    http_status = 413
    code = "request_too_large"


class NotReadyError(OctavoError):
    """The engine is still loading."""

    http_status = 503
    code = "not_ready"


class DrainingError(OctavoError):
    """The server is shutting down."""

    http_status = 503
    code = "shutting_down"


class GenerationError(OctavoError):
    """The engine could not go on with a request that had started."""

    http_status = 500
    code = "engine_error"


class AbortedError(OctavoError):
    """The request was ended from this side, as a shutdown does."""

    http_status = 503
    code = "aborted"


def _type_of(status: int) -> str:
    names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    return names.get(status, "invalid_request_error" if status < 500 else "server_error")


def status_of(error: Exception) -> int:
    """The HTTP status that tells this error."""
    if isinstance(error, HTTPException):
        return error.status_code
    return error.http_status if isinstance(error, OctavoError) else 500


def error_body(error: Exception) -> dict[str, Any]:
    """What a client is told. Exceptions nobody raised on purpose stay in the log."""
    if isinstance(error, HTTPException):
        message, code, param = error.detail, None, None
    elif isinstance(error, OctavoError):
        message, code, param = str(error), error.code, getattr(error, "param", None)
    else:
        message, code, param = _INTERNAL, "internal_error", None
    return {"error": {"message": message, "type": _type_of(status_of(error)), "param": param, "code": code}}


def error_response(error: Exception) -> Response:
    """The same as an HTTP answer, with Retry-After and WWW-Authenticate where they belong."""
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, OverloadedError | RateLimitedError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, NotReadyError | AbortedError | DrainingError | EngineDeadError):
        headers["retry-after"] = "5"
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLargeError | SlowBodyError | DrainingError):
        headers["connection"] = "close"
    content = msgspec.json.encode(error_body(error))
    return Response(content, status_of(error), headers=headers, media_type="application/json")
