"""Growth: which sequences get the blocks they lack, in rank order, evicting when the free list is short."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_kvcache._src import pool
from octavo_kvcache._src.evict import evict
from octavo_kvcache._src.scan import prefix_sum
from octavo_kvcache._src.state import CacheState


def grow(
    cache: CacheState, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
) -> tuple[CacheState, Int32[Array, " sequences"]]:
    """See `BlockCache.grow`."""
    counters = cache.read()
    available = counters.num_free + counters.num_evictable
    demand = jnp.max(need, axis=1)
    refused = available + 1
    lack = jnp.clip(demand - cache.held, 0, refused)
    lack = jnp.where(demand > cache.block_table.shape[2], refused, lack)
    order = jnp.argsort(rank, stable=True)
    served = prefix_sum(lack[order]) <= available
    give = jnp.where(jnp.zeros_like(cache.sealed).at[order].set(served), lack, 0)
    cache = evict(cache, jnp.sum(give) - counters.num_free)
    return pool.hand_out(cache, give), jnp.where(give == lack, OK, OUT_OF_BLOCKS)
