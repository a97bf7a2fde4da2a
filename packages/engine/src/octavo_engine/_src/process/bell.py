"""Wakes a process that sleeps on a file descriptor: one named pipe in a folder of the server's own. Touches the file system.

The order that loses nothing: a sender sends, then rings; a receiver silences, then receives everything, then sleeps. A pipe, because
ringing it is one write to an open file and silencing it one read, however often it rang; a sleeper pays for both with cold caches.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

_RINGS: Final = 65536
"""Bytes a pipe holds; further rings are not needed."""


class Bell:
    """The sleeper's side."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # a writer of its own: without any, a pipe is readable all the time

    def fileno(self) -> int:
        """Readable once the bell has rung."""
        return self._file

    def silence(self) -> None:
        """Forget every ring so far."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, _RINGS)

    def close(self) -> None:
        """Take the bell away: whoever rings then learns that the sleeper is gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.path.unlink(missing_ok=True)


class Ringer:
    """The other side."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1

    def ring(self) -> bool:
        """Wake the sleeper; False when it is gone. One that has not heard earlier rings yet will hear those."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(self._file, b"!")
        except BlockingIOError:
            return True
        except OSError:  # no such bell, or nobody listens to it
            return False
        return True

    def close(self) -> None:
        """Close the pipe."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
