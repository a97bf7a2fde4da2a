"""Octavo's HTTP server and command line: OpenAI's API over anything that implements `octavo_core.seams.Engine`.

`create_app` is the ASGI application, `serve` runs it with a socket and signals, `ServerConfig` says how. Imports no jax.
"""

from octavo_server._src.app import create_app
from octavo_server._src.config import ServerConfig
from octavo_server._src.serving import StartedEngine, serve
from octavo_server._src.version import VERSION as __version__

__all__ = ["ServerConfig", "StartedEngine", "__version__", "create_app", "serve"]
