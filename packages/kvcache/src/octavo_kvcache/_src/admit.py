"""Admission: match a prompt and lease what was found, if the pools could give the rest."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import OK, OUT_OF_BLOCKS, Admitted
from octavo_core.specs import CacheSpec
from octavo_kvcache._src import pool
from octavo_kvcache._src.insert import count_idle
from octavo_kvcache._src.match import Match, Tail, match, match_tail
from octavo_kvcache._src.share import own_space, spare_for
from octavo_kvcache._src.state import CacheState, Layout, RadixState, layout_of, num_nodes


def admit(
    spec: CacheSpec,
    cache: CacheState,
    sequence: Int32[Array, " arrivals"],
    tokens: Int32[Array, "arrivals max_len"],
    lengths: Int32[Array, " arrivals"],
    namespace: UInt32[Array, "arrivals 2"],
    tenant: Int32[Array, " arrivals"],
    want: Int32[Array, "arrivals groups"],
    reserve: Int32[Array, " groups"],
    *,
    quotas: tuple[int, ...],
    step_blocks: int,
    partial: bool,
) -> tuple[CacheState, Admitted]:
    """See `RadixCache.admit`."""
    arrivals, layout = sequence.shape[0], layout_of(spec)
    named = (sequence >= 0) & (sequence < spec.max_sequences)
    owner = jnp.clip(tenant, 0, len(quotas) - 1)
    namespace = own_space(namespace, owner) if len(quotas) > 1 else namespace

    length = jnp.maximum(lengths, 1) - 1  # one token is left to compute

    def serve(i: Array, carry: tuple[CacheState, Array, Array, Array]) -> tuple[CacheState, Array, Array, Array]:
        cache, promised, cached_len, status = carry
        found = match(cache.radix, tokens[i], length[i], namespace[i], reach=layout.reach)
        tail = _tail(cache.radix, found, tokens[i], length[i], namespace[i]) if partial else Tail(jnp.int32(0), jnp.int32(0))
        lack = _lack(spec, layout, found, want[i], step_blocks)
        spare = _spare(spec, layout, cache.radix, found, owner[i], quotas) - promised - reserve
        # A block that is only copied stays leased until then, and must not take the room the sequence needs.
        use_tail = (tail.block_id > 0) & jnp.all(lack <= spare - _idle(spec, layout, cache.radix, tail.block_id))
        tail = Tail(*(jnp.where(use_tail, field, 0) for field in tail))
        row = jnp.where(named[i], sequence[i], 0)
        empty = (cache.sequences.held[row] == 0) & (cache.sequences.tail[row] == 0)
        takes = named[i] & empty & (jnp.max(want[i]) <= spec.max_blocks) & jnp.all(lack <= spare)
        cache = _lease(layout, cache, jnp.where(takes, sequence[i], spec.max_sequences), found, tail, namespace[i], owner[i])
        reused = found.num_blocks * spec.block_size + tail.length
        cached_len = cached_len.at[i].set(jnp.where(takes, reused, 0))
        status = status.at[i].set(jnp.where(named[i] & ~takes, OUT_OF_BLOCKS, OK))
        return cache, promised + jnp.where(takes, lack, 0), cached_len, status

    def maybe(i: Array, carry: tuple[CacheState, Array, Array, Array]) -> tuple[CacheState, Array, Array, Array]:
        return lax.cond(named[i], lambda c: serve(i, c), lambda c: c, carry)

    nothing = jnp.zeros(arrivals, jnp.int32)
    start = (cache, jnp.zeros(spec.groups, jnp.int32), nothing, nothing)
    cache, _, cached_len, status = lax.fori_loop(0, arrivals, maybe, start)
    row = jnp.where(named & (status == OK), sequence, spec.max_sequences)
    prompt_len = cache.sequences.prompt_len.at[row].set(lengths, mode="drop")
    return CacheState(cache.radix, cache.sequences._replace(prompt_len=prompt_len)), Admitted(cached_len, status)


def look_up(
    spec: CacheSpec,
    cache: CacheState,
    tokens: Int32[Array, "arrivals max_len"],
    lengths: Int32[Array, " arrivals"],
    namespace: UInt32[Array, "arrivals 2"],
    tenant: Int32[Array, " arrivals"],
    *,
    quotas: tuple[int, ...],
    partial: bool,
) -> Int32[Array, " arrivals"]:
    """See `RadixCache.match`."""
    layout = layout_of(spec)
    namespace = own_space(namespace, jnp.clip(tenant, 0, len(quotas) - 1)) if len(quotas) > 1 else namespace
    length = jnp.maximum(lengths, 1) - 1

    def one(i: Array, found_len: Array) -> Array:
        found = match(cache.radix, tokens[i], length[i], namespace[i], reach=layout.reach)
        tail = _tail(cache.radix, found, tokens[i], length[i], namespace[i]).length if partial else 0
        return found_len.at[i].set(found.num_blocks * spec.block_size + tail)

    def maybe(i: Array, found_len: Array) -> Array:
        return lax.cond(length[i] > 0, lambda f: one(i, f), lambda f: f, found_len)

    return lax.fori_loop(0, tokens.shape[0], maybe, jnp.zeros(tokens.shape[0], jnp.int32))


def _tail(
    radix: RadixState,
    found: Match,
    tokens: Int32[Array, " max_len"],
    length: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
) -> Tail:
    """A block to copy that every group has."""
    tail = match_tail(radix, found, tokens, length, namespace)
    there = tail.block_id > 0
    for side in radix.sides:
        there &= side.node_block[tail.block_id] > 0
    return Tail(jnp.where(there, tail.block_id, 0), jnp.where(there, tail.length, 0))


def _lack(
    spec: CacheSpec, layout: Layout, found: Match, want: Int32[Array, " groups"], step_blocks: int
) -> Int32[Array, " groups"]:
    """Blocks the sequence still needs in each group; in a side group never more than it holds at a time."""
    lack = jnp.maximum(jnp.max(want) - found.num_blocks, 0)
    most = np.full(spec.groups, spec.max_blocks, np.int32)
    for table, back in zip(layout.side, layout.reach, strict=True):
        most[table - layout.offset] = back + 1 + step_blocks
    return jnp.minimum(lack, most)


def _spare(
    spec: CacheSpec, layout: Layout, radix: RadixState, found: Match, tenant: Int32[Array, ""], quotas: tuple[int, ...]
) -> Int32[Array, " groups"]:
    """Blocks each group could give the tenant once the match is leased."""
    idle = jnp.sum((found.block_ids > 0) & (radix.leases[found.block_ids] == 0), dtype=jnp.int32)
    whole = spare_for(radix, tenant, quotas) - idle
    surplus = np.array(spec.num_blocks, np.int32) - num_nodes(spec)
    spare = jnp.where(np.array([g + layout.offset in layout.whole for g in range(spec.groups)]), whole + surplus, 0)
    for side, table, back in zip(radix.sides, layout.side, layout.reach, strict=True):
        block = _in_reach(side.node_block, found, back)
        idle = jnp.sum((block > 0) & (side.refcount[block] == 0), dtype=jnp.int32)
        spare = spare.at[table - layout.offset].set(jnp.sum(side.counts) - idle)
    return spare


def _idle(spec: CacheSpec, layout: Layout, radix: RadixState, node: Int32[Array, ""]) -> Bool[Array, " groups"]:
    """Whether nobody leases the block of a node, in each group."""
    idle = jnp.broadcast_to(radix.leases[node] == 0, spec.groups)
    for side, table in zip(radix.sides, layout.side, strict=True):
        idle = idle.at[table - layout.offset].set(side.refcount[side.node_block[node]] == 0)
    return idle


def _in_reach(node_block: Int32[Array, " nodes"], found: Match, back: int) -> Int32[Array, " max_blocks"]:
    """Side blocks of the last `back` blocks of a match; 0 elsewhere."""
    column = jnp.arange(found.block_ids.shape[0], dtype=jnp.int32)
    return jnp.where((column >= found.num_blocks - back) & (found.block_ids > 0), node_block[found.block_ids], 0)


def _lease(
    layout: Layout,
    cache: CacheState,
    row: Int32[Array, ""],
    found: Match,
    tail: Tail,
    namespace: UInt32[Array, " 2"],
    tenant: Int32[Array, ""],
) -> CacheState:
    """Lease a match and the block to copy to a sequence; `row` beyond the last: to nobody."""
    radix, sequences = cache
    takes = row < sequences.held.shape[0]
    ids = jnp.concatenate([found.block_ids, tail.block_id[None]])
    leased = takes & (ids > 0)
    woken = leased & (radix.leases[ids] == 0)
    evictable = radix.read().evictable - pool.by_tenant(radix, woken, ids)
    leases = radix.leases.at[jnp.where(leased, ids, radix.leases.shape[0])].add(1, mode="drop")
    radix, table = radix._replace(leases=leases).write(evictable=evictable), sequences.block_table
    for whole in layout.whole:
        table = table.at[whole, row].set(found.block_ids, mode="drop")
    sides = []
    for side, number, back in zip(radix.sides, layout.side, layout.reach, strict=True):
        block = _in_reach(side.node_block, found, back)
        copied = jnp.concatenate([block, side.node_block[tail.block_id][None]])
        at = jnp.where(takes & (copied > 0), copied, side.refcount.shape[0])
        sides.append(count_idle(side._replace(refcount=side.refcount.at[at].add(1, mode="drop"))))
        table = table.at[number, row].set(block, mode="drop")
    sequences = sequences._replace(
        block_table=table,
        held=sequences.held.at[row].set(found.num_blocks, mode="drop"),
        committed=sequences.committed.at[row].set(found.num_blocks, mode="drop"),
        sealed=sequences.sealed.at[row].set(False, mode="drop"),
        chain=sequences.chain.at[row].set(found.chain, mode="drop"),
        namespace=sequences.namespace.at[row].set(namespace, mode="drop"),
        tenant=sequences.tenant.at[row].set(tenant, mode="drop"),
        tail=sequences.tail.at[row].set(tail.block_id, mode="drop"),
    )
    return CacheState(radix._replace(sides=tuple(sides)), sequences)


def unlease_tail(cache: CacheState, ended: Bool[Array, " sequences"]) -> CacheState:
    """Give up the blocks to copy of these sequences, one after another: there are few, and two may copy the same. They stay cached."""

    def one(carry: tuple[CacheState, Array]) -> tuple[CacheState, Array]:
        (radix, sequences), waiting = carry
        row = jnp.argmax(waiting).astype(jnp.int32)
        block = sequences.tail[row]
        left = radix.leases[block] - 1
        tenant = radix.tenant[block] if radix.num_tenants > 1 else 0
        evictable = radix.read().evictable.at[tenant].add((left == 0).astype(jnp.int32))
        sides = []
        for side in radix.sides:
            copied = side.node_block[block]
            at = jnp.where(copied > 0, copied, side.refcount.shape[0])
            sides.append(count_idle(side._replace(refcount=side.refcount.at[at].add(-1, mode="drop"))))
        radix = radix._replace(leases=radix.leases.at[block].set(left), sides=tuple(sides)).write(evictable=evictable)
        return CacheState(radix, sequences._replace(tail=sequences.tail.at[row].set(0))), waiting.at[row].set(False)

    start = (cache, ended & (cache.sequences.tail > 0))
    return lax.while_loop(lambda c: jnp.any(c[1]), one, start)[0]
