"""Tiers that close themselves, and files that fail on command."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo_core.testing.tiers import BLOCK_BYTES
from octavo_offload import DiskTier, HostTier, Jobs, ThreadFiles, TieredStore, open_tiers


class FaultyFiles:
    """`ThreadFiles` with faults in between: `fault(call, offset)` names one or answers None.

    Faults: `EIO`, `ENOSPC` and other names of `errno`; `short`; `flip` (a bit of what is read or written); `slow`; `half` (only half is
    written, and the call succeeds).
    """

    def __init__(self, folder: Path, fault: Callable[[str, int], str | None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._inner, self.fault, self.slow_s = ThreadFiles(folder), fault, 0.02
        self.told = "faulty " + self._inner.told

    def _maybe(self, call: str, offset: int) -> str | None:
        fault = self.fault(call, offset)
        if fault is not None and hasattr(errno, fault):
            raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)))
        if fault == "short":
            raise OSError(errno.EIO, "fewer bytes were moved")
        if fault == "slow":
            time.sleep(self.slow_s)
        return fault

    def adopt(self, memory: memoryview) -> None:
        self._inner.adopt(memory)

    def open(self, path: Path, size: int) -> int:
        self._maybe("open", 0)
        return self._inner.open(path, size)

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> None:
        fault = self._maybe("read", offset)
        self._inner.read(fd, into, offset)
        if fault == "flip":
            into[-1][len(into[-1]) // 3] ^= 4

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        fault = self._maybe("write", offset)
        if fault == "half":
            self._inner.write(fd, [data[0]], offset)
            return
        if fault == "flip":
            import mmap

            whole = memoryview(mmap.mmap(-1, len(data[1])))
            whole[:] = data[1]
            whole[random.Random(offset).randrange(BLOCK_BYTES)] ^= 16
            data = [data[0], whole]
        self._inner.write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._maybe("sync", 0)
        self._inner.sync(fd)

    def close(self, fd: int) -> None:
        self._inner.close(fd)


@pytest.fixture
def faulty() -> type[FaultyFiles]:
    return FaultyFiles


@pytest.fixture
def make_host() -> Iterator[Callable[..., HostTier]]:
    made = []

    def make(blocks: int = 8, **options: Any) -> HostTier:
        jobs = Jobs(2, "test")
        made.append(jobs)
        return HostTier(blocks * BLOCK_BYTES, BLOCK_BYTES, jobs, **options)

    yield make
    for jobs in made:
        jobs.close()


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    made: list[tuple[DiskTier, Jobs]] = []

    def make(blocks: int = 8, *, identity: bytes = b"i" * 32, path: Path = tmp_path, **options: Any) -> DiskTier:
        jobs = Jobs(3, "test")
        tier = DiskTier(path, blocks * 3 * 4096, BLOCK_BYTES, identity, jobs, segment_bytes=4 * 3 * 4096, **options)
        made.append((tier, jobs))
        return tier

    def close(tier: DiskTier) -> None:
        jobs = next(j for t, j in made if t is tier)
        jobs.close()
        tier.close()
        made.remove((tier, jobs))

    make.close = close  # type: ignore[attr-defined]
    yield make
    for tier, _ in list(made):
        close(tier)


PIECES = (512, 4096)


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[..., TieredStore]]:
    made = []

    def make(host_blocks: int = 8, disk_blocks: int = 0, *, path: Path = tmp_path, **options: Any) -> TieredStore:
        disk = (path, disk_blocks * 3 * 4096) if disk_blocks else None
        store = open_tiers(PIECES, host_bytes=host_blocks * BLOCK_BYTES, disk=disk, **options)
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


def pieces_of(numbers: Sequence[int]) -> list[np.ndarray]:
    """What the suite saves under the keys of these numbers."""
    from octavo_core.testing.tiers import block_of

    whole = np.stack([np.frombuffer(block_of(n), np.uint8) for n in numbers])
    return [np.ascontiguousarray(whole[:, : PIECES[0]]), np.ascontiguousarray(whole[:, PIECES[0] :])]


@pytest.fixture(name="pieces_of")
def pieces_of_fixture() -> Callable[[Sequence[int]], list[np.ndarray]]:
    return pieces_of
