"""The HTTP server around the application: uvicorn, its signals, and how it stops. Only this module and `http1` import uvicorn.

Stopping: the first SIGTERM or SIGINT stops admission (`/ready` is 503, new requests are told to go elsewhere) while the port stays
open; what runs may finish until `shutdown_timeout`, then it is aborted; then the port closes. A second signal stops at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

import uvicorn

from octavo_server._src.app import build_app
from octavo_server._src.bounds import Bounds
from octavo_server._src.config import ServerConfig
from octavo_server._src.http1 import BoundedHttp1
from octavo_server._src.sockets import BACKLOG, room_for_connections
from octavo_server._src.state import ServerState
from octavo_server._src.tls import tls_context

_KEEP_ALIVE_S: Final = 75
_LAST_WORDS_S: Final = 2.0
_TICK_S: Final = 0.02
_ACCEPTED_AT_ONCE: Final = 32


class _Uvicorn(uvicorn.Server):
    """uvicorn, which asks somebody else what a signal means."""

    on_signal: Callable[[], object] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. asyncio accepts as many connections at a go as it listens for: few, so that frontends share a crowd; many may queue."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Note the signal."""
        self.on_signal()


class HttpServer:
    """Serves the application on sockets that listen already.

    Args:
        state: The application's; `is_draining` is set here.
    """

    def __init__(self, config: ServerConfig, state: ServerState) -> None:
        self._config, self.state = config, state
        self._server = _Uvicorn(_uvicorn_config(config, state))
        self._num_signals = 0

    async def run(self, sockets: Sequence[socket.socket], bring_up: Callable[[], Awaitable[None]]) -> None:
        """Serve until told to stop; `bring_up` makes the state ready meanwhile, and its failure ends the server.

        Raises:
            Exception: What `bring_up` raised.
        """
        loop = asyncio.get_running_loop()
        self._server.on_signal = lambda: loop.call_soon_threadsafe(self.stop)
        serving = asyncio.ensure_future(self._server.serve(sockets=list(sockets)))
        bringing = asyncio.ensure_future(bring_up())
        await asyncio.wait({serving, bringing}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if bringing.done():
                bringing.result()
            await serving
        finally:
            self._server.should_exit = True
            bringing.cancel()
            await asyncio.gather(serving, bringing, return_exceptions=True)

    def stop(self) -> None:
        """What a signal does: drain, or with the second one stop at once."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        self.state.is_draining = True
        if self.state.served is not None and not await self._idle(self._config.shutdown_timeout):
            await self.state.abort_all()
            await self._idle(_LAST_WORDS_S)
        self._server.should_exit = True

    async def _idle(self, most_s: float) -> bool:
        end_s = asyncio.get_running_loop().time() + most_s
        while self.state.answering:
            if asyncio.get_running_loop().time() > end_s:
                return False
            await asyncio.sleep(_TICK_S)
        return True


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """uvicorn raises a signal again after a clean shutdown; the exit status is 0 all the same."""
    kept = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in kept.items():
            signal.signal(one, handler)


def _uvicorn_config(config: ServerConfig, state: ServerState) -> uvicorn.Config:
    bounds = Bounds(min(config.max_connections, room_for_connections()), config.header_timeout, config.write_timeout)
    chosen = uvicorn.Config(
        build_app(state),
        http=type("Http1", (BoundedHttp1,), {"bounds": bounds, "speaks_http2": config.http2}),
        ws="none",
        lifespan="off",
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        root_path=config.root_path,
        backlog=_ACCEPTED_AT_ONCE,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.shutdown_timeout + _LAST_WORDS_S),
    )
    chosen.load()
    chosen.ssl = tls_context(config)
    return chosen
