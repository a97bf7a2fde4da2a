"""Plain ASGI middleware: request ids, errors, metrics, API keys. None wraps `receive`, so disconnects reach every endpoint."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo_server._src.body import ClientGoneError
from octavo_server._src.keys import KeyEntry, Keys
from octavo_server._src.metrics import Metrics
from octavo_server._src.openai_errors import UnauthorizedError, error_response, status_of

LOG = logging.getLogger("octavo.server")
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OPEN_PATHS = frozenset({"/health", "/ready"})
"""The only paths answered without a key."""


class RequestIds:
    """Gives every answer an `x-request-id`: the client's own if it sent a sane one, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class Errors:
    """Turns exceptions into OpenAI error bodies; what was not raised on purpose goes to the log with its traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        has_started = False

        async def watched(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGoneError:
            return
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            if status_of(error) == 500:
                LOG.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            await error_response(error)(scope, receive, send)


class HttpMetrics:
    """Counts answers by method, route pattern and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.answered(method, self._pattern(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counted)

    def _pattern(self, scope: Scope) -> str:
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), "none")


class ApiKeys:
    """Refuses every route but `OPEN_PATHS` without one of the keys, and names the key for what comes after."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan" or not self._keys or self._is_open(scope):
            return await self._app(scope, receive, send)
        found = self._found(Headers(scope=scope).getlist("authorization"))
        if found is None:
            raise UnauthorizedError(
                "wanted the header 'Authorization: Bearer KEY' with a key of this server, got none or a wrong one"
            )
        scope.setdefault("state", {})["key"] = found[0]
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        return scope["type"] == "http" and path in OPEN_PATHS

    def _found(self, headers: list[str]) -> tuple[int, KeyEntry] | None:
        scheme, _, key = headers[0].partition(" ") if len(headers) == 1 else ("", "", "")
        found = self._keys.find(key)
        return found if scheme.lower() == "bearer" else None
