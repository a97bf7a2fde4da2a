"""From sizes and a path to running tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo_offload._src.disk import DiskTier
from octavo_offload._src.files import Files
from octavo_offload._src.host import HostTier
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.store import TieredStore

STAGING_BYTES: Final = 256 << 20
"""Host memory through which blocks reach a disk where no host tier was asked for."""

COPY_THREADS: Final = 2
DISK_THREADS: Final = 4


def open_tiers(
    piece_bytes: Sequence[int],
    *,
    host_bytes: int = 0,
    disk: tuple[Path, int] | None = None,
    identity: bytes = bytes(32),
    lock: bool = False,
    files: Files | None = None,
) -> TieredStore:
    """Start tiers.

    Args:
        piece_bytes: Bytes of a block in each array it is gathered to.
        host_bytes: Of host memory; with a disk and 0, what passes blocks on is small.
        disk: Folder and byte budget.
        identity: 32 bytes over what all blocks have in common; blocks of another identity are not found.
        lock: Lock host memory.
        files: Another way to the disk.

    Raises:
        OSError: The folder cannot be made or used.
    """
    block_bytes = sum(piece_bytes)
    host_bytes = host_bytes or max(min(STAGING_BYTES, disk[1] if disk else 0), 4 * block_bytes)
    jobs = Jobs(COPY_THREADS, "octavo-tiers")
    host = HostTier(host_bytes, block_bytes, jobs, lock=lock)
    if disk is None:
        return TieredStore(host, None, jobs, piece_bytes)
    disk_jobs = Jobs(DISK_THREADS, "octavo-disk")
    try:
        below = DiskTier(*disk, block_bytes, identity, disk_jobs, files=files)
    except OSError:
        disk_jobs.close()
        jobs.close()
        raise
    return TieredStore(host, below, jobs, piece_bytes, disk_jobs)
