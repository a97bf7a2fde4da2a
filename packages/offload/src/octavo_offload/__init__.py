"""Tiers of KV blocks below device memory, in which every read is verified or a miss.

`HostTier`, `DiskTier` and `RemoteTier` implement `octavo_core.tiers.Tier`: keyed blocks in, `HIT_VERIFIED` or `MISS` out, nothing raised,
nothing waited for. `TieredStore` puts the first over the others and moves blocks down and up for an engine; `open_tiers` builds all of it.
`Files` is what a disk tier asks of the system; `octavo_offload.node` has the store that remote tiers ask. No jax, no model, no cache:
blocks are bytes under keys.
"""

from octavo_offload._src.checksum import checksum
from octavo_offload._src.digest import content_digest
from octavo_offload._src.disk import DiskTier
from octavo_offload._src.files import Files, ThreadFiles
from octavo_offload._src.host import HostTier
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.nixl_files import gds_files
from octavo_offload._src.policy import Chooser, Meter
from octavo_offload._src.remote.auth import read_key
from octavo_offload._src.remote.config import RemoteConfig
from octavo_offload._src.remote.tier import RemoteTier
from octavo_offload._src.remote.tls import Tls, read_tls
from octavo_offload._src.setup import open_tiers
from octavo_offload._src.slab import Slab
from octavo_offload._src.store import Fetch, TieredStore

__version__ = "0.1.0"

__all__ = [
    "Chooser",
    "DiskTier",
    "Fetch",
    "Files",
    "HostTier",
    "Jobs",
    "Meter",
    "RemoteConfig",
    "RemoteTier",
    "Slab",
    "ThreadFiles",
    "TieredStore",
    "Tls",
    "checksum",
    "content_digest",
    "gds_files",
    "open_tiers",
    "read_key",
    "read_tls",
]
