"""Choosing and freeing cached blocks: a partial selection by key, never a sort.

In the tree a block goes before the blocks it follows (`policy` says why that order holds). In a side group a block goes alone.
Events name groups by number: 0 for all whole groups together, `1 + i` for side group `i`.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_kvcache._src import pool
from octavo_kvcache._src.checks import check_count
from octavo_kvcache._src.loops import peek, poke, settled
from octavo_kvcache._src.policy import EvictionPolicy, Now
from octavo_kvcache._src.scan import count_set, some_set
from octavo_kvcache._src.state import (
    BLOCK,
    DEPTH,
    FLOOR,
    FREE,
    GENERATION,
    NUM_FREE,
    NUM_REMOVED,
    SLOT,
    STAMP,
    TENANT,
    UNINDEXED,
    WAYS,
    RadixState,
)

NEVER: Final = np.int32(2**31 - 1)
"""Key of a block that must stay."""

_BATCH: Final = 128
_ALIGNED: Final = 512
_DEPTH_BITS: Final = 15
"""Depths of a side group's blocks told apart."""


def evictable(radix: RadixState) -> Bool[Array, " nodes"]:
    """Cached blocks that nobody leases."""
    return (radix.leases == 0) & radix.is_indexed


def time_of(radix: RadixState) -> Now:
    """What policies compare stamps with."""
    counters = radix.read()
    return Now(counters.clock, counters.floor)


def eviction_key(radix: RadixState, policy: EvictionPolicy, max_depth: int) -> Int32[Array, " nodes"]:
    """Key (rank, −depth) of the blocks that may go, smallest first, in 31 bits; `NEVER` for the others."""
    bits = max_depth.bit_length()
    rank = policy.rank(radix.stamp, time_of(radix), 30 - bits)
    return jnp.where(evictable(radix), (rank << bits) | (max_depth - jnp.minimum(radix.depth, max_depth)), NEVER)


def evict(
    radix: RadixState,
    count: Int32[Array, ""],
    policy: EvictionPolicy,
    *,
    max_depth: int,
    allowance: Int32[Array, " tenants"] | None = None,
    batch: int = _BATCH,
) -> RadixState:
    """Free `count` blocks, at most as many as are evictable, in the order of the policy.

    Args:
        radix: The tree.
        count: In blocks.
        policy: Whose order.
        max_depth: Blocks before the deepest there can be.
        allowance: Most blocks each tenant may lose; nobody is protected where it is None.
        batch: Blocks selected at once.
    """
    check_count(count)
    size = min(batch, radix.num_nodes)
    count = jnp.minimum(count, radix.read().num_evictable)
    if allowance is None:
        allowance = jnp.full(radix.num_tenants, NEVER)

    def some(carry: tuple[RadixState, Array, Array]) -> tuple[RadixState, Array, Array]:
        radix, left, allowance = carry
        key = eviction_key(radix, policy, max_depth)
        if radix.num_tenants > 1:
            key = jnp.where(allowance[radix.tenant] > 0, key, NEVER)
        block = smallest(key, jnp.minimum(left, size), size)
        gone = _within(radix, key, block, allowance)
        before = radix.read().used
        radix = remove(radix, gone, block)
        taken = before - radix.read().used
        num_taken = jnp.sum(taken, dtype=jnp.int32)
        return radix, jnp.where(num_taken == 0, 0, left - num_taken), allowance - taken

    return lax.while_loop(lambda c: c[1] > 0, some, (radix, count, allowance))[0]


def _within(
    radix: RadixState, key: Int32[Array, " nodes"], block: Int32[Array, " ids"], allowance: Int32[Array, " tenants"]
) -> Bool[Array, " ids"]:
    """Which of the chosen blocks their tenants may lose: the first of each in eviction order."""
    if radix.num_tenants == 1:
        return block > 0
    tenant, chosen = radix.columns[TENANT, block], key[block]
    j = jnp.arange(block.shape[0])
    earlier = (chosen[None, :] < chosen[:, None]) | ((chosen[None, :] == chosen[:, None]) & (j[None, :] < j[:, None]))
    before = jnp.sum(earlier & (tenant[None, :] == tenant[:, None]) & (block > 0)[None, :], axis=1)
    return (block > 0) & (before < allowance[tenant])


def remove(radix: RadixState, gone: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> RadixState:
    """Strike cached, unleased, distinct blocks from the index and free them, in every group."""

    def one(j: Array, radix: RadixState) -> RadixState:
        at, goes = peek(block, j), peek(gone, j)
        num_free, floor = peek(radix.counters, NUM_FREE), peek(radix.counters, FLOOR)

        def read() -> tuple[Array, ...]:
            slot, stamp, generation = (peek(radix.columns, column, at) for column in (SLOT, STAMP, GENERATION))
            old = peek(radix.buckets, jnp.maximum(slot, 0) // WAYS, BLOCK, jnp.maximum(slot, 0) % WAYS)
            tenant = jnp.asarray(pool.tenant_of(radix, at), jnp.int32)
            return slot, stamp, generation, old, tenant, peek(radix.columns, FREE, num_free)

        slot, stamp, generation, old, tenant, top = settled(read, at)
        bucket, way = jnp.maximum(slot, 0) // WAYS, jnp.maximum(slot, 0) % WAYS
        columns = poke(radix.columns, jnp.where(goes, UNINDEXED, slot), SLOT, at)
        radix = radix._replace(
            buckets=poke(radix.buckets, jnp.where(goes, 0, old), bucket, BLOCK, way),
            columns=poke(columns, jnp.where(goes, at, top), FREE, num_free),
            counters=poke(radix.counters, jnp.where(goes, jnp.maximum(floor, stamp), floor), FLOOR),
        )
        one = goes.astype(jnp.int32)
        radix = pool.log(radix, NUM_REMOVED, 0, at, generation)
        return pool.count(radix, tenant, free=one, used=-one, evictable=-one, removed=one)

    last = jnp.max(jnp.where(gone, np.arange(1, block.shape[0] + 1, dtype=np.int32), 0))
    radix = lax.fori_loop(0, last, one, radix)
    for number in range(len(radix.sides)):
        radix = _disown(radix, number, gone, block)
    return radix


def _disown(radix: RadixState, number: int, gone: Bool[Array, " ids"], node: Int32[Array, " ids"]) -> RadixState:
    """Free the blocks that nodes own in a side group; nobody leases them."""
    side = radix.sides[number]
    block = jnp.where(gone, side.node_block[node], 0)
    freed = block > 0
    radix = pool.log_all(radix, NUM_REMOVED, freed, 1 + number, block, side.generation[block])
    side = side._replace(
        node_block=side.node_block.at[jnp.where(freed, node, side.node_block.shape[0])].set(0, mode="drop"),
        owner=side.owner.at[jnp.where(freed, block, side.owner.shape[0])].set(0, mode="drop"),
        counts=side.counts.at[1].add(-jnp.sum(freed, dtype=jnp.int32)),
    )
    side = pool.give_back_side(side, freed, block)
    return radix._replace(sides=(*radix.sides[:number], side, *radix.sides[number + 1 :]))


def evict_side(radix: RadixState, number: int, count: Int32[Array, ""], policy: EvictionPolicy) -> RadixState:
    """Free `count` blocks of a side group, at most as many as are evictable; their nodes stay.

    In the policy's order of nodes, and of one path the first blocks first: a prefix needs the last ones.
    """
    size = min(_BATCH, radix.sides[number].owner.shape[0])

    def some(carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
        radix, left = carry
        side = radix.sides[number]
        rank = policy.rank(radix.columns[STAMP, side.owner], time_of(radix), 30 - _DEPTH_BITS)
        place = (rank << _DEPTH_BITS) | jnp.minimum(radix.columns[DEPTH, side.owner], (1 << _DEPTH_BITS) - 1)
        idle = (side.owner > 0) & (side.refcount == 0)
        now = jnp.minimum(left, size)
        block = smallest(jnp.where(idle, place, NEVER), now, size)
        return _disown(radix, number, block > 0, side.owner[block]), left - now

    count = jnp.minimum(count, radix.sides[number].counts[1])
    return lax.while_loop(lambda c: c[1] > 0, some, (radix, count))[0]


def smallest(keys: Int32[Array, " blocks"], count: Int32[Array, ""], size: int) -> Int32[Array, " size"]:
    """Ids of the `count` smallest keys, padded with 0; `count` ≤ `size`, and what is `NEVER` is not chosen.

    Cost: one pass over the keys for each bit in which they differ, found by bisection on the key.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = count_set(keys <= middle) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    keys = jnp.pad(keys, (0, -keys.shape[0] % _ALIGNED), constant_values=NEVER)
    bounds = (jnp.min(keys), jnp.max(jnp.where(keys == NEVER, 0, keys)))
    threshold = lax.while_loop(lambda b: b[0] < b[1], halve, bounds)[0]
    below, num_below = some_set(keys < threshold, size)
    level, num_level = some_set((keys == threshold) & (threshold != NEVER), size)
    j = jnp.arange(size, dtype=jnp.int32)
    chosen = jnp.where(j < num_below, below, level[jnp.clip(j - num_below, 0, size - 1)])
    return jnp.where(j < jnp.minimum(count, num_below + num_level), chosen, 0)
