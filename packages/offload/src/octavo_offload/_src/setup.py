"""From sizes and a path to running tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from octavo_core.errors import ConfigError
from octavo_offload._src.disk import DiskTier
from octavo_offload._src.files import Files
from octavo_offload._src.host import HostTier
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.lower import Lane, LowerTier
from octavo_offload._src.order import Policy
from octavo_offload._src.remote.config import RemoteConfig
from octavo_offload._src.remote.tier import RemoteTier
from octavo_offload._src.store import TieredStore

STAGING_BYTES: Final = 256 << 20
"""Host memory through which blocks reach lower tiers where no host tier was asked for."""

COPY_THREADS: Final = 2
DISK_THREADS: Final = 4


def open_tiers(
    piece_bytes: Sequence[int],
    *,
    host_bytes: int = 0,
    disk: tuple[Path, int] | None = None,
    remote: RemoteConfig | None = None,
    identity: bytes = bytes(32),
    lock: bool = False,
    policy: Policy = "lru",
    files: Files | None = None,
) -> TieredStore:
    """Start tiers.

    Args:
        piece_bytes: Bytes of a block in each array it is gathered to.
        host_bytes: Of host memory; with a lower tier and 0, what passes blocks on is small.
        disk: Folder and byte budget.
        remote: A store on another machine.
        identity: 32 bytes over what all blocks have in common; blocks of another identity are not found.
        lock: Lock host memory.
        policy: Which block of host memory goes first.
        files: Another way to the disk.

    Raises:
        OSError: The folder cannot be made or used.
        ConfigError: The store refuses us.
    """
    block_bytes = sum(piece_bytes)
    staging_bytes = STAGING_BYTES if remote else min(STAGING_BYTES, disk[1] if disk else 0)
    jobs = Jobs(COPY_THREADS, "octavo-tiers")
    host = HostTier(host_bytes or max(staging_bytes, 4 * block_bytes), block_bytes, jobs, lock=lock, policy=policy)
    lower: list[LowerTier] = []
    lower_jobs: list[Jobs] = []
    lanes: list[Lane] = []
    try:
        if disk is not None:
            lower_jobs.append(Jobs(DISK_THREADS, "octavo-disk"))
            on_disk = DiskTier(*disk, block_bytes, identity, lower_jobs[-1], files=files)
            lower.append(on_disk)
            for part in host.slab.parts:
                on_disk.adopt(part.whole)
        if remote is not None:
            tier = RemoteTier(remote, block_bytes, identity)
            lower.append(tier)
            lanes.append(tier)
    except (OSError, ConfigError):
        for tier_opened in lower:
            tier_opened.close()
        for threads in (*lower_jobs, jobs):
            threads.close()
        raise
    return TieredStore(host, lower, jobs, piece_bytes, lower_jobs=lower_jobs, lanes=lanes)
