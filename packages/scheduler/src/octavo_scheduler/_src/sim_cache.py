"""A `PrefixCache` that only counts: for simulation where it does not matter which block holds what.

Knows how many blocks are free and how many each sequence holds. A prefix is found as far as the trace says it would be.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.native import put_all, running_sum, unless
from octavo_core.plan import OK, OUT_OF_BLOCKS, Admitted, CacheEvents
from octavo_core.specs import CacheSpec
from octavo_scheduler._src.policy import blocks_for


class CountingState(NamedTuple):
    """Blocks that nobody holds, and how many each sequence holds."""

    free: Int32[Array, ""]
    held: Int32[Array, " sequences"]


class CountingCache:
    """Hands out blocks without names.

    The first token of a sequence says how many of its tokens are found at admission: that is how a simulation tells what the trace
    knows. Found blocks count against the pool like computed ones, and nothing of a sequence outlives it. Sequences keep one block of
    tokens, whatever their length: nobody reads them.

    Args:
        num_blocks: Of the pool, the reserved one included.
        block_size: Tokens in a block.
        max_sequences: Sequences that can hold blocks at once.
    """

    def __init__(self, num_blocks: int, block_size: int, max_sequences: int) -> None:
        self.spec = CacheSpec((num_blocks,), block_size, max_sequences, 1)

    def init(self) -> CountingState:
        """Every block free."""
        return CountingState(jnp.int32(self.spec.num_blocks[0] - 1), jnp.zeros(self.spec.max_sequences, jnp.int32))

    def admit(
        self,
        cache: CountingState,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[CountingState, Admitted]:
        """Admit entries in order until one does not fit; what earlier ones of this call want is kept for them."""
        block_size = self.spec.block_size
        asked = running_sum(jnp.where(sequence >= 0, want[:, 0], 0))
        fits = (asked + reserve[0] <= cache.free) | (sequence < 0)
        takes = fits & (sequence >= 0)
        found = jnp.where(takes, jnp.clip(tokens[:, 0], 0, lengths - 1), 0)
        blocks = blocks_for(found, block_size)
        cache = CountingState(cache.free - jnp.sum(blocks, dtype=jnp.int32), put_all(cache.held, (sequence,), blocks, takes))
        return cache, Admitted(found, jnp.where(fits, OK, OUT_OF_BLOCKS).astype(jnp.int32))

    def grow(
        self, cache: CountingState, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
    ) -> tuple[
        CountingState, Int32[Array, "groups sequences max_blocks"], Int32[Array, "groups sequences 2"], Int32[Array, " sequences"]
    ]:
        """Give each what it lacks, in order of rank (a permutation), until somebody lacks more than is left."""
        lack = jnp.maximum(need[:, 0] - cache.held, 0)

        def in_turn() -> Bool[Array, " sequences"]:
            everybody = jnp.ones(lack.size, bool)
            asked = running_sum(put_all(jnp.zeros_like(lack), (rank,), lack, everybody))[rank]
            return (asked <= cache.free) | (lack == 0)

        is_served = unless(jnp.sum(lack) <= cache.free, lambda: jnp.ones(lack.size, bool), in_turn)
        given = jnp.where(is_served, lack, 0)
        cache = CountingState(cache.free - jnp.sum(given, dtype=jnp.int32), cache.held + given)
        copies = jnp.full((1, lack.size, 2), -1, jnp.int32)
        return cache, self._table(), copies, jnp.where(is_served, OK, OUT_OF_BLOCKS).astype(jnp.int32)

    def commit(
        self, cache: CountingState, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"]
    ) -> tuple[CountingState, Int32[Array, "groups sequences max_blocks"]]:
        """Change nothing: no block is findable here."""
        return cache, self._table()

    def release(self, cache: CountingState, done: Bool[Array, " sequences"]) -> tuple[CountingState, CacheEvents]:
        """Free the blocks of these sequences."""
        back = jnp.sum(jnp.where(done, cache.held, 0), dtype=jnp.int32)
        cache = CountingState(cache.free + back, jnp.where(done, 0, cache.held))
        stored, removed = jnp.full((1, 5), -1, jnp.int32), jnp.full((1, 3), -1, jnp.int32)
        return cache, CacheEvents(stored, removed, jnp.bool_(False), cache.free[None], jnp.zeros(1, jnp.int32))

    def _table(self) -> Int32[Array, "groups sequences max_blocks"]:
        return jnp.zeros((1, self.spec.max_sequences, 1), jnp.int32)
