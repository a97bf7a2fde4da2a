"""The stacks of free blocks, generations, and the log of what happened to blocks.

Knows nothing of prefixes. Taking a block bumps its generation, so that a handle `(id, generation)` kept from an earlier use
is recognised as stale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_kvcache._src.loops import peek, poke, settled
from octavo_kvcache._src.scan import prefix_sum
from octavo_kvcache._src.state import (
    FREE,
    GENERATION,
    LEASES,
    NUM_FREE,
    NUM_REMOVED,
    NUM_STORED,
    SHARES,
    SLOT,
    STAMP,
    STORED,
    TENANT,
    UNINDEXED,
    CacheState,
    RadixState,
    Side,
)


def tenant_of(radix: RadixState, block: Int32[Array, ""]) -> Int32[Array, ""] | int:
    """Whose share a block counts against."""
    return 0 if radix.num_tenants == 1 else peek(radix.columns, TENANT, block)


def count(
    radix: RadixState,
    tenant: Int32[Array, ""] | int,
    *,
    free: Array | int = 0,
    used: Array | int = 0,
    evictable: Array | int = 0,
    stored: Array | int = 0,
    removed: Array | int = 0,
) -> RadixState:
    """Count more or fewer free blocks, blocks of a tenant, cached blocks of a tenant that nobody leases, and events."""
    change, place = jnp.zeros_like(radix.counters), np.arange(radix.counters.shape[0], dtype=np.int32)
    places = {NUM_FREE: free, NUM_STORED: stored, NUM_REMOVED: removed}
    for at, by in places.items():
        change += jnp.where(place == at, by, 0)
    change += jnp.where(place == SHARES + tenant, used, 0)
    change += jnp.where(place == SHARES + radix.num_tenants + tenant, evictable, 0)
    return radix._replace(counters=radix.counters + change)


def count_idle(radix: RadixState, counted: Bool[Array, " ids"], tenant: Int32[Array, " ids"], by: int) -> RadixState:
    """Count these blocks, of these tenants, as cached and leased by nobody, or no more."""
    if radix.num_tenants == 1:
        return count(radix, 0, evictable=by * jnp.sum(counted, dtype=jnp.int32))
    place = jnp.where(counted, SHARES + radix.num_tenants + tenant, radix.counters.shape[0])
    return radix._replace(counters=radix.counters.at[place].add(by, mode="drop"))


def lease_more(radix: RadixState, block: Int32[Array, ""], by: Array | int) -> RadixState:
    """Add to the leases on an indexed block, and count it as idle no more if it was."""
    leases, tenant = settled(lambda: (peek(radix.columns, LEASES, block), tenant_of(radix, block)), block)
    woken = ((leases == 0) & (by != 0)).astype(jnp.int32)
    return count(radix._replace(columns=poke(radix.columns, leases + by, LEASES, block)), tenant, evictable=-woken)


def lease_less(
    radix: RadixState, block: Int32[Array, ""], by: Array | int, touch: Callable[[Any], Any] | None = None
) -> RadixState:
    """Take leases off a block; what nobody leases any more is cached if it is indexed, else free.

    Args:
        radix: The tree.
        block: There is no other than the indexed and the private ones.
        by: Leases.
        touch: What becomes of its stamp.
    """

    def read() -> tuple[Any, ...]:
        at = [peek(radix.columns, column, block) for column in (LEASES, SLOT, STAMP)]
        return *at, tenant_of(radix, block), peek(radix.columns, FREE, peek(radix.counters, NUM_FREE))

    leases, slot, stamp, tenant, top = settled(read, block)
    ended = (leases == by) & (by != 0)
    idle, freed = ended & (slot != UNINDEXED), ended & (slot == UNINDEXED)
    columns = poke(radix.columns, leases - by, LEASES, block)
    if touch is not None:
        columns = poke(columns, touch(stamp), STAMP, block)
    columns = poke(columns, jnp.where(freed, block, top), FREE, peek(radix.counters, NUM_FREE))
    one = freed.astype(jnp.int32)
    return count(radix._replace(columns=columns), tenant, free=one, used=-one, evictable=idle.astype(jnp.int32))


def hand_out_one(
    radix: RadixState, tenant: Int32[Array, ""] | int, leases: int
) -> tuple[RadixState, Int32[Array, ""], Int32[Array, ""]]:
    """Pop a block, of which there must be one. Answers its id and generation too."""
    top = peek(radix.counters, NUM_FREE) - 1

    def read() -> tuple[Array, Array]:
        block = peek(radix.columns, FREE, top)
        return block, peek(radix.columns, GENERATION, block) + 1

    block, generation = settled(read, top)
    columns = radix.columns
    for column, value in ((LEASES, leases), (GENERATION, generation), (TENANT, tenant)):
        columns = poke(columns, value, column, block)
    return count(radix._replace(columns=columns), tenant, free=-1, used=1), block, generation


def give_back_side(side: Side, freed: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Side:
    """The same for a side group's blocks; they must have no owner."""
    free, num_free = _push(side.free, side.counts[0], freed, block)
    return side._replace(free=free, counts=side.counts.at[0].set(num_free))


def _push(
    free: Int32[Array, " blocks"], num_free: Int32[Array, ""], freed: Bool[Array, " ids"], block: Int32[Array, " ids"]
) -> tuple[Int32[Array, " blocks"], Int32[Array, ""]]:
    count = prefix_sum(freed.astype(jnp.int32))
    at = jnp.where(freed, num_free + count - 1, free.shape[0])
    return free.at[at].set(block, mode="drop"), num_free + count[-1]


def hand_out(cache: CacheState, give: Int32[Array, " sequences"], tables: tuple[int, ...]) -> CacheState:
    """Append `give` free blocks to each sequence's `tables`. The stack must hold as many and the tables have the room."""
    sequences, several = cache.sequences, cache.radix.num_tenants > 1

    def serve(row: Array, carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
        held, tenant = peek(sequences.held, row), peek(sequences.tenant, row) if several else 0

        def one(n: Array, carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
            radix, table = carry
            radix, block, _ = hand_out_one(radix, tenant, 1)
            for number in tables:
                table = poke(table, block, number, row, held + n)
            return radix, table

        return lax.fori_loop(0, peek(give, row), one, carry)

    rows = jnp.where(jnp.any(give > 0), give.shape[0], 0)
    radix, table = lax.fori_loop(0, rows, serve, (cache.radix, sequences.block_table))
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


def log(radix: RadixState, kind: int, *fields: Array | int) -> RadixState:
    """Note an event of kind `NUM_STORED` or `NUM_REMOVED`, which happened if it is counted; what does not fit is counted only."""
    at, start = jnp.minimum(peek(radix.counters, kind), radix.events.shape[0] - 1), STORED * (kind == NUM_REMOVED)
    entry = jnp.stack([jnp.asarray(field, jnp.int32) for field in fields])
    events = lax.dynamic_update_slice(radix.events, entry[None], (at, np.int32(start)), allow_negative_indices=False)
    return radix._replace(events=events)


def log_all(radix: RadixState, kind: int, happened: Bool[Array, " ids"], *fields: Array | int) -> RadixState:
    """Append an event for each entry that `happened`: of kind `NUM_STORED` or `NUM_REMOVED`."""
    start, num, room = STORED * (kind == NUM_REMOVED), radix.counters[kind], radix.events.shape[0] - 1
    end = prefix_sum(happened.astype(jnp.int32))
    at = jnp.where(happened, jnp.minimum(num + end - 1, room), room)
    entry = jnp.stack([jnp.broadcast_to(jnp.asarray(field, jnp.int32), happened.shape) for field in fields], axis=1)
    events = radix.events.at[at, start : start + len(fields)].set(entry)
    return radix._replace(events=events, counters=radix.counters.at[kind].add(end[-1]))


def handle(radix: RadixState, block_id: Int32[Array, " ids"]) -> Int32[Array, " ids"]:
    """The generation that makes `(block_id, generation)` a name for the block's present use; −1 outside the pool or for block 0."""
    inside = (block_id > 0) & (block_id < radix.num_nodes)
    return jnp.where(inside, radix.columns[GENERATION, jnp.where(inside, block_id, 0)], -1)


def is_current(radix: RadixState, block_id: Int32[Array, " ids"], generation: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Whether `(block_id, generation)` still names a block in the use it was issued for: not freed, not handed out again."""
    inside = (block_id > 0) & (block_id < radix.num_nodes)
    at = jnp.where(inside, block_id, 0)
    in_use = (radix.columns[LEASES, at] > 0) | (radix.columns[SLOT, at] != UNINDEXED)
    return inside & in_use & (radix.columns[GENERATION, at] == generation)
