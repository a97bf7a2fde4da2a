"""A frontend as a process: `python -m octavo_server.frontend`, started by `octavo serve` with a `FrontendSpec` on standard input.

Holds no weights and no jax: HTTP, text, and the way to the engine core. Ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import setproctitle

from octavo_core.config import from_mapping
from octavo_core.errors import OctavoError
from octavo_engine.process import RemoteEngine, end_with_the_parent
from octavo_server._src.config import ServerConfig
from octavo_server._src.http_server import HttpServer, own_signals
from octavo_server._src.keys import Keys
from octavo_server._src.processes import BEAT_S, FrontendSpec
from octavo_server._src.quotas import Quotas
from octavo_server._src.serving import in_thread
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text
from octavo_server._src.texts import load_frontend

_HOLD_S: Final = 5.0
"""A frontend in another's place listens after so long even if no core is ready."""

_SWITCH_S: Final = 0.001
"""Of Python's lock, from a thread that tokenises to the event loop, which needs it several times for each event."""


def main() -> int:
    """Serve until told to stop; the exit status."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontendSpec)
    setproctitle.setproctitle(f"octavo-frontend {spec.index}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(_SWITCH_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a text is tokenised in one thread in any case
    end_with_the_parent()
    config = from_mapping(ServerConfig, spec.config)
    sockets = [socket.socket(fileno=fd) for fd in spec.sockets]
    try:
        with own_signals():
            asyncio.run(_serve(spec, config, sockets))
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(spec: FrontendSpec, config: ServerConfig, sockets: list[socket.socket]) -> None:
    keys = Keys.load(config.api_key, config.api_keys_file)
    quotas = Quotas(keys.entries, Path(spec.folder) / "quotas", row=spec.index, num_rows=config.api_server_count)
    state = ServerState(config, quotas)
    engine = await RemoteEngine.start(spec.folder, spec.ipc)

    async def load() -> None:
        card = await engine.ready()
        tokenizer, template = await in_thread(lambda: load_frontend(card, config))
        text = None if tokenizer is None else Text(tokenizer, template, card.max_model_len)
        state.become_ready(engine, card, text)

    loading = asyncio.ensure_future(load())

    async def bring_up() -> None:
        await loading
        gc.freeze()  # what is here now stays: a collection that looked at it all would hold up every stream
        os.set_blocking(spec.up, False)
        while True:
            with contextlib.suppress(OSError):
                os.write(spec.up, b".")
            await asyncio.sleep(BEAT_S)

    try:
        if not spec.replaces or await _may_listen(loading):
            await HttpServer(config, state).run(sockets, bring_up)
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await engine.aclose()


async def _may_listen(loading: asyncio.Future[None]) -> bool:
    """Wait until a frontend in another's place can serve, for a while; False when it is told to stop meanwhile.

    Those beside it take the connections, or they wait: it would answer them with 503.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    for one in kept:
        loop.add_signal_handler(one, stop.set)
    stopping = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {loading, stopping}
    await asyncio.wait(either, timeout=_HOLD_S, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for one, handler in kept.items():
        loop.remove_signal_handler(one)
        signal.signal(one, handler)
    return not stop.is_set()


if __name__ == "__main__":
    sys.exit(main())
