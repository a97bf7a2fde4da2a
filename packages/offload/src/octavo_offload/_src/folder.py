"""Where a disk tier keeps its files: a folder of its own for each identity, locked by whoever uses it.

    PATH/octavo-kv-1/<identity, 32 hex digits>-<n>/seg-00000.kv

Two engines with equal identity take folders with different `n`. Folders of other identities that nobody has open are deleted, the least
recently used first, when the budget has no room for a new file. Touches the file system.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Final

ROOT: Final = "octavo-kv-1"
MOST: Final = 64
"""Engines that may share a path with one identity."""

PATIENCE_S: Final = 1.0
"""How long the first folder is waited for: whoever had it may just be ending."""


class Folder:
    """A locked folder.

    Args:
        path: Of the tier, as the operator names it.
        identity: Of the blocks.

    Raises:
        OSError: It cannot be made or locked.
    """

    def __init__(self, path: Path, identity: bytes) -> None:
        root = path / ROOT
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for n in range(MOST):
            self.path = root / f"{identity.hex()[:32]}-{n}"
            self.path.mkdir(exist_ok=True, mode=0o700)
            lock = _try_lock(self.path, patience_s=PATIENCE_S if n == 0 else 0.0)
            if lock is not None:
                self._lock = lock
                os.utime(self.path)
                return
        raise OSError(f"{MOST} engines use {root} already")

    def has_room(self, more_bytes: int, total_bytes: int) -> bool:
        """Whether the path may hold so much more; folders of others are deleted for it, those nobody has open, oldest first."""
        used = {p: sum(f.stat().st_size for f in p.glob("seg-*.kv")) for p in self.path.parent.iterdir() if p.is_dir()}
        others = sorted((p for p in used if p != self.path and used[p]), key=lambda p: p.stat().st_mtime)
        for other in others:
            if sum(used.values()) + more_bytes <= total_bytes:
                break
            lock = _try_lock(other)
            if lock is not None:
                shutil.rmtree(other, ignore_errors=True)
                os.close(lock)
                used[other] = 0
        return sum(used.values()) + more_bytes <= total_bytes

    def segments(self) -> list[Path]:
        """Files of blocks, in order."""
        return sorted(self.path.glob("seg-*.kv"))

    def segment(self, number: int) -> Path:
        """Where a file of blocks is."""
        return self.path / f"seg-{number:05}.kv"

    def close(self) -> None:
        """Let others have it."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


def _try_lock(folder: Path, patience_s: float = 0.0) -> int | None:
    """A descriptor that holds the lock; None: somebody else has it, and kept it for so long."""
    fd, end = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() >= end:
                os.close(fd)
                return None
            time.sleep(0.05)
