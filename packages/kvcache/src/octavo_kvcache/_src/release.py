"""Release: end the leases of sequences, stamp what stays cached, free the rest, hand the events over."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.plan import CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys, pool
from octavo_kvcache._src.admit import unlease_tail
from octavo_kvcache._src.grow import release_side
from octavo_kvcache._src.loops import peek, peek_row, poke, settled
from octavo_kvcache._src.policy import LATEST, EvictionPolicy, Use
from octavo_kvcache._src.state import (
    CLOCK,
    FLOOR,
    NUM_REMOVED,
    NUM_STORED,
    SLOT,
    STAMP,
    STORED,
    UNINDEXED,
    CacheState,
    Layout,
    RadixState,
    Side,
    layout_of,
    num_nodes,
)


def release(
    spec: CacheSpec, cache: CacheState, done: Bool[Array, " sequences"], *, policy: EvictionPolicy
) -> tuple[CacheState, CacheEvents]:
    """See `RadixCache.release`."""
    layout = layout_of(spec)
    leaving = done & (cache.sequences.held > 0)
    cache = unlease_tail(CacheState(tick(cache.radix, jnp.any(leaving), policy), cache.sequences), done)

    def one(carry: tuple[RadixState, Array, Array]) -> tuple[RadixState, Array, Array]:
        radix, table, row = carry
        radix, table = _release_row(layout, CacheState(radix, cache.sequences), table, row, peek(leaving, row), policy)
        return radix, table, row + 1

    last = jnp.where(jnp.any(leaving), done.shape[0], 0)
    cache = _release_sides(layout, cache, leaving)
    start = (cache.radix, cache.sequences.block_table, jnp.int32(0))
    radix, table, _ = lax.while_loop(lambda c: c[2] < last, one, start)
    sequences = cache.sequences
    sequences = sequences._replace(
        block_table=table,
        held=jnp.where(done, 0, sequences.held),
        committed=jnp.where(done, 0, sequences.committed),
        sealed=sequences.sealed & ~done,
        chain=jnp.where(done[:, None], keys.root_key(np.zeros(2, np.uint32)), sequences.chain),
        namespace=jnp.where(done[:, None], np.uint32(0), sequences.namespace),
        tenant=jnp.where(done, 0, sequences.tenant),
    )
    radix, events = drain(spec, radix)
    return CacheState(radix, sequences), events


def tick(radix: RadixState, ends: Bool[Array, ""], policy: EvictionPolicy) -> RadixState:
    """Move the clock on if a lease ends; set it back in time, and all stamps with it."""
    clock, half = peek(radix.counters, CLOCK) + ends.astype(jnp.int32), LATEST // 2
    late = clock >= LATEST - LATEST // 8
    floor = peek(radix.counters, FLOOR)
    counters = poke(radix.counters, jnp.where(late, clock - half, clock), CLOCK)
    counters = poke(counters, jnp.where(late, policy.rewind(floor[None], half)[0], floor), FLOOR)

    def back(block: Array, columns: Array) -> Array:
        return poke(columns, policy.rewind(peek(columns, STAMP, block)[None], half)[0], STAMP, block)

    columns = lax.fori_loop(0, jnp.where(late, radix.num_nodes, 0), back, radix.columns)
    return radix._replace(counters=counters, columns=columns)


def touch(use: Use, policy: EvictionPolicy) -> Callable[[Int32[Array, ""]], Int32[Array, ""]]:
    """What becomes of the stamps of a path whose lease ended, one by one."""
    return lambda stamp: policy.touch(stamp[None], use)[0]


def _release_row(
    layout: Layout,
    cache: CacheState,
    table: Int32[Array, "tables sequences max_blocks"],
    row: Int32[Array, ""],
    leaving: Bool[Array, ""],
    policy: EvictionPolicy,
) -> tuple[RadixState, Int32[Array, "tables sequences max_blocks"]]:
    radix, sequences = cache
    held, path = jnp.where(leaving, peek(sequences.held, row), 0), layout.whole[0]

    def look(n: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
        block = peek(table, path, row, n)
        indexed = peek(radix.columns, SLOT, block) != UNINDEXED
        return seen[0] | (indexed & (peek(radix.columns, STAMP, block) == 0)), seen[1] + indexed.astype(jnp.int32)

    is_new, path_len = lax.fori_loop(0, held, look, (jnp.bool_(False), jnp.int32(0)))
    clock, floor = peek(radix.counters, CLOCK), peek(radix.counters, FLOOR)
    use = Use(clock, floor, peek(sequences.tenant, row), is_new, path_len, _answer_len(cache, row))

    def end(n: Array, carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
        radix, table = carry
        block = settled(lambda: peek(table, path, row, n), n)
        radix = pool.lease_less(radix, block, 1, touch(use, policy))
        for number in range(table.shape[0]):
            table = poke(table, 0, number, row, n)
        return radix, table

    return lax.fori_loop(0, held, end, (radix, table))


def _release_sides(layout: Layout, cache: CacheState, leaving: Bool[Array, " sequences"]) -> CacheState:
    """End the leases in side groups, one sequence after another."""

    def one(carry: tuple[tuple[Side, ...], Array]) -> tuple[tuple[Side, ...], Array]:
        sides, leaving = carry
        row = jnp.argmax(leaving).astype(jnp.int32)
        tables = (peek_row(cache.sequences.block_table, number, row) for number in layout.side)
        ended = tuple(release_side(side, table > 0, table) for side, table in zip(sides, tables, strict=True))
        return ended, leaving.at[row].set(False)

    if not layout.side:
        return cache
    sides, _ = lax.while_loop(lambda c: jnp.any(c[1]), one, (cache.radix.sides, leaving))
    return CacheState(cache.radix._replace(sides=sides), cache.sequences)


def _answer_len(cache: CacheState, row: Int32[Array, ""]) -> Int32[Array, ""]:
    """Tokens a sequence has room for beyond its prompt."""
    radix, sequences = cache
    room = peek(sequences.held, row) * radix.tokens.shape[1]
    return jnp.maximum(room - peek(sequences.prompt_len, row), 0)


def drain(spec: CacheSpec, radix: RadixState) -> tuple[RadixState, CacheEvents]:
    """Hand over the events since the last drain, and how full the pools are."""
    layout, counters = layout_of(spec), radix.read()
    room = np.arange(radix.events.shape[0] - 1)[:, None]
    stored, removed = radix.events[:-1, :STORED], radix.events[:-1, STORED:]
    surplus = np.array(spec.num_blocks, np.int32) - num_nodes(spec)
    num_free, num_evictable = counters.num_free + surplus, jnp.broadcast_to(counters.num_evictable, surplus.shape)
    for side, table in zip(radix.sides, layout.side, strict=True):
        group = table - layout.offset
        num_free, num_evictable = num_free.at[group].set(side.counts[0]), num_evictable.at[group].set(side.counts[1])
    events = CacheEvents(
        stored=_of_groups(layout, jnp.where(room < counters.num_stored, stored, -1)),
        removed=_of_groups(layout, jnp.where(room < counters.num_removed, removed, -1)),
        overflow=(counters.num_stored > room.shape[0]) | (counters.num_removed > room.shape[0]),
        num_free=num_free,
        num_evictable=num_evictable,
    )
    return radix._replace(counters=poke(poke(radix.counters, 0, NUM_STORED), 0, NUM_REMOVED)), events


def _of_groups(layout: Layout, events: Int32[Array, "events fields"]) -> Int32[Array, "more_events fields"]:
    """Events with their groups' numbers: those of whole groups once for each, those of side groups once."""
    code, parts = events[:, :1], []
    for table in layout.whole if not layout.offset else ():
        parts.append(jnp.where(code == 0, events.at[:, 0].set(table), -1))
    for number, table in enumerate(layout.side):
        parts.append(jnp.where(code == 1 + number, events.at[:, 0].set(table - layout.offset), -1))
    return jnp.concatenate(parts)
