"""Octavo's HTTP server and command line: OpenAI's API over anything that implements `octavo_core.seams.Engine`.

`create_app` is the ASGI application, `serve` runs it with a socket and signals, `ServerConfig` says how. Imports no jax. Names are
looked up on first use: the process that keeps the others needs none of HTTP.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo_server._src.version import VERSION as __version__

if TYPE_CHECKING:
    from octavo_server._src.app import create_app
    from octavo_server._src.config import ServerConfig
    from octavo_server._src.serving import serve
    from octavo_server._src.started import StartedEngine

_HOME = {
    "ServerConfig": "octavo_server._src.config",
    "StartedEngine": "octavo_server._src.started",
    "create_app": "octavo_server._src.app",
    "serve": "octavo_server._src.serving",
}

__all__ = ["ServerConfig", "StartedEngine", "__version__", "create_app", "serve"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo_server' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
