"""Wakes a process that sleeps on a file descriptor: one datagram socket in a folder of the server's own. Touches the file system.

The order that loses nothing: a sender sends, then rings; a receiver silences, then receives everything, then sleeps.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path


class Bell:
    """The sleeper's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))

    def fileno(self) -> int:
        """Readable once the bell has rung."""
        return self._socket.fileno()

    def silence(self) -> None:
        """Forget every ring so far."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)

    def close(self) -> None:
        """Take the bell away: whoever rings then learns that the sleeper is gone."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Ringer:
    """The other side."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._path = str(path)

    def ring(self) -> bool:
        """Wake the sleeper; False when it is gone. One that has not heard earlier rings yet will hear those."""
        try:
            self._socket.sendto(b"!", self._path)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
