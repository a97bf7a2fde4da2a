"""A functional prefix cache over a pool of KV blocks: pure, jittable, auditable.

`BlockCache` implements `octavo_core.seams.PrefixCache`. `match` looks without leasing, `audit` checks a cache's books,
`handle` and `is_current` name a block so that a name from an earlier use is recognised as stale.
"""

from octavo_kvcache._src.audit import audit
from octavo_kvcache._src.cache import BlockCache
from octavo_kvcache._src.match import Match, match
from octavo_kvcache._src.pool import handle, is_current
from octavo_kvcache._src.state import CacheState

__version__ = "0.1.0"

__all__ = ["BlockCache", "CacheState", "Match", "audit", "handle", "is_current", "match"]
