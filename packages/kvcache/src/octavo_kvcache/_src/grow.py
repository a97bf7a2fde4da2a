"""Growth: which sequences get the blocks they lack, in rank order, evicting when a free list is short; and what must be copied."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec
from octavo_kvcache._src import pool
from octavo_kvcache._src.admit import unlease_tail
from octavo_kvcache._src.evict import evict, evict_side
from octavo_kvcache._src.insert import count_idle
from octavo_kvcache._src.policy import EvictionPolicy
from octavo_kvcache._src.scan import prefix_sum
from octavo_kvcache._src.share import allowance, serve_in_order
from octavo_kvcache._src.state import CacheState, Side, layout_of


def grow(
    spec: CacheSpec,
    cache: CacheState,
    need: Int32[Array, "sequences groups"],
    rank: Int32[Array, " sequences"],
    *,
    policy: EvictionPolicy,
    quotas: tuple[int, ...],
) -> tuple[CacheState, Int32[Array, "groups sequences 2"], Int32[Array, " sequences"]]:
    """See `RadixCache.grow`."""
    layout = layout_of(spec)
    cache = _give_up(spec, cache)
    radix, sequences = cache
    counters = radix.read()
    refused = counters.num_free + counters.num_evictable + 1
    demand = jnp.max(need, axis=1)
    lack = jnp.clip(demand - sequences.held, 0, refused)
    lack = jnp.where(demand > spec.max_blocks, refused, lack)
    order = _in_order(rank)
    given = serve_in_order(radix, lack[order], sequences.tenant[order], quotas)
    for side in radix.sides:
        given = jnp.where(prefix_sum(given) <= jnp.sum(side.counts), given, 0)
    give = jnp.zeros_like(lack).at[order].set(given)
    most = allowance(radix, give, sequences.tenant, quotas)
    radix = evict(radix, jnp.sum(give) - counters.num_free, policy, max_depth=spec.max_blocks - 1, allowance=most)
    cache = _grow_sides(pool.hand_out(CacheState(radix, sequences), give, layout.whole), give, layout.side, policy)
    copies = _copies(spec, cache, give)
    cache = unlease_tail(cache, give > 0)
    cache = CacheState(cache.radix, cache.sequences._replace(held=sequences.held + give))
    return cache, copies, jnp.where(give == lack, OK, OUT_OF_BLOCKS)


def _in_order(rank: Int32[Array, " sequences"]) -> Int32[Array, " sequences"]:
    """Sequences by rank, equal ones by index. Where ranks are places, all different and without gaps, nothing need be sorted."""
    index = jnp.arange(rank.shape[0], dtype=jnp.int32)
    taken = jnp.zeros_like(index).at[rank].add(1, mode="drop")
    return lax.cond(
        jnp.all(taken == 1) & jnp.all(rank >= 0),
        lambda r: jnp.zeros_like(index).at[r].set(index, mode="drop"),
        lambda r: jnp.argsort(r, stable=True).astype(jnp.int32),
        rank,
    )


def _give_up(spec: CacheSpec, cache: CacheState) -> CacheState:
    """Let go of side blocks that no token to come looks back to, once they are findable (or never will be).

    The next token falls into the first block not committed or later: a sequence may hold more than it has computed.
    """
    layout, (radix, sequences) = layout_of(spec), cache
    column = jnp.arange(spec.max_blocks, dtype=jnp.int32)
    table, sides = sequences.block_table, []
    for side, number, back in zip(radix.sides, layout.side, layout.reach, strict=True):
        last = sequences.held - 1
        limit = jnp.where(sequences.sealed, last, jnp.minimum(last, sequences.committed)) - back
        out = (column < limit[:, None]) & (table[number] > 0)
        sides.append(release_side(side, out, table[number]))
        table = table.at[number].set(jnp.where(out, 0, table[number]))
    return CacheState(radix._replace(sides=tuple(sides)), sequences._replace(block_table=table))


def release_side(side: Side, out: Bool[Array, "*shape"], table: Int32[Array, "*shape"]) -> Side:
    """End the leases on these entries of a side group's table: findable blocks stay cached, the others are freed."""
    block, leased = table.reshape(-1), out.reshape(-1)
    at = jnp.where(leased, block, side.refcount.shape[0])
    side = side._replace(refcount=side.refcount.at[at].add(-1, mode="drop"))
    return count_idle(pool.give_back_side(side, leased & (side.owner[block] == 0), block))


def _grow_sides(cache: CacheState, give: Int32[Array, " sequences"], tables: tuple[int, ...], policy: EvictionPolicy) -> CacheState:
    """Append as many blocks in the side groups; the marks of what is held still stand where they stood."""
    radix, sequences = cache
    column, held = jnp.arange(sequences.block_table.shape[2], dtype=jnp.int32), sequences.held[:, None]
    new = (column >= held) & (column < held + give[:, None])
    table = sequences.block_table
    for number, at in enumerate(tables):
        radix = evict_side(radix, number, jnp.sum(give) - radix.sides[number].counts[0], policy)
        side, filled = pool.hand_out_side(radix.sides[number], table[at], new)
        table = table.at[at].set(filled)
        radix = radix._replace(sides=(*radix.sides[:number], side, *radix.sides[number + 1 :]))
    return CacheState(radix, sequences._replace(block_table=table))


def _copies(spec: CacheSpec, cache: CacheState, give: Int32[Array, " sequences"]) -> Int32[Array, "groups sequences 2"]:
    """For each group and sequence, what its first new block starts from: a block partly equal to it, or the state before it."""
    layout, (radix, sequences) = layout_of(spec), cache
    row, held = jnp.arange(give.shape[0]), sequences.held
    copies = []
    for group, kind in enumerate(spec.kinds):
        table = sequences.block_table[group + layout.offset]
        if kind == "state":
            source = jnp.where(held > 0, table[row, jnp.maximum(held - 1, 0)], 0)
        elif kind == "window":
            source = radix.sides[layout.side.index(group + layout.offset)].node_block[sequences.tail]
        else:
            source = sequences.tail
        target = table[row, jnp.minimum(held, spec.max_blocks - 1)]
        copies.append(jnp.where(((give > 0) & (source > 0))[:, None], jnp.stack([source, target], axis=1), -1))
    return jnp.stack(copies)
