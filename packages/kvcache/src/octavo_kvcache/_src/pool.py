"""The stacks of free blocks, generations, and the log of what happened to blocks.

Knows nothing of prefixes. Taking a block bumps its generation, so that a handle `(id, generation)` kept from an earlier use
is recognised as stale.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.native import each, unless
from octavo_kvcache._src.change import Change, change
from octavo_kvcache._src.scan import prefix_sum, rank_in
from octavo_kvcache._src.state import UNINDEXED, CacheState, RadixState, Side

_CHUNK = 64


def by_tenant(radix: RadixState, counted: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Int32[Array, " tenants"]:
    """How many of the `counted` blocks belong to each tenant."""
    if radix.num_tenants == 1:
        return jnp.sum(counted, dtype=jnp.int32)[None]
    tenant = radix.tenant[block]
    return each(radix.num_tenants, lambda t: jnp.sum(counted & (tenant == t), dtype=jnp.int32))


def places(start: Int32[Array, ""], wanted: Bool[Array, " ids"]) -> tuple[Int32[Array, " ids"], Int32[Array, ""]]:
    """Where the `wanted` entries go that are put in a row from `start` on, and where that ends."""
    count = unless(~jnp.any(wanted), lambda: jnp.zeros(wanted.size, jnp.int32), lambda: prefix_sum(wanted.astype(jnp.int32)))
    return start + count - 1, start + count[-1]


def give_back_side(side: Side, freed: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Side:
    """Push the `freed` blocks of a side group on its stack. They must be distinct, leased by nobody and have no owner."""
    at, num_free = places(side.counts[0], freed)
    free = side.free.at[jnp.where(freed, at, side.free.shape[0])].set(block, mode="drop")
    return side._replace(free=free, counts=side.counts.at[0].set(num_free))


def hand_out(cache: CacheState, give: Int32[Array, " sequences"], tables: tuple[int, ...]) -> CacheState:
    """Append `give` free blocks to each sequence's `tables`. The stack must hold as many and the tables have the room."""
    radix, sequences = cache
    num_free, total = radix.read().num_free, jnp.sum(give, dtype=jnp.int32)
    nodes, rows = radix.leases.shape[0], give.shape[0]
    end = prefix_sum(give)
    start = sequences.held - (end - give)

    def chunk(carry: tuple[Any, Array, Array, Array, Array]) -> tuple[Any, Array, Array, Array, Array]:
        first, table, leases, generation, tenant = carry
        j = first + jnp.arange(min(_CHUNK, nodes), dtype=jnp.int32)
        live = j < total
        row = jnp.minimum(rank_in(end, j), rows - 1)
        block = radix.free[jnp.where(live, num_free - 1 - j, 0)]
        at, to = jnp.where(live, block, nodes), jnp.where(live, row, rows)
        for number in tables:
            table = table.at[number, to, start[row] + j].set(block, mode="drop")
        leases, generation = leases.at[at].set(1, mode="drop"), generation.at[at].add(1, mode="drop")
        return first + j.shape[0], table, leases, generation, tenant.at[at].set(sequences.tenant[row], mode="drop")

    carry = (jnp.int32(0), sequences.block_table, radix.leases, radix.generation, radix.tenant)
    _, table, leases, generation, tenant = lax.while_loop(lambda c: c[0] < total, chunk, carry)
    used = radix.read().used.at[sequences.tenant].add(give) if radix.num_tenants > 1 else radix.read().used + total
    radix = radix._replace(leases=leases, generation=generation, tenant=tenant).write(num_free=num_free - total, used=used)
    return CacheState(radix, sequences._replace(block_table=table))


def hand_out_side(
    side: Side, table: Int32[Array, "sequences max_blocks"], new: Bool[Array, "sequences max_blocks"]
) -> tuple[Side, Int32[Array, "sequences max_blocks"]]:
    """Fill the `new` entries of a side group's table with free blocks, of which there must be as many."""
    flat = new.reshape(-1)
    count = prefix_sum(flat.astype(jnp.int32))
    block = jnp.where(flat, side.free[jnp.where(flat, side.counts[0] - count, 0)], 0)
    at = jnp.where(flat, block, side.refcount.shape[0])
    side = side._replace(
        refcount=side.refcount.at[at].set(1, mode="drop"),
        generation=side.generation.at[at].add(1, mode="drop"),
        counts=side.counts.at[0].add(-count[-1]),
    )
    return side, jnp.where(new, block.reshape(new.shape), table)


def log(
    events: Int32[Array, "max_events fields"], num_events: Int32[Array, ""], happened: Bool[Array, " ids"], *fields: Array | int
) -> tuple[Int32[Array, "max_events fields"], Int32[Array, ""]]:
    """Append an event for each entry that `happened`; what does not fit is counted only."""
    entry, num_events = entries(events.shape[0], num_events, happened, *fields)
    return change({"events": events}, {"events": [entry]})["events"], num_events


def entries(
    max_events: int, num_events: Int32[Array, ""], happened: Bool[Array, " ids"], *fields: Array | int
) -> tuple[Change, Int32[Array, ""]]:
    """What `log` changes, and how many events there are then."""
    at, end = places(num_events, happened)
    rows = jnp.stack([jnp.broadcast_to(jnp.asarray(field, jnp.int32), happened.shape) for field in fields], axis=1)
    return Change((at,), rows, happened & (at < max_events)), end


def handle(radix: RadixState, block_id: Int32[Array, " ids"]) -> Int32[Array, " ids"]:
    """The generation that makes `(block_id, generation)` a name for the block's present use; −1 outside the pool or for block 0."""
    inside = (block_id > 0) & (block_id < radix.generation.shape[0])
    return jnp.where(inside, radix.generation[jnp.where(inside, block_id, 0)], -1)


def is_current(radix: RadixState, block_id: Int32[Array, " ids"], generation: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Whether `(block_id, generation)` still names a block in the use it was issued for: not freed, not handed out again."""
    inside = (block_id > 0) & (block_id < radix.generation.shape[0])
    at = jnp.where(inside, block_id, 0)
    in_use = (radix.leases[at] > 0) | (radix.slot[at] != UNINDEXED)
    return inside & in_use & (radix.generation[at] == generation)
