"""Blocks that come from outside: made findable as if a sequence had computed them, and leased by hand until somebody has matched them.

Built on the functions of the tree alone; knows no sequences. In side groups a load takes what a sequence that goes on from its end looks
back to, all of it or nothing: a prefix is found only where that is there.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import OK, Loaded
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.evict import evict, evict_side
from octavo_kvcache._src.insert import count_idle
from octavo_kvcache._src.lease import Loan, allocate, insert, lease, lend, release, surplus
from octavo_kvcache._src.match import Match, match
from octavo_kvcache._src.policy import EvictionPolicy
from octavo_kvcache._src.pool import hand_out_side, log
from octavo_kvcache._src.share import allowance, own_space, spare_for
from octavo_kvcache._src.state import HOLD, RadixState, Side


def load(
    spec: CacheSpec,
    radix: RadixState,
    tokens: Int32[Array, " max_len"],
    first: Int32[Array, ""],
    upto: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
    tenant: Int32[Array, ""],
    complete: Bool[Array, " max_blocks"],
    *,
    policy: EvictionPolicy,
    quotas: tuple[int, ...],
) -> tuple[RadixState, Loaded]:
    """See `RadixCache.load`."""
    size, block_size, reach = spec.max_blocks, spec.block_size, spec.reaches
    owner = jnp.clip(tenant, 0, len(quotas) - 1)
    if len(quotas) > 1:
        namespace = own_space(namespace[None], owner[None])[0]
    found = match(radix, tokens, upto * block_size, namespace)
    radix, _ = lease(radix, found.block_ids, found.generations)
    lack = jnp.where(found.num_blocks >= first, upto - found.num_blocks, 0)
    count = jnp.clip(jnp.minimum(lack, spare_for(radix, owner, quotas)), 0, size)
    suffices = _sides_suffice(radix, reach, found, upto, complete)
    if reach:
        count = jnp.where(suffices & (count == lack), count, 0)
    may_lose = allowance(radix, count[None], owner[None], quotas)
    short = jnp.maximum(count - radix.read().num_free, 0)
    radix = evict(radix, short, policy, max_depth=size - 1, allowance=may_lose)
    radix, ids, generations, status = allocate(radix, count, size=size, tenant=owner)
    rest = lax.dynamic_slice(jnp.pad(tokens, (0, tokens.shape[0])), (found.num_blocks * block_size,), (tokens.shape[0],))
    radix, ids, generations, _ = insert(radix, found, rest, ids, generations, namespace)
    filed = jnp.sum((ids > 0) & radix.is_indexed[ids], dtype=jnp.int32)
    num_new, path = jnp.where(status == OK, filed, 0), _after(found.block_ids, ids, found.num_blocks)
    is_there = (found.num_blocks + num_new == upto) & suffices
    radix, *sides = _take_sides(radix, reach, path, upto, is_there, policy)
    return radix, Loaded(path, _after(found.generations, generations, found.num_blocks), found.num_blocks, num_new, *sides)


def _sides_suffice(
    radix: RadixState, reach: tuple[int, ...], found: Match, upto: Int32[Array, ""], complete: Bool[Array, " max_blocks"]
) -> Bool[Array, ""]:
    """Whether every side group has, or is brought and has room for, all that is looked back to from `upto`."""
    good = jnp.bool_(True)
    for side, back in zip(radix.sides, reach, strict=True):
        block = side.node_block[found.block_ids]
        wanted = _within(complete.shape[0], upto, back)
        lack, idle = wanted & (block == 0), wanted & (block > 0) & (side.refcount[block] == 0)
        good &= jnp.all(complete | ~lack) & (jnp.sum(lack) <= jnp.sum(side.counts) - jnp.sum(idle))
    return good


def _within(size: int, upto: Int32[Array, ""], back: int) -> Bool[Array, " size"]:
    """The last `back` columns before `upto`."""
    column = jnp.arange(size, dtype=jnp.int32)
    return (column >= upto - back) & (column < upto)


def _take_sides(
    radix: RadixState,
    reach: tuple[int, ...],
    path: Int32[Array, " max_blocks"],
    upto: Int32[Array, ""],
    takes: Bool[Array, ""],
    policy: EvictionPolicy,
) -> tuple[RadixState, Int32[Array, "sides max_blocks"], Int32[Array, "sides max_blocks"], Bool[Array, "sides max_blocks"]]:
    """Lease what each side group looks back to from the end of a path, taking blocks for what it lacks."""
    size = path.shape[0]
    ids, generations, new = jnp.zeros((len(reach), size), jnp.int32), jnp.zeros((len(reach), size), jnp.int32), []
    for number, back in enumerate(reach):
        wanted = takes & _within(size, upto, back)
        have = jnp.where(wanted, radix.sides[number].node_block[path], 0)
        radix = _with_side(radix, number, hold(radix.sides[number], have, HOLD))
        lack = wanted & (have == 0)
        radix = evict_side(radix, number, jnp.sum(lack, dtype=jnp.int32) - radix.sides[number].counts[0], policy)
        radix, block = _adopt_new(radix, number, path, have, lack)
        ids, generations = (
            ids.at[number].set(block),
            generations.at[number].set(jnp.where(wanted, radix.sides[number].generation[block], 0)),
        )
        new.append(lack)
    return radix, ids, generations, jnp.stack(new) if new else jnp.zeros((0, size), bool)


def _adopt_new(
    radix: RadixState,
    number: int,
    path: Int32[Array, " max_blocks"],
    have: Int32[Array, " max_blocks"],
    lack: Bool[Array, " max_blocks"],
) -> tuple[RadixState, Int32[Array, " max_blocks"]]:
    """Give the nodes of a path free blocks of a side group where they lack one, leased by hand; answers the blocks they have."""
    side, filled = hand_out_side(radix.sides[number], have[None], lack[None])
    block = filled[0]
    at = jnp.where(lack, block, side.owner.shape[0])
    side = side._replace(
        node_block=side.node_block.at[jnp.where(lack, path, side.node_block.shape[0])].set(block, mode="drop"),
        owner=side.owner.at[at].set(path, mode="drop"),
        refcount=side.refcount.at[at].set(HOLD, mode="drop"),
    )
    depth = jnp.arange(path.shape[0], dtype=jnp.int32)
    stored, num_stored = log(radix.stored, radix.read().num_stored, lack, 1 + number, block, side.generation[block], -1, depth)
    return _with_side(radix._replace(stored=stored).write(num_stored=num_stored), number, count_idle(side)), block


def hold(side: Side, block: Int32[Array, " ids"], by: int) -> Side:
    """Add to the leases of no sequence on these blocks; 0 pads."""
    return count_idle(
        side._replace(refcount=side.refcount.at[jnp.where(block > 0, block, side.refcount.shape[0])].add(by, mode="drop"))
    )


def _with_side(radix: RadixState, number: int, side: Side) -> RadixState:
    return radix._replace(sides=(*radix.sides[:number], side, *radix.sides[number + 1 :]))


def _after(first: Int32[Array, " ids"], then: Int32[Array, " ids"], count: Int32[Array, ""]) -> Int32[Array, " ids"]:
    """The first `count` of one list, then the other."""
    j = jnp.arange(first.shape[0], dtype=jnp.int32)
    return jnp.where(j < count, first, then[jnp.maximum(j - count, 0)])


def unload(radix: RadixState, loaded: Loaded, *, policy: EvictionPolicy) -> RadixState:
    """See `RadixCache.unload`. Blocks that found no place in the index stand last and are free from now on."""
    radix, status = release(radix, loaded.block_ids, loaded.generations, policy=policy)
    for number, ids in enumerate(loaded.side_ids):
        radix = _with_side(radix, number, hold(radix.sides[number], jnp.where(status == OK, ids, 0), -HOLD))
    return radix


def lend_surplus(
    spec: CacheSpec, radix: RadixState, *, high: float, low: float, size: int, policy: EvictionPolicy
) -> tuple[RadixState, Loan]:
    """See `RadixCache.lend`."""
    return lend(radix, surplus(radix, high=high, low=low), size=size, max_depth=spec.max_blocks - 1, policy=policy)
