"""The smallest legal `PrefixCache`: hands out blocks, finds nothing. For tests of what stands around a cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import OK, OUT_OF_BLOCKS, Admitted, CacheEvents
from octavo_core.specs import CacheSpec


class SmallCacheState(NamedTuple):
    """Who owns each block and which blocks each sequence owns.

    Attributes:
        owner: Sequence of each block; −1 free; `sequences` reserved or beyond the group's pool.
        table: Blocks of each sequence; 0 beyond `num_held`.
        num_held: Blocks of each sequence.
    """

    owner: Int32[Array, "groups blocks"]
    table: Int32[Array, "groups sequences max_blocks"]
    num_held: Int32[Array, "groups sequences"]


class SmallCache:
    """A `PrefixCache` that never matches. The free block with the lowest id is handed out first.

    Args:
        spec: Sizes.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec

    def init(self) -> SmallCacheState:
        """The empty cache."""
        spec = self.spec
        block_id = jnp.arange(max(spec.num_blocks), dtype=jnp.int32)
        exists = (block_id > 0) & (block_id < jnp.array(spec.num_blocks, jnp.int32)[:, None])
        return SmallCacheState(
            owner=jnp.where(exists, -1, spec.max_sequences).astype(jnp.int32),
            table=jnp.zeros((spec.groups, spec.max_sequences, spec.max_blocks), jnp.int32),
            num_held=jnp.zeros((spec.groups, spec.max_sequences), jnp.int32),
        )

    def admit(
        self,
        cache: SmallCacheState,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[SmallCacheState, Admitted]:
        """Admit entries in order until one does not fit; what earlier ones of this call want is kept for them."""
        asked = jnp.cumsum(jnp.where(sequence[:, None] >= 0, want, 0), axis=0)
        fits = jnp.all(asked + reserve <= _num_free(cache), axis=1) | (sequence < 0)
        return cache, Admitted(jnp.zeros_like(lengths), jnp.where(fits, OK, OUT_OF_BLOCKS).astype(jnp.int32))

    def grow(
        self, cache: SmallCacheState, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
    ) -> tuple[
        SmallCacheState, Int32[Array, "groups sequences max_blocks"], Int32[Array, "groups sequences 2"], Int32[Array, " sequences"]
    ]:
        """Hand out what each lacks, in order of rank, until somebody lacks more than is left."""
        lack = jnp.maximum(need.T - cache.num_held, 0)
        by_rank = jnp.argsort(rank)
        asked = jnp.zeros_like(lack).at[:, by_rank].set(jnp.cumsum(lack[:, by_rank], axis=1))
        is_short = jnp.any(asked > _num_free(cache)[:, None], axis=0)
        is_served = ~is_short | jnp.all(lack == 0, axis=0)
        given = jnp.where(is_served, lack, 0)
        # The k-th free block goes to the sequence whose share of the blocks handed out holds k.
        upto = jnp.cumsum(given[:, by_rank], axis=1)
        is_free = cache.owner < 0
        turn = jnp.cumsum(is_free, axis=1) - 1
        place = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(upto, turn)
        is_taken = is_free & (place < rank.size)
        group = jnp.arange(self.spec.groups)[:, None]
        place = jnp.minimum(place, rank.size - 1)
        taker = by_rank[place]
        offset = cache.num_held[group, taker] + turn - (upto - given[:, by_rank])[group, place]
        block_id = jnp.broadcast_to(jnp.arange(cache.owner.shape[1], dtype=jnp.int32), cache.owner.shape)
        table = cache.table.at[group, jnp.where(is_taken, taker, rank.size), offset].set(block_id, mode="drop")
        owner = jnp.where(is_taken, taker, cache.owner).astype(jnp.int32)
        status = jnp.where(is_served, OK, OUT_OF_BLOCKS).astype(jnp.int32)
        no_copies = jnp.full((*cache.num_held.shape, 2), -1, jnp.int32)
        return SmallCacheState(owner, table, cache.num_held + given), table, no_copies, status

    def commit(
        self, cache: SmallCacheState, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"]
    ) -> tuple[SmallCacheState, Int32[Array, "groups sequences max_blocks"]]:
        """Change nothing: blocks are not findable here."""
        return cache, cache.table

    def release(self, cache: SmallCacheState, done: Bool[Array, " sequences"]) -> tuple[SmallCacheState, CacheEvents]:
        """Free the blocks of these sequences."""
        ended = jnp.concatenate([done, jnp.zeros(1, bool)])
        is_freed = (cache.owner >= 0) & ended[jnp.maximum(cache.owner, 0)]
        cache = SmallCacheState(
            owner=jnp.where(is_freed, -1, cache.owner),
            table=jnp.where(done[:, None], 0, cache.table),
            num_held=jnp.where(done, 0, cache.num_held),
        )
        stored, removed = jnp.full((1, 5), -1, jnp.int32), jnp.full((1, 3), -1, jnp.int32)
        events = CacheEvents(stored, removed, jnp.bool_(False), _num_free(cache), jnp.zeros(self.spec.groups, jnp.int32))
        return cache, events


def _num_free(cache: SmallCacheState) -> Int32[Array, " groups"]:
    """Blocks nobody owns."""
    return jnp.sum(cache.owner < 0, axis=1, dtype=jnp.int32)
