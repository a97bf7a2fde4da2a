"""How bytes reach a disk: positioned reads and writes from threads, around the page cache where the file system allows it.

Touches the file system. Every failure is an `OSError`; a short transfer is one too.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

SYNC_READS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


@runtime_checkable
class Files(Protocol):
    """What a disk tier asks of the operating system. Buffers are aligned to pages, as are offsets."""

    told: str

    def adopt(self, memory: memoryview) -> None:
        """Memory that buffers will often be parts of: what lies in it need not be copied on its way. It stays where it is."""

    def open(self, path: Path, size: int) -> int:
        """A file of at least `size` bytes, whose room on the disk is taken."""

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers."""

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """Write the buffers."""

    def sync(self, fd: int) -> None:
        """Let what was written survive a loss of power."""

    def close(self, fd: int) -> None:
        """Done with a file."""


class ThreadFiles:
    """`Files` by `preadv` and `pwritev`, in whichever thread calls.

    Args:
        folder: Where files will be: whether it takes direct I/O is tried there.

    Attributes:
        told: How it works, in words.
        is_direct: Around the page cache.
    """

    def __init__(self, folder: Path) -> None:
        self._direct = self._try_direct(folder)
        self.is_direct = bool(self._direct)
        self.told = "threads with preadv and pwritev, " + (
            "O_DIRECT" if self._direct else "through the page cache: no O_DIRECT here"
        )

    @staticmethod
    def _try_direct(folder: Path) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        probe = folder / f".probe-{os.getpid()}"
        try:
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT | flag, 0o600))
        except OSError:
            flag = 0
        with contextlib.suppress(OSError):
            probe.unlink()
        return flag

    def adopt(self, memory: memoryview) -> None:
        """See `Files`. The kernel takes any."""

    def open(self, path: Path, size: int) -> int:
        """See `Files`. A file that cannot be preallocated whole is removed."""
        fd = os.open(path, SYNC_READS | self._direct, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                _allocate(fd, size)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        return fd

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> None:
        """See `Files`."""
        _expect_all(os.preadv(fd, into, offset), into, "read")

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """See `Files`."""
        _expect_all(os.pwritev(fd, data, offset), data, "written")

    def sync(self, fd: int) -> None:
        """See `Files`."""
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        """See `Files`."""
        os.close(fd)


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def _expect_all(moved: int, buffers: Sequence[memoryview], verb: str) -> None:
    wanted = sum(map(len, buffers))
    if moved != wanted:
        raise OSError(errno.EIO, f"{moved} of {wanted} bytes were {verb}")
