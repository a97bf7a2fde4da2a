"""Tiers of KV blocks below device memory, in which every read is verified or a miss.

`HostTier` and `DiskTier` implement `octavo_core.tiers.Tier`: keyed blocks in, `HIT_VERIFIED` or `MISS` out, nothing raised, nothing waited
for. `TieredStore` puts one over the other and moves blocks down and up for an engine; `open_tiers` builds all of it. `Files` is what a
disk tier asks of the system. No jax, no model, no cache: blocks are bytes under keys.
"""

from octavo_offload._src.checksum import checksum
from octavo_offload._src.digest import content_digest
from octavo_offload._src.disk import DiskTier
from octavo_offload._src.files import Files, ThreadFiles
from octavo_offload._src.host import HostTier
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.policy import Chooser, Meter
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
    "Slab",
    "ThreadFiles",
    "TieredStore",
    "checksum",
    "content_digest",
    "open_tiers",
]
