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

from octavo_kvcache._src import index, pool
from octavo_kvcache._src.checks import check_count
from octavo_kvcache._src.policy import EvictionPolicy, Now
from octavo_kvcache._src.scan import count_set, some_set
from octavo_kvcache._src.state import RadixState

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
    size = min(batch, radix.slot.shape[0])
    count = jnp.minimum(count, radix.read().num_evictable)
    if allowance is None:
        allowance = jnp.full(radix.num_tenants, NEVER)

    def some(carry: tuple[RadixState, Array, Array]) -> tuple[RadixState, Array, Array]:
        radix, left, allowance = carry
        key = eviction_key(radix, policy, max_depth)
        if radix.num_tenants > 1:
            key = jnp.where(allowance[radix.tenant] > 0, key, NEVER)
        now = jnp.minimum(left, size)
        block = smallest(key, now, size)
        gone = (block > 0) & _within(radix, key, block, allowance)
        taken = pool.by_tenant(radix, gone, block)
        radix = remove(radix, gone, block)
        none = jnp.sum(gone, dtype=jnp.int32) == 0
        return radix, jnp.where(none, 0, left - jnp.sum(gone, dtype=jnp.int32)), allowance - taken

    return lax.while_loop(lambda c: c[1] > 0, some, (radix, count, allowance))[0]


def _within(
    radix: RadixState, key: Int32[Array, " nodes"], block: Int32[Array, " ids"], allowance: Int32[Array, " tenants"]
) -> Bool[Array, " ids"]:
    """Which of the chosen blocks their tenants may lose: the first of each in eviction order."""
    if radix.num_tenants == 1:
        return jnp.ones_like(block, bool)
    tenant, chosen = radix.tenant[block], key[block]
    j = jnp.arange(block.shape[0])
    earlier = (chosen[None, :] < chosen[:, None]) | ((chosen[None, :] == chosen[:, None]) & (j[None, :] < j[:, None]))
    before = jnp.sum(earlier & (tenant[None, :] == tenant[:, None]) & (block > 0)[None, :], axis=1)
    return before < allowance[tenant]


def remove(radix: RadixState, gone: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> RadixState:
    """Strike cached, unleased, distinct blocks from the index and free them, in every group."""
    counters = radix.read()
    last = jnp.max(jnp.where(gone, radix.stamp[block], 0))
    removed, num_removed = pool.log(radix.removed, counters.num_removed, gone, 0, block, radix.generation[block])
    radix = index.remove(radix._replace(removed=removed), gone, block)
    radix = radix.write(
        num_removed=num_removed,
        floor=jnp.maximum(counters.floor, last),
        evictable=counters.evictable - pool.by_tenant(radix, gone, block),
    )
    for number in range(len(radix.sides)):
        radix = _disown(radix, number, gone, block)
    return pool.give_back(radix, gone, block)


def _disown(radix: RadixState, number: int, gone: Bool[Array, " ids"], node: Int32[Array, " ids"]) -> RadixState:
    """Free the blocks that nodes own in a side group; nobody leases them."""
    side = radix.sides[number]
    block = jnp.where(gone, side.node_block[node], 0)
    freed = block > 0
    removed, num_removed = pool.log(radix.removed, radix.read().num_removed, freed, 1 + number, block, side.generation[block])
    side = side._replace(
        node_block=side.node_block.at[jnp.where(freed, node, side.node_block.shape[0])].set(0, mode="drop"),
        owner=side.owner.at[jnp.where(freed, block, side.owner.shape[0])].set(0, mode="drop"),
        counts=side.counts.at[1].add(-jnp.sum(freed, dtype=jnp.int32)),
    )
    side = pool.give_back_side(side, freed, block)
    sides = (*radix.sides[:number], side, *radix.sides[number + 1 :])
    return radix._replace(sides=sides, removed=removed).write(num_removed=num_removed)


def evict_side(radix: RadixState, number: int, count: Int32[Array, ""], policy: EvictionPolicy) -> RadixState:
    """Free `count` blocks of a side group, at most as many as are evictable; their nodes stay.

    In the policy's order of nodes, and of one path the first blocks first: a prefix needs the last ones.
    """
    size = min(_BATCH, radix.sides[number].owner.shape[0])

    def some(carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
        radix, left = carry
        side = radix.sides[number]
        rank = policy.rank(radix.stamp[side.owner], time_of(radix), 30 - _DEPTH_BITS)
        place = (rank << _DEPTH_BITS) | jnp.minimum(radix.depth[side.owner], (1 << _DEPTH_BITS) - 1)
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
