"""The stack of free blocks, generations, and the log of what happened to blocks.

Knows nothing of prefixes. Taking a block bumps its generation, so that a handle `(id, generation)` kept from an earlier use
is recognised as stale.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_kvcache._src.scan import prefix_sum, rank_in
from octavo_kvcache._src.state import UNINDEXED, CacheState

_CHUNK = 64


def give_back(cache: CacheState, freed: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> CacheState:
    """Push the `freed` blocks on the stack. They must be leased by nobody and stand in no index."""
    num_free = cache.read().num_free
    count = prefix_sum(freed.astype(jnp.int32))
    at = jnp.where(freed, num_free + count - 1, cache.free.shape[0])
    return cache._replace(free=cache.free.at[at].set(block, mode="drop")).write(num_free=num_free + count[-1])


def hand_out(cache: CacheState, give: Int32[Array, " sequences"]) -> CacheState:
    """Append `give` free blocks to each sequence's table. The stack must hold as many and the tables have the room."""
    nodes, sequences = cache.refcount.shape[0], cache.held.shape[0]
    end = prefix_sum(give)
    total, num_free, free = end[-1], cache.read().num_free, cache.free
    start = cache.held - (end - give)

    def chunk(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        first, table, refcount, generation = carry
        j = first + jnp.arange(min(_CHUNK, nodes), dtype=jnp.int32)
        live = j < total
        row = jnp.minimum(rank_in(end, j), sequences - 1)
        block = free[jnp.where(live, num_free - 1 - j, 0)]
        at = jnp.where(live, block, nodes)
        table = table.at[:, jnp.where(live, row, sequences), start[row] + j].set(block, mode="drop")
        refcount = refcount.at[at].set(1, mode="drop")
        return first + j.shape[0], table, refcount, generation.at[at].add(1, mode="drop")

    carry = (jnp.int32(0), cache.block_table, cache.refcount, cache.generation)
    _, table, refcount, generation = lax.while_loop(lambda c: c[0] < total, chunk, carry)
    cache = cache._replace(block_table=table, refcount=refcount, generation=generation, held=cache.held + give)
    return cache.write(num_free=num_free - total)


def log(
    events: Int32[Array, "max_events 3"],
    num_events: Int32[Array, ""],
    happened: Bool[Array, " ids"],
    block: Int32[Array, " ids"],
    generation: Int32[Array, " ids"],
    groups: int,
) -> tuple[Int32[Array, "max_events 3"], Int32[Array, ""]]:
    """Append an event per group for each block that `happened`; what does not fit is counted only."""
    count = prefix_sum(happened.astype(jnp.int32))
    for group in range(groups):
        at = jnp.where(happened, num_events + (count - 1) * groups + group, events.shape[0])
        entry = jnp.stack([jnp.full_like(block, group), block, generation], axis=1)
        events = events.at[at].set(entry, mode="drop")
    return events, num_events + count[-1] * groups


def handle(cache: CacheState, block_id: Int32[Array, " ids"]) -> Int32[Array, " ids"]:
    """The generation that makes `(block_id, generation)` a name for the block's present use; −1 outside the pool or for block 0."""
    inside = (block_id > 0) & (block_id < cache.generation.shape[0])
    return jnp.where(inside, cache.generation[jnp.where(inside, block_id, 0)], -1)


def is_current(cache: CacheState, block_id: Int32[Array, " ids"], generation: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Whether `(block_id, generation)` still names a block in the use it was issued for: not freed, not handed out again."""
    inside = (block_id > 0) & (block_id < cache.generation.shape[0])
    at = jnp.where(inside, block_id, 0)
    in_use = (cache.refcount[at] > 0) | (cache.slot[at] != UNINDEXED)
    return inside & in_use & (cache.generation[at] == generation)
