"""Choosing and freeing cached blocks: a partial selection by key, never a sort.

A policy is a function from the cache to one int32 key per block, smallest first; `least_recently_used` is the one there is.
Whatever the key, a block must come before its parent, or the tree loses the way to the block. Here that follows from three facts:
who leases a block leases its ancestors, so an ancestor's last lease never ends earlier; ending a lease
stamps the whole path; and equal stamps are ordered deepest first.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_kvcache._src import index, pool
from octavo_kvcache._src.scan import first_set
from octavo_kvcache._src.state import UNINDEXED, CacheState

NEVER: Final = np.int32(2**31 - 1)
"""Key of a block that must stay."""

_BATCH: Final = 128


def evictable(cache: CacheState) -> Bool[Array, " blocks"]:
    """Cached blocks that nobody leases."""
    return (cache.refcount == 0) & (cache.slot != UNINDEXED)


def least_recently_used(cache: CacheState) -> Int32[Array, " blocks"]:
    """Key (last_used, −depth) in 31 bits. Stamps older than the bits allow count as equally old, which keeps the order's promise."""
    deepest = cache.block_table.shape[2] - 1
    shift = deepest.bit_length()
    window = 1 << (30 - shift)
    age = jnp.clip(cache.last_used - (cache.read().clock - window), 0, window)
    return jnp.where(evictable(cache), (age << shift) | (deepest - cache.depth), NEVER)


def evict(cache: CacheState, count: Int32[Array, ""]) -> CacheState:
    """Free `count` blocks, at most as many as are evictable, in the order of the key."""
    count = jnp.minimum(count, cache.read().num_evictable)

    def batch(carry: tuple[CacheState, Array]) -> tuple[CacheState, Array]:
        cache, left = carry
        now = jnp.minimum(left, min(_BATCH, cache.slot.shape[0]))
        block = smallest(least_recently_used(cache), now, min(_BATCH, cache.slot.shape[0]))
        return _free(cache, block > 0, block), left - now

    return lax.while_loop(lambda c: c[1] > 0, batch, (cache, count))[0]


def _free(cache: CacheState, gone: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> CacheState:
    counters = cache.read()
    groups = cache.block_table.shape[0]
    removed, num_removed = pool.log(cache.removed, counters.num_removed, gone, block, cache.generation[block], groups)
    cache = index.remove(cache._replace(removed=removed), gone, block)
    num_evictable = counters.num_evictable - jnp.sum(gone, dtype=jnp.int32)
    return pool.give_back(cache.write(num_removed=num_removed, num_evictable=num_evictable), gone, block)


def smallest(keys: Int32[Array, " blocks"], count: Int32[Array, ""], size: int) -> Int32[Array, " size"]:
    """Ids of the `count` smallest keys, padded with 0; `count` ≤ `size`, and as many keys must differ from `NEVER`.

    Cost: one pass over the keys for each bit in which they differ, found by bisection on the key.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = jnp.sum(keys <= middle, dtype=jnp.int32) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    bounds = (jnp.min(keys), jnp.max(jnp.where(keys == NEVER, 0, keys)))
    threshold = lax.while_loop(lambda b: b[0] < b[1], halve, bounds)[0]
    masks = jnp.stack([keys < threshold, (keys == threshold) & (threshold != NEVER)])
    (below, level), (num_below, _) = jax.vmap(first_set, (0, None))(masks, size)
    j = jnp.arange(size, dtype=jnp.int32)
    chosen = jnp.where(j < num_below, below, level[jnp.clip(j - num_below, 0, size - 1)])
    return jnp.where(j < count, chosen, 0)
