"""`BlockCache`: the operations behind the `PrefixCache` seam, with sizes fixed and arguments checked.

Knows which shapes it was built for. Deliberately does not know what blocks contain, what a scheduler is, or any clock but
its own count of releases.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.errors import ConfigError
from octavo_core.plan import Admitted, CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.admit import admit
from octavo_kvcache._src.commit import commit
from octavo_kvcache._src.grow import grow
from octavo_kvcache._src.release import release
from octavo_kvcache._src.state import CacheState, empty

_TOKENS_PER_STEP: Final = 2048


class BlockCache:
    """A `PrefixCache` of full blocks: a prefix tree over one pool, least recently used blocks evicted first.

    Every KV group is treated as full attention: a sequence holds the same number of blocks, with the same ids, in
    each group. Methods are pure; jit them, alone or together, with the cache donated.

    Args:
        spec: Sizes.
        max_commits: Blocks that one `commit` files at most; enough for 2,048 tokens unless given.
        max_events: Events of each kind kept between two releases; beyond it `CacheEvents.overflow` is set.

    Raises:
        ConfigError: A size below 1.
    """

    def __init__(self, spec: CacheSpec, *, max_commits: int | None = None, max_events: int | None = None) -> None:
        self.spec = spec
        most = spec.max_sequences * spec.max_blocks
        self.max_commits = min(-(-_TOKENS_PER_STEP // spec.block_size), most) if max_commits is None else max_commits
        self.max_events = 2 * self.max_commits * spec.groups if max_events is None else max_events
        if min(self.max_commits, self.max_events) < 1:
            raise ConfigError(f"max_commits and max_events are at least 1, got {max_commits} and {max_events}")

    def init(self) -> CacheState:
        """The empty cache."""
        return empty(self.spec, self.max_events)

    def admit(
        self,
        cache: CacheState,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[CacheState, Admitted]:
        """Find the longest cached prefix of each and lease it to `sequence` (−1, or any other index that is none, skips an entry).

        Entries are served in order; what earlier entries of the call still want counts as taken. Refused with `OUT_OF_BLOCKS` are
        also a sequence that holds blocks already and a `want` beyond `max_blocks`. Lengths ≤ 1 match nothing.
        """
        arrivals = sequence.shape[0]
        self._check("tokens", tokens, (arrivals, self.spec.max_len))
        self._check("lengths", lengths, (arrivals,))
        self._check("namespace", namespace, (arrivals, 2))
        self._check("want", want, (arrivals, self.spec.groups))
        self._check("reserve", reserve, (self.spec.groups,))
        return admit(self.spec, cache, sequence, tokens, lengths, namespace, want, reserve)

    def grow(
        self, cache: CacheState, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
    ) -> tuple[CacheState, Int32[Array, "groups sequences max_blocks"], Int32[Array, " sequences"]]:
        """Let each sequence hold `need` blocks, evicting least recently used cached blocks when the free list is short.

        Groups grow together, to the largest need among them. Equal ranks are served by index. A need beyond `max_blocks` is refused.
        """
        self._check("need", need, (self.spec.max_sequences, self.spec.groups))
        self._check("rank", rank, (self.spec.max_sequences,))
        cache, status = grow(cache, need, rank)
        return cache, cache.block_table, status

    def commit(
        self, cache: CacheState, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"]
    ) -> tuple[CacheState, Int32[Array, "groups sequences max_blocks"]]:
        """Make the full blocks below `upto` tokens findable, at most `max_commits` of them in this call, low sequences first.

        Only blocks the sequence holds are committed. Where an equal prefix is cached already, the sequence's own block is
        freed and its table points at the cached one.
        """
        self._check("tokens", tokens, (self.spec.max_sequences, self.spec.max_len))
        self._check("upto", upto, (self.spec.max_sequences,))
        cache = commit(cache, tokens, upto, self.max_commits)
        return cache, cache.block_table

    def release(self, cache: CacheState, done: Bool[Array, " sequences"]) -> tuple[CacheState, CacheEvents]:
        """End the leases of these sequences; committed blocks stay cached, the rest become free. Drains the events."""
        self._check("done", done, (self.spec.max_sequences,))
        return release(self.spec, cache, done)

    def _check(self, name: str, array: Array, shape: tuple[int, ...]) -> None:
        if jnp.shape(array) != shape:
            raise ConfigError(f"{name} has shape {jnp.shape(array)}; this cache wants {shape}, see its spec {self.spec}")
