"""Release: end the leases of sequences, stamp what stays cached, free the rest, hand the events over."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.plan import CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys, pool
from octavo_kvcache._src.state import UNINDEXED, CacheState, num_nodes

_LATEST = 1 << 30


def release(spec: CacheSpec, cache: CacheState, done: Bool[Array, " sequences"]) -> tuple[CacheState, CacheEvents]:
    """See `BlockCache.release`."""
    leaving = done & (cache.held > 0)
    clock = cache.read().clock + jnp.any(leaving)
    cache = _rewind(cache.write(clock=clock))

    def one(carry: tuple[CacheState, Array]) -> tuple[CacheState, Array]:
        cache, leaving = carry
        row = jnp.argmax(leaving).astype(jnp.int32)
        return _release_row(cache, row), leaving.at[row].set(False)

    cache, _ = lax.while_loop(lambda c: jnp.any(c[1]), one, (cache, leaving))
    cache = cache._replace(
        sealed=cache.sealed & ~done,
        chain=jnp.where(done[:, None], keys.root_key(np.zeros(2, np.uint32)), cache.chain),
        sequence_namespace=jnp.where(done[:, None], np.uint32(0), cache.sequence_namespace),
    )
    return _drain(spec, cache)


def _rewind(cache: CacheState) -> CacheState:
    """Keep the clock far from overflow by moving all stamps back together; the oldest become equally old."""
    clock = cache.read().clock

    def back(cache: CacheState) -> CacheState:
        last_used = jnp.maximum(cache.last_used - _LATEST // 2, 0)
        return cache._replace(last_used=last_used).write(clock=clock - _LATEST // 2)

    return lax.cond(clock >= _LATEST, back, lambda c: c, cache)


def _release_row(cache: CacheState, row: Int32[Array, ""]) -> CacheState:
    nodes, counters = cache.refcount.shape[0], cache.read()
    block = lax.dynamic_index_in_dim(cache.block_table[0], row, keepdims=False)
    leased = block > 0
    left = cache.refcount[block] - 1
    indexed = cache.slot[block] != UNINDEXED
    at = jnp.where(leased, block, nodes)
    cache = cache._replace(
        refcount=cache.refcount.at[at].set(left, mode="drop"),
        last_used=cache.last_used.at[at].set(counters.clock, mode="drop"),
        block_table=cache.block_table.at[:, row].set(0),
        held=cache.held.at[row].set(0),
        committed=cache.committed.at[row].set(0),
    )
    idle = jnp.sum(leased & (left == 0) & indexed, dtype=jnp.int32)
    return pool.give_back(cache.write(num_evictable=counters.num_evictable + idle), leased & (left == 0) & ~indexed, block)


def _drain(spec: CacheSpec, cache: CacheState) -> tuple[CacheState, CacheEvents]:
    counters = cache.read()
    room = np.arange(cache.stored.shape[0])[:, None]
    surplus = np.array(spec.num_blocks, np.int32) - num_nodes(spec)
    events = CacheEvents(
        stored=jnp.where(room < counters.num_stored, cache.stored, -1),
        removed=jnp.where(room < counters.num_removed, cache.removed, -1),
        overflow=(counters.num_stored > room.shape[0]) | (counters.num_removed > room.shape[0]),
        num_free=counters.num_free + surplus,
        num_evictable=jnp.broadcast_to(counters.num_evictable, surplus.shape),
    )
    return cache.write(num_stored=jnp.int32(0), num_removed=jnp.int32(0)), events
