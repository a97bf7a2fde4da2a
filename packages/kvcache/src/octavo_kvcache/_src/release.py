"""Release: end the leases of sequences, stamp what stays cached, free the rest, hand the events over."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.plan import CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys, pool
from octavo_kvcache._src.admit import unlease_tail
from octavo_kvcache._src.change import Change
from octavo_kvcache._src.grow import release_side
from octavo_kvcache._src.policy import LATEST, EvictionPolicy, Use
from octavo_kvcache._src.scan import as_kernel
from octavo_kvcache._src.state import UNINDEXED, CacheState, Layout, RadixState, layout_of, num_nodes


def release(
    spec: CacheSpec, cache: CacheState, done: Bool[Array, " sequences"], *, policy: EvictionPolicy
) -> tuple[CacheState, CacheEvents]:
    """See `RadixCache.release`."""
    layout = layout_of(spec)
    leaving = done & (cache.sequences.held > 0)
    cache = unlease_tail(CacheState(tick(cache.radix, jnp.any(leaving), policy), cache.sequences), done)

    def one(carry: tuple[CacheState, Array]) -> tuple[CacheState, Array]:
        cache, leaving = carry
        row = jnp.argmax(leaving).astype(jnp.int32)
        return _release_row(layout, cache, row, policy), leaving.at[row].set(False)

    cache, _ = lax.while_loop(lambda c: jnp.any(c[1]), one, (cache, leaving))
    radix, sequences = cache
    sequences = sequences._replace(
        sealed=sequences.sealed & ~done,
        chain=jnp.where(done[:, None], keys.root_key(np.zeros(2, np.uint32)), sequences.chain),
        namespace=jnp.where(done[:, None], np.uint32(0), sequences.namespace),
        tenant=jnp.where(done, 0, sequences.tenant),
    )
    radix, events = drain(spec, radix)
    return CacheState(radix, sequences), events


def tick(radix: RadixState, ends: Bool[Array, ""], policy: EvictionPolicy) -> RadixState:
    """Move the clock on if a lease ends."""
    return set_back(radix.write(clock=radix.read().clock + ends), policy)


def set_back(radix: RadixState, policy: EvictionPolicy) -> RadixState:
    """Set the clock back in time, and all stamps with it."""
    half = LATEST // 2

    def back(radix: RadixState) -> RadixState:
        counters = radix.read()
        radix = radix._replace(stamp=policy.rewind(radix.stamp, half))
        return radix.write(clock=counters.clock - half, floor=policy.rewind(counters.floor[None], half)[0])

    return lax.cond(radix.read().clock >= LATEST - LATEST // 8, back, lambda r: r, radix)


class Ending(NamedTuple):
    """The end of leases on distinct blocks: what it changes, and what a policy is told of the path.

    Attributes:
        counters: The tree's, afterwards.
        changes: Of the tree, without the stamps.
        block: The blocks.
        touched: Those to stamp.
        is_new: One of them never was.
        path_len: How many they are.
    """

    counters: Int32[Array, " counters"]
    changes: dict[str, list[Change]]
    block: Int32[Array, " ids"]
    touched: Bool[Array, " ids"]
    is_new: Bool[Array, ""]
    path_len: Int32[Array, ""]


def ending(
    radix: RadixState,
    leased: Bool[Array, " ids"],
    block: Int32[Array, " ids"],
    lease: Int32[Array, " ids"] | int = 1,
) -> Ending:
    """Take one `lease` off the `leased` ones of distinct blocks; what nobody leases any more is cached if indexed, else free."""
    left, counters, indexed = radix.leases[block] - lease, radix.read(), radix.slot[block] != UNINDEXED
    idle, freed, touched = leased & (left == 0) & indexed, leased & (left == 0) & ~indexed, leased & indexed
    at, num_free = pool.places(counters.num_free, freed)
    after = radix.write(
        num_free=num_free,
        evictable=counters.evictable + pool.by_tenant(radix, idle, block),
        used=counters.used - pool.by_tenant(radix, freed, block),
    )
    changes = {"leases": [Change((block,), left, leased)], "free": [Change((at,), block, freed)]}
    is_new = jnp.any(touched & (radix.stamp[block] == 0))
    return Ending(after.counters, changes, block, touched, is_new, jnp.sum(touched, dtype=jnp.int32))


def end_leases(
    radix: RadixState, ending: Ending, tenant: Int32[Array, ""], policy: EvictionPolicy, answer_len: Int32[Array, ""] | int = 0
) -> RadixState:
    """Carry an ending out, whose counters are the tree's already, and stamp the path."""
    now, block = radix.read(), ending.block
    use = Use(now.clock, now.floor, tenant, ending.is_new, ending.path_len, jnp.asarray(answer_len, jnp.int32))
    stamp = Change((block,), policy.touch(radix.stamp[block], use), ending.touched)
    return radix.changed({**ending.changes, "stamp": [stamp]}, counters=radix.counters)


def _release_row(layout: Layout, cache: CacheState, row: Int32[Array, ""], policy: EvictionPolicy) -> CacheState:
    radix, sequences = cache
    block = lax.dynamic_index_in_dim(sequences.block_table[layout.whole[0]], row, keepdims=False)
    sides = []
    for side, number in zip(radix.sides, layout.side, strict=True):
        table = lax.dynamic_index_in_dim(sequences.block_table[number], row, keepdims=False)
        sides.append(release_side(side, table > 0, table))
    radix = radix._replace(sides=tuple(sides))
    ends = as_kernel(ending, block.shape[0])(radix, block > 0, block)
    radix = end_leases(radix._replace(counters=ends.counters), ends, sequences.tenant[row], policy, _answer_len(cache, row))
    sequences = sequences._replace(
        block_table=sequences.block_table.at[:, row].set(0),
        held=sequences.held.at[row].set(0),
        committed=sequences.committed.at[row].set(0),
    )
    return CacheState(radix, sequences)


def _answer_len(cache: CacheState, row: Int32[Array, ""]) -> Int32[Array, ""]:
    """Tokens a sequence has room for beyond its prompt."""
    radix, sequences = cache
    return jnp.maximum(sequences.held[row] * radix.tokens.shape[1] - sequences.prompt_len[row], 0)


def drain(spec: CacheSpec, radix: RadixState) -> tuple[RadixState, CacheEvents]:
    """Hand over the events since the last drain, and how full the pools are."""
    layout, counters = layout_of(spec), radix.read()
    room = np.arange(radix.stored.shape[0])[:, None]
    surplus = np.array(spec.num_blocks, np.int32) - num_nodes(spec)
    num_free, num_evictable = counters.num_free + surplus, jnp.broadcast_to(counters.num_evictable, surplus.shape)
    for side, table in zip(radix.sides, layout.side, strict=True):
        group = table - layout.offset
        num_free, num_evictable = num_free.at[group].set(side.counts[0]), num_evictable.at[group].set(side.counts[1])
    events = CacheEvents(
        stored=_of_groups(layout, jnp.where(room < counters.num_stored, radix.stored, -1)),
        removed=_of_groups(layout, jnp.where(room < counters.num_removed, radix.removed, -1)),
        overflow=(counters.num_stored > room.shape[0]) | (counters.num_removed > room.shape[0]),
        num_free=num_free,
        num_evictable=num_evictable,
    )
    return radix.write(num_stored=jnp.int32(0), num_removed=jnp.int32(0)), events


def _of_groups(layout: Layout, events: Int32[Array, "events fields"]) -> Int32[Array, "more_events fields"]:
    """Events with their groups' numbers: those of whole groups once for each, those of side groups once."""
    code, parts = events[:, :1], []
    for table in layout.whole if not layout.offset else ():
        parts.append(jnp.where(code == 0, events.at[:, 0].set(table), -1))
    for number, table in enumerate(layout.side):
        parts.append(jnp.where(code == 1 + number, events.at[:, 0].set(table - layout.offset), -1))
    return jnp.concatenate(parts)
