"""Runs the application: binds first, answers 503 while the engine loads in a thread, drains on SIGTERM. Owns socket and signals."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import uvicorn

from octavo_core.errors import ConfigError
from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, Tokenizer
from octavo_server._src.app import build_app
from octavo_server._src.config import ServerConfig
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LAST_WORDS_S = 2.0


@runtime_checkable
class StartedEngine(Protocol):
    """An engine as `serve` gets it from its `start`: implements `octavo_core.seams.Engine`, and besides knows these.

    `generate`, `abort` and `stats` are called on the server's event loop, `close` from a thread when the server has stopped.
    """

    card: ModelCard

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen, its value, why."""

    def close(self) -> None:
        """Stop the step loop and free what it holds."""


Loaded = tuple[StartedEngine, Tokenizer | None, ChatTemplate | None]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: The address is taken, or not of this machine.
    """
    where = f"{host}:{port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}; choose another --port or --host") from None
    return sock


def serve(
    config: ServerConfig, load: Callable[[], Loaded], *, announce: Callable[[str, StartedEngine], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        load: Starts the engine and reads its tokenizer; called once, in a thread, after the port is bound.
        announce: Told the URL and the engine as soon as requests are answered.

    Raises:
        ConfigError: The port is taken.
        Exception: What `load` raised.
    """
    sock = bind(config.host, config.port)
    # uvicorn raises the signal again after a clean shutdown; the exit status is 0 all the same.
    kept = {one: signal.signal(one, lambda *_: None) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        asyncio.run(_Serving(config, sock).run(load, announce))
    finally:
        sock.close()
        for one, handler in kept.items():
            signal.signal(one, handler)


class _Server(uvicorn.Server):
    """uvicorn, which calls back when it is told to stop."""

    on_exit: Callable[[], object] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Note the signal; a second one stops at once."""
        super().handle_exit(sig, frame)
        self.on_exit()


class _Serving:
    def __init__(self, config: ServerConfig, sock: socket.socket) -> None:
        self._config, self._sock = config, sock
        self._state = ServerState(config)
        self._server = _Server(_uvicorn_config(config, self._state))
        self._engine: StartedEngine | None = None

    async def run(self, load: Callable[[], Loaded], announce: Callable[[str, StartedEngine], None] | None) -> None:
        loop = asyncio.get_running_loop()
        self._server.on_exit = lambda: loop.call_soon_threadsafe(self._drain)
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._sock]))
        loading = asyncio.ensure_future(_in_thread(load))
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if loading.done():
                self._become_ready(loading.result(), announce)
            await serving
        finally:
            self._server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)
            await self._close(loading)

    def _become_ready(self, loaded: Loaded, announce: Callable[[str, StartedEngine], None] | None) -> None:
        engine, tokenizer, template = loaded
        self._engine = engine
        text = None if tokenizer is None else Text(tokenizer, template, engine.card.max_model_len)
        self._state.become_ready(engine, engine.card, text)  # type: ignore[arg-type]
        if announce is not None:
            with contextlib.suppress(OSError):  # nobody reads standard output any more: not a reason to stop serving
                announce(url_of(self._config.host, self._sock.getsockname()[1]), engine)

    def _drain(self) -> None:
        asyncio.get_running_loop().call_later(self._config.shutdown_timeout, lambda: asyncio.ensure_future(self._state.abort_all()))

    async def _close(self, loading: asyncio.Future[Loaded]) -> None:
        if self._engine is not None:
            await _in_thread(self._engine.close)
        if not loading.done():
            # The engine is still being built in a thread that cannot be stopped.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


async def _in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a thread of its own that does not outlive the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def work() -> None:
        try:
            result, error = function(), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="octavo-load", daemon=True).start()
    return await future


def _uvicorn_config(config: ServerConfig, state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(state),
        http="httptools" if importlib.util.find_spec("httptools") else "h11",
        ws="none",
        lifespan="off",
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        server_header=False,
        root_path=config.root_path,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(config.shutdown_timeout + _LAST_WORDS_S),
    )


def url_of(host: str, port: int) -> str:
    """What to type into a client on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"
