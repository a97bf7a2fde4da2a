"""Choosing and freeing cached blocks: a partial selection by key, never a sort.

In the tree a block goes before the blocks it follows (`policy` says why that order holds). In a side group a block goes alone.
Events name groups by number: 0 for all whole groups together, `1 + i` for side group `i`.
"""

from __future__ import annotations

import functools
from typing import Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.native import pick_in_turn
from octavo_kvcache._src import pool
from octavo_kvcache._src.change import Change
from octavo_kvcache._src.checks import check_count
from octavo_kvcache._src.policy import EvictionPolicy, Now
from octavo_kvcache._src.scan import WORD, as_kernel, count_packed, count_set, lowest_of_groups, packed, some_set, unpacked
from octavo_kvcache._src.state import UNINDEXED, WAYS, RadixState

NEVER: Final = np.int32(2**31 - 1)
"""Key of a block that must stay."""

_BATCH: Final = 128
_ALIGNED: Final = 512
_FEW: Final = 4
"""Entries looked at for each block to choose."""

_MOST_GROUPS: Final = 8192
"""Groups of keys looked at in a kernel."""

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
    counters, changes = as_kernel(_removal, block.shape[0])(radix, gone, block)
    radix = radix.changed(changes, counters=counters)
    for number in range(len(radix.sides)):
        radix = _disown(radix, number, gone, block)
    return radix


def _removal(
    radix: RadixState, gone: Bool[Array, " ids"], block: Int32[Array, " ids"]
) -> tuple[Int32[Array, " counters"], dict[str, list[Change]]]:
    counters, slot = radix.read(), radix.slot[block]
    event, num_removed = pool.entries(radix.removed.shape[0], counters.num_removed, gone, 0, block, radix.generation[block])
    at, num_free = pool.places(counters.num_free, gone)
    lost = pool.by_tenant(radix, gone, block)
    after = radix.write(
        num_removed=num_removed,
        num_free=num_free,
        floor=jnp.maximum(counters.floor, jnp.max(jnp.where(gone, radix.stamp[block], 0))),
        evictable=counters.evictable - lost,
        used=counters.used - lost,
    )
    changes = {
        "index_block": [Change((slot // WAYS, slot % WAYS), jnp.zeros_like(block), gone)],
        "slot": [Change((block,), jnp.full_like(block, UNINDEXED), gone)],
        "removed": [event],
        "free": [Change((at,), block, gone)],
    }
    return after.counters, changes


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

    The lowest keys of groups of 32 bound the answer: as many groups as there are blocks to choose have one below the bound. What lies
    below it is seldom much more, and only that is looked at again; if it is, all keys are.

    Cost: two vectorised passes over the keys; one for each bit in which they differ where many are equal or the pool is small.
    """
    keys = lax.optimization_barrier(keys)
    if keys.shape[0] < 2 * WORD * size:
        return _by_bisection(keys, count, size)
    lowest = lowest_of_groups(keys)
    word = packed(keys <= as_kernel(_bound, lowest.shape[0], most=_MOST_GROUPS)(lowest, count))
    few = functools.partial(_among_few, size=size)
    chosen, is_all = as_kernel(few, max(lowest.shape[0], _MOST_GROUPS // 1024 * size), most=_MOST_GROUPS)(keys, word, count)
    return lax.cond(is_all, lambda: chosen, lambda: _by_bisection(keys, count, size))


def _bound(lowest: Int32[Array, " groups"], count: Int32[Array, ""]) -> Int32[Array, ""]:
    """A key that at least `count` keys do not exceed, if there are as many; never `NEVER`."""
    return jnp.minimum(_threshold(lowest, count), NEVER - 1)


def _among_few(
    keys: Int32[Array, " blocks"], word: UInt32[Array, " words"], count: Int32[Array, ""], *, size: int
) -> tuple[Int32[Array, " size"], Bool[Array, ""]]:
    """The choice among the entries set in `word`, and whether they were few enough to look at all of them."""
    most = _FEW * size
    is_all = count_packed(word) <= most
    block, num_set = unpacked(jnp.where(is_all, word, 0), most)
    j = jnp.arange(most, dtype=jnp.int32)
    key = jnp.where(j < num_set, keys[block], NEVER)
    threshold = _threshold(key, count)
    nothing = jnp.zeros(size + 1, jnp.int32)
    below = key < threshold
    num_below = count_set(below)
    chosen = pick_in_turn(block, below, nothing, jnp.int32(0))
    level = (key == threshold) & (threshold != NEVER)
    chosen = pick_in_turn(block, level, chosen, num_below)[:size]
    num_chosen = jnp.minimum(count, num_below + count_set(level))
    return jnp.where(j[:size] < num_chosen, chosen, 0), is_all


def _threshold(keys: Int32[Array, " keys"], count: Int32[Array, ""]) -> Int32[Array, ""]:
    """The `count`-th smallest key, by bisection."""

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        enough = count_set(keys <= middle) >= count
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    bounds = (jnp.min(keys), jnp.max(jnp.where(keys == NEVER, 0, keys)))
    return lax.while_loop(lambda b: b[0] < b[1], halve, bounds)[0]


def _by_bisection(keys: Int32[Array, " blocks"], count: Int32[Array, ""], size: int) -> Int32[Array, " size"]:
    """`smallest` with all keys looked at for every bit."""
    keys = lax.optimization_barrier(jnp.pad(keys, (0, -keys.shape[0] % _ALIGNED), constant_values=NEVER))
    threshold = _threshold(keys, count)
    below, num_below = some_set(keys < threshold, size)
    level, num_level = some_set((keys == threshold) & (threshold != NEVER), size)
    j = jnp.arange(size, dtype=jnp.int32)
    chosen = jnp.where(j < num_below, below, level[jnp.clip(j - num_below, 0, size - 1)])
    return jnp.where(j < jnp.minimum(count, num_below + num_level), chosen, 0)
