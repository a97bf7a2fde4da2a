"""Where a server keeps its sockets, bells and what names its shared memory: a folder per user, in it one per server. Touches the disk.

A server's folder is locked as long as its keeper lives, and the system gives the lock back however the keeper ends. So whoever starts
next can tell what a dead server has left from what a living one needs, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from octavo_core.errors import ConfigError

_MAX_PATH_BYTES: Final = 107
"""Of a local socket."""
_LONGEST_NAME: Final = len("/s-12345678/f-0123456789abcdef-requests.data")


def user_folder() -> Path:
    """The folder of this user, made if need be: nobody else can write there.

    Raises:
        ConfigError: There is no place for it.
    """
    refusals = []
    for base in _places():
        path = Path(base) / f"octavo-{os.getuid()}"
        try:
            _check(path)
        except OSError as error:
            refusals.append(f"{path}: {error.strerror}")
        else:
            return path
    raise ConfigError(
        f"there is no folder for sockets and shared memory: {'; '.join(refusals)}; set XDG_RUNTIME_DIR to a folder of your own with a short name"
    )


def _places() -> list[str]:
    given = [os.environ[name] for name in ("XDG_RUNTIME_DIR", "TMPDIR") if os.environ.get(name)]
    return list(dict.fromkeys([*given, "/tmp"]))


def _check(path: Path) -> None:
    """Make the folder or see that it is one's own.

    Raises:
        OSError: It cannot be used.
    """
    if len(os.fsencode(path)) + _LONGEST_NAME > _MAX_PATH_BYTES:
        raise OSError(0, f"the name is too long, {_MAX_PATH_BYTES - _LONGEST_NAME} bytes are possible")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()  # not what a link points to
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(0, "it is no folder")
    if found.st_uid != os.getuid():
        raise OSError(0, "it belongs to another user")
    if found.st_mode & 0o077:
        path.chmod(0o700)
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(b"x")


class ServerFolder:
    """The folder of one server, until it is closed.

    Raises:
        ConfigError: There is no place for it.
    """

    def __init__(self) -> None:
        root = user_folder()
        with _locked(root / "lock"):
            for path in root.glob("s-*"):
                _remove_if_dead(path)
            self.path = Path(tempfile.mkdtemp(prefix="s-", dir=root))
            self._lock = _lock_file(self.path / "lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock_file(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    file = _lock_file(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _remove_if_dead(path: Path) -> None:
    try:
        file = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it died before it had its lock
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(file)
