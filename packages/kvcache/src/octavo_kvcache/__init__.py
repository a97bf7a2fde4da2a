"""A functional prefix cache over pools of KV blocks: pure, jittable, auditable.

`RadixCache` implements `octavo_core.seams.PrefixCache`. Below it stand functions of the tree alone (`RadixState`), each jittable:
`init`, `match` and `match_tail` look; `allocate`, `insert`, `lease`, `release`, `evict` change; `surplus`, `lend` and `settle` demote in
two phases; `handle` and `is_current` name a block so that a name from an earlier use is recognised as stale; `audit`
checks all books on the host; `InPlace` compiles an operation so that calling it costs little. Eviction policies and their protocol are in `octavo_kvcache.policy`.
"""

from octavo_kvcache._src.audit import audit
from octavo_kvcache._src.cache import RadixCache
from octavo_kvcache._src.evict import evict
from octavo_kvcache._src.in_place import InPlace
from octavo_kvcache._src.lease import (
    NOT_A_PATH,
    STALE,
    Loan,
    allocate,
    insert,
    lease,
    lend,
    release,
    settle,
    surplus,
)
from octavo_kvcache._src.match import Match, Tail, match, match_tail
from octavo_kvcache._src.pool import handle, is_current
from octavo_kvcache._src.state import CacheState, RadixState
from octavo_kvcache._src.state import empty_radix as init

__version__ = "0.1.0"

__all__ = [
    "NOT_A_PATH",
    "STALE",
    "CacheState",
    "InPlace",
    "Loan",
    "Match",
    "RadixCache",
    "RadixState",
    "Tail",
    "allocate",
    "audit",
    "evict",
    "handle",
    "init",
    "insert",
    "is_current",
    "lease",
    "lend",
    "match",
    "match_tail",
    "release",
    "settle",
    "surplus",
]
