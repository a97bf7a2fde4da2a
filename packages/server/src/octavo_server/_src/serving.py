"""Runs the application in one process: binds first, answers 503 while the engine loads in a thread, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from octavo_models.text import ChatTemplate, Tokenizer
from octavo_server._src.config import ServerConfig
from octavo_server._src.http_server import HttpServer, own_signals
from octavo_server._src.sockets import bind, raise_file_limit, url_of
from octavo_server._src.started import StartedEngine
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text

Loaded = tuple[StartedEngine, Tokenizer | None, ChatTemplate | None]


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
    raise_file_limit()
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
                announce(url_of(config.host, sock.getsockname()[1], scheme=config.scheme), engine)

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
