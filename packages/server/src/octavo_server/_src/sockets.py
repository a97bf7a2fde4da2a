"""Listening sockets and how they are shown. Touches the network."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from typing import Final

from octavo_core.errors import ConfigError

BACKLOG: Final = 4096
_OTHER_FILES: Final = 96
"""Files a frontend has open that are no connections."""


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


def url_of(host: str, port: int, *, scheme: str = "http") -> str:
    """What to type into a client on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, host)
    return f"{scheme}://{f'[{shown}]' if ':' in shown and not shown.startswith('[') else shown}:{port}"


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections() -> int:
    """How many connections may be open so that as many again can still be told that they are too many."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, (soft - _OTHER_FILES) // 2)
