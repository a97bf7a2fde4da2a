"""Runs the application in one process: binds first, answers 503 while the engine loads in a thread, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from octavo_core.errors import ConfigError
from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, Tokenizer
from octavo_server._src.config import ServerConfig
from octavo_server._src.http_server import BACKLOG, HttpServer, own_signals
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text


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
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {where}: {os.strerror(error.errno or 0)}; choose another --port or --host") from None
    return sock


def serve(
    config: ServerConfig, load: Callable[[], Loaded], *, announce: Callable[[str, StartedEngine], None] | None = None
) -> None:
    """Serve in this process until SIGTERM or SIGINT.

    Args:
        load: Starts the engine and reads its tokenizer; called once, in a thread, after the port is bound.
        announce: Told the URL and the engine as soon as requests are answered.

    Raises:
        ConfigError: The port is taken.
        Exception: What `load` raised.
    """
    sock = bind(config.host, config.port)
    try:
        with own_signals():
            asyncio.run(_serve(config, sock, load, announce))
    finally:
        sock.close()


async def _serve(
    config: ServerConfig, sock: socket.socket, load: Callable[[], Loaded], announce: Callable[[str, StartedEngine], None] | None
) -> None:
    state = ServerState(config)
    loading = asyncio.ensure_future(in_thread(load))

    async def bring_up() -> None:
        engine, tokenizer, template = await asyncio.shield(loading)
        text = None if tokenizer is None else Text(tokenizer, template, engine.card.max_model_len)
        state.become_ready(engine, engine.card, text)  # type: ignore[arg-type]
        if announce is not None:
            with contextlib.suppress(OSError):  # nobody reads standard output any more: not a reason to stop serving
                announce(url_of(config.host, sock.getsockname()[1]), engine)

    try:
        await HttpServer(config, state).run([sock], bring_up)
    finally:
        if not loading.done():
            # The engine is still being built in a thread that cannot be stopped.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        if loading.exception() is None:
            await in_thread(loading.result()[0].close)


async def in_thread(function: Callable[[], Any]) -> Any:
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


def url_of(host: str, port: int) -> str:
    """What to type into a client on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"
