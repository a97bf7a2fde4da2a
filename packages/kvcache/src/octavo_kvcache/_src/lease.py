"""Leases that belong to no sequence: allocation by hand, pins, and loans of blocks that are being copied to another tier.

A caller names blocks by handles, `(id, generation)`, as paths: the indexed blocks of a prefix from its first on, each the parent of
the next, then private ones. A lease on a block without its ancestors would let the tree lose the way to it, so anything but a path is
refused, as is a stale handle; a refused call changes nothing.

Size: leasing, releasing and lending check paths alike.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_kvcache._src import keys, pool
from octavo_kvcache._src.checks import check_array, check_count, check_handles, check_prompt
from octavo_kvcache._src.evict import eviction_key, remove, smallest
from octavo_kvcache._src.insert import Work, file, note
from octavo_kvcache._src.loops import peek, poke, settled
from octavo_kvcache._src.match import Match
from octavo_kvcache._src.policy import EvictionPolicy, LeastRecentlyUsed, Use
from octavo_kvcache._src.release import tick
from octavo_kvcache._src.scan import first_true
from octavo_kvcache._src.state import (
    CLOCK,
    DEPTH,
    FLOOR,
    GENERATION,
    HOLD,
    LEASES,
    LENT,
    NUM_FREE,
    PARENT,
    SLOT,
    SPACE_HIGH,
    SPACE_LOW,
    STAMP,
    TAG,
    TENANT,
    WAYS,
    RadixState,
)

STALE: Final = 2
"""Status: a handle is outside the pool, names an earlier use of its block, or is not leased as the operation needs it to be."""

NOT_A_PATH: Final = 3
"""Status: the blocks are not a prefix from its first block on, or one is named twice."""

LRU: Final = LeastRecentlyUsed()
_LEASE: Final = HOLD + 1


class Loan(NamedTuple):
    """Cached blocks lent out for copying; they and what they follow cannot be evicted meanwhile, but are found as before.

    Attributes:
        block_ids: In no order; 0 pads.
        generations: Of each.
        lent: Which loan of the block it is.
        num_blocks: How many.
    """

    block_ids: Int32[Array, " size"]
    generations: Int32[Array, " size"]
    lent: Int32[Array, " size"]
    num_blocks: Int32[Array, ""]


def allocate(
    radix: RadixState, count: Int32[Array, ""], *, size: int, tenant: Int32[Array, ""] | int = 0
) -> tuple[RadixState, Int32[Array, " size"], Int32[Array, " size"], Int32[Array, ""]]:
    """Take `count` free blocks, leased once and private; evicts nothing.

    Returns:
        The tree, ids and generations (0 pads), and `OK` or `OUT_OF_BLOCKS` (nothing was taken: too few are free, or `count` > `size`).
    """
    check_count(count)
    can = (count >= 0) & (count <= jnp.minimum(peek(radix.counters, NUM_FREE), size))
    owner = jnp.clip(jnp.asarray(tenant, jnp.int32), 0, radix.num_tenants - 1)

    def take(j: Array, carry: tuple[RadixState, Array, Array]) -> tuple[RadixState, Array, Array]:
        radix, ids, generations = carry
        radix, block, generation = pool.hand_out_one(radix, owner, _LEASE)
        return radix, poke(ids, block, j), poke(generations, generation, j)

    nothing = jnp.zeros(size, jnp.int32)
    radix, ids, generations = lax.fori_loop(0, jnp.where(can, count, 0), take, (radix, nothing, nothing))
    return radix, ids, generations, jnp.where(can, OK, OUT_OF_BLOCKS)


class _Named(NamedTuple):
    """What a list of names says, and the tree about them.

    Attributes:
        named: The entry is no pad.
        block: 0 where it is none of the pool.
        fresh: The name is of the block's present use.
        cached: The block is indexed.
        chained: Its parent is the block named before.
        leases: On it.
        tenant: Whose it is.
    """

    named: Bool[Array, " ids"]
    block: Int32[Array, " ids"]
    fresh: Bool[Array, " ids"]
    cached: Bool[Array, " ids"]
    chained: Bool[Array, " ids"]
    leases: Int32[Array, " ids"]
    tenant: Int32[Array, " ids"]


def _look(radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"]) -> _Named:
    inside, at = _inside(radix, block_ids)

    def read() -> _Named:
        of = [radix.columns[column, at] for column in (GENERATION, SLOT, PARENT, LEASES, TENANT)]
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), at[:-1]])
        return _Named(block_ids != 0, at, inside & (of[0] == generations), of[1] >= 0, of[2] == before, of[3], of[4])

    return settled(read, at[0])


def _is_end(on_path: Bool[Array, " ids"]) -> Bool[Array, " ids"]:
    """Which of the entries on a path is the last."""
    return on_path & ~jnp.append(on_path[1:], False)


def _pads_last(named: Bool[Array, " ids"]) -> Bool[Array, ""]:
    return jnp.all(named[1:] <= named[:-1])


def _status(fresh: Bool[Array, ""], path: Bool[Array, ""]) -> Int32[Array, ""]:
    return jnp.where(fresh, jnp.where(path, OK, NOT_A_PATH), STALE).astype(jnp.int32)


def lease(
    radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"]
) -> tuple[RadixState, Int32[Array, ""]]:
    """Lease a cached path once more, as `match` answers it; 0 pads at its end. A pin is a lease that nobody releases soon.

    Returns:
        The tree, and `OK`, `STALE` or `NOT_A_PATH`.
    """
    check_handles(block_ids, generations)
    it = _look(radix, block_ids, generations)
    status = _status(jnp.all((it.fresh & it.cached) | ~it.named), jnp.all(it.chained | ~it.named) & _pads_last(it.named))
    taken = it.named & (status == OK)
    leases = it.leases + jnp.where(_is_end(taken), _LEASE, 1)
    columns = radix.columns.at[LEASES, jnp.where(taken, it.block, radix.num_nodes)].set(leases, mode="drop")
    return pool.count_idle(radix._replace(columns=columns), taken & (it.leases == 0), it.tenant, -1), status


def release(
    radix: RadixState,
    block_ids: Int32[Array, " ids"],
    generations: Int32[Array, " ids"],
    *,
    policy: EvictionPolicy = LRU,
) -> tuple[RadixState, Int32[Array, ""]]:
    """End a lease taken by `lease` or `allocate`, all of it: cached blocks stay and are stamped, private ones become free.

    Returns:
        The tree, and `OK`, `STALE` (also where no such lease ends at the last cached block, or at a private one) or `NOT_A_PATH`.
    """
    check_handles(block_ids, generations)
    it = _look(radix, block_ids, generations)
    last = _is_end(it.cached)
    fresh = it.fresh & ((it.cached & ~last) | (it.leases >= HOLD))
    # Cached blocks follow one another from the first, so they differ; private ones come last and are looked at one by one.
    num_cached, num_named = jnp.sum(it.cached, dtype=jnp.int32), jnp.sum(it.named, dtype=jnp.int32)
    repeated = lax.fori_loop(
        num_cached, num_named, lambda j, found: found | _is_repeated(block_ids, j, jnp.bool_(True)), jnp.bool_(False)
    )
    in_order = jnp.all(it.cached[1:] <= it.cached[:-1]) & _pads_last(it.named) & ~repeated
    status = _status(jnp.all(fresh | ~it.named), jnp.all(it.chained | ~it.cached | ~it.named) & in_order)
    radix = tick(radix, (num_named > 0) & (status == OK), policy)
    radix = _end_cached(radix, it, it.cached & (status == OK), policy)

    def free(j: Array, radix: RadixState) -> RadixState:
        return pool.lease_less(radix, peek(block_ids, j), _LEASE)

    return lax.fori_loop(num_cached, jnp.where(status == OK, num_named, 0), free, radix), status


def _end_cached(radix: RadixState, it: _Named, ended: Bool[Array, " ids"], policy: EvictionPolicy) -> RadixState:
    """End the leases on the cached part of a path and stamp it."""
    stamp = settled(lambda: radix.columns[STAMP, it.block], it.block[0])
    clock, floor = peek(radix.counters, CLOCK), peek(radix.counters, FLOOR)
    use = Use(clock, floor, it.tenant[0], jnp.any(ended & (stamp == 0)), jnp.sum(ended, dtype=jnp.int32), jnp.int32(0))
    left = it.leases - jnp.where(_is_end(ended), _LEASE, 1)
    at = jnp.where(ended, it.block, radix.num_nodes)
    columns = radix.columns.at[LEASES, at].set(left, mode="drop").at[STAMP, at].set(policy.touch(stamp, use), mode="drop")
    return pool.count_idle(radix._replace(columns=columns), ended & (left == 0), it.tenant, 1)


def _name(
    radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"], j: Int32[Array, ""]
) -> tuple[Bool[Array, ""], Bool[Array, ""], Int32[Array, ""]]:
    """Whether an entry names a block, whether the name is of that block's present use, and the block; 0 for none of the pool."""
    block = peek(block_ids, j)
    inside, block = _inside(radix, block)
    return peek(block_ids, j) != 0, inside & (peek(radix.columns, GENERATION, block) == peek(generations, j)), block


def _is_repeated(block_ids: Int32[Array, " ids"], j: Int32[Array, ""], asked: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether an earlier entry names the same block, if that is asked."""
    block = peek(block_ids, j)
    end = jnp.where(asked & (block != 0), j, 0)
    return lax.fori_loop(0, end, lambda k, found: found | (peek(block_ids, k) == block), jnp.bool_(False))


def _repeats(counted: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Which of the `counted` entries name a block that an earlier one names."""
    same = (block[:, None] == block) & counted & counted[:, None]
    return counted & (first_true(same) < jnp.arange(block.shape[0]))


def _inside(radix: RadixState, block_ids: Int32[Array, "*ids"]) -> tuple[Bool[Array, "*ids"], Int32[Array, "*ids"]]:
    """Which ids are of the pool, and the ids with the others replaced by 0."""
    inside = (block_ids > 0) & (block_ids < radix.num_nodes)
    return inside, jnp.where(inside, block_ids, 0)


class _Checked(NamedTuple):
    """What a look at all names of an insert has found.

    Attributes:
        stale: One of them names nothing that is there, or what nobody leases by hand.
        crooked: One is not private or stands after a pad.
        num_named: Names.
    """

    stale: Bool[Array, ""]
    crooked: Bool[Array, ""]
    num_named: Int32[Array, ""]


def insert(
    radix: RadixState,
    prefix: Match,
    tokens: Int32[Array, " new_len"],
    block_ids: Int32[Array, " new_blocks"],
    generations: Int32[Array, " new_blocks"],
    namespace: UInt32[Array, " 2"],
) -> tuple[RadixState, Int32[Array, " new_blocks"], Int32[Array, " new_blocks"], Int32[Array, ""]]:
    """Make full blocks that follow a leased prefix findable. Idempotent: where an equal block is filed already it is the canonical one.

    The lease on the prefix goes on to the last block filed, so that they are released together; copies that are not canonical are freed.

    Args:
        radix: The tree.
        prefix: What the blocks follow, leased by hand up to its end; an empty match where they begin a prefix.
        tokens: Of the blocks, one after another.
        block_ids: Allocated blocks that hold their KV; 0 pads at the end.
        generations: Of each.
        namespace: The prefix's.

    Returns:
        The tree, canonical ids and generations (the given ones from the first that could not be filed on), and `OK`, `STALE`,
        `NOT_A_PATH` (a block is not private, or named twice, or `prefix` is not what the tree says) or `OUT_OF_BLOCKS` (not all
        fitted in the index).
    """
    check_handles(block_ids, generations)
    check_handles(prefix.block_ids, prefix.generations)
    size, blocks = block_ids.shape[0], tokens.reshape(-1, radix.tokens.shape[1])
    check_prompt(radix, tokens, namespace)
    check_array("tokens", tokens, (size * radix.tokens.shape[1],), "int32", f"{size} blocks")

    def check(j: Array, seen: _Checked) -> _Checked:
        named, fresh, block = _name(radix, block_ids, generations, j)
        leases = peek(radix.columns, LEASES, block)
        private = (peek(radix.columns, SLOT, block) < 0) & (leases == _LEASE) & ~_is_repeated(block_ids, j, jnp.bool_(True))
        return _Checked(
            stale=seen.stale | (named & ~(fresh & (leases >= HOLD))),
            crooked=seen.crooked | (named & (~private | (seen.num_named != j))),
            num_named=seen.num_named + named.astype(jnp.int32),
        )

    base, held, follows = _end_of(radix, prefix, namespace)
    seen = lax.fori_loop(0, size, check, _Checked(~held, ~follows, jnp.int32(0)))
    status = _status(~seen.stale, ~seen.crooked)
    count = jnp.where(status == OK, seen.num_named, 0)

    j = np.arange(size, dtype=np.int32)
    work = Work(block_ids, jnp.where(j == 0, base, -1), jnp.full(size, -1, jnp.int32), prefix.num_blocks + j, count)
    before, spaces = jnp.broadcast_to(prefix.chain, (size, 2)), jnp.broadcast_to(namespace, (size, 2))
    radix, chain = note(radix, work, blocks, jnp.asarray(j), before, spaces)
    radix, filed = file(radix, work, chain, _LEASE)
    num_filed = jnp.sum(filed > 0, dtype=jnp.int32)
    radix = _move_end(radix, num_filed > 0, base, peek(filed, jnp.maximum(num_filed - 1, 0)))
    answer = jnp.where(filed > 0, filed, block_ids)
    current = jnp.where(filed > 0, radix.columns[GENERATION, filed], generations)
    return radix, answer, current, jnp.where(num_filed < count, OUT_OF_BLOCKS, status)


def _end_of(
    radix: RadixState, prefix: Match, namespace: UInt32[Array, " 2"]
) -> tuple[Int32[Array, ""], Bool[Array, ""], Bool[Array, ""]]:
    """The last block of a prefix; whether it is leased by hand; whether it is what the tree says: indexed, of that depth and key."""
    num, last = prefix.num_blocks, jnp.maximum(prefix.num_blocks - 1, 0)
    inside, base = _inside(radix, jnp.where(num > 0, peek(prefix.block_ids, last), 0))
    columns, space, slot = radix.columns, namespace.astype(jnp.int32), peek(radix.columns, SLOT, base)
    held = inside & (peek(columns, GENERATION, base) == peek(prefix.generations, last)) & (peek(columns, LEASES, base) >= HOLD)
    bucket, tag = keys.address(prefix.chain, radix.buckets.shape[0])
    at = jnp.maximum(slot, 0)
    filed = (slot >= 0) & (at // WAYS == bucket) & (peek(radix.buckets, at // WAYS, TAG, at % WAYS) == tag.astype(jnp.int32))
    placed = (peek(columns, SPACE_LOW, base) == space[0]) & (peek(columns, SPACE_HIGH, base) == space[1])
    whole = filed & placed & (peek(columns, DEPTH, base) == num - 1)
    follows = jnp.where(num == 0, jnp.all(prefix.chain == keys.root_key(namespace)), whole)
    return base, held | (num == 0), follows


def _move_end(radix: RadixState, moves: Bool[Array, ""], base: Int32[Array, ""], last: Int32[Array, ""]) -> RadixState:
    """Let the leases on a prefix and on the blocks filed after it be one, which ends at the last of them."""
    columns = radix.columns
    for block, hold in ((base, -HOLD), (last, HOLD)):
        columns = poke(columns, peek(columns, LEASES, block) + jnp.where(moves & (block > 0), hold, 0), LEASES, block)
    return radix._replace(columns=columns)


def surplus(radix: RadixState, *, high: float = 0.88, low: float = 0.8) -> Int32[Array, ""]:
    """Blocks to demote or evict: none while at most `high` of the pool is in use, then as many as bring it down to `low`."""
    total = radix.num_nodes - 1
    used = total - radix.read().num_free
    return jnp.where(used > int(high * total), jnp.maximum(used - int(low * total), 0), 0)


def lend(
    radix: RadixState, count: Int32[Array, ""], *, size: int, max_depth: int, policy: EvictionPolicy = LRU
) -> tuple[RadixState, Loan]:
    """Lease the `count` blocks that would be evicted first, at most `size`, until `settle`: phase one of a demotion.

    A block whose copy is under way is never freed: it and its ancestors are leased.
    """
    check_count(count)
    count = jnp.clip(jnp.minimum(count, radix.read().num_evictable), 0, size)
    block = smallest(eviction_key(radix, policy, max_depth), count, size)
    radix = _along_paths(_count_loan(radix, block), block, 1)
    named = block > 0
    return radix, Loan(
        block, jnp.where(named, radix.columns[GENERATION, block], 0), jnp.where(named, radix.columns[LENT, block], 0), count
    )


def settle(radix: RadixState, loan: Loan, stored: Bool[Array, " size"]) -> tuple[RadixState, Int32[Array, ""]]:
    """End a loan: phase two. Blocks that were `stored` elsewhere and that nobody leases or extended meanwhile are freed.

    Returns:
        The tree, and `OK` or `STALE` (the loan was settled before, or is of another tree; nothing changed).
    """
    check_handles(loan.block_ids, loan.generations)
    check_array("stored", stored, loan.block_ids.shape, "bool", "the loan")
    named, (inside, block) = loan.block_ids > 0, _inside(radix, loan.block_ids)
    lent = (radix.columns[LENT, block] == loan.lent) & (loan.lent % 2 == 1) & ~_repeats(named, block)
    fresh = inside & (radix.columns[GENERATION, block] == loan.generations) & lent
    status = jnp.where(jnp.all(fresh | ~named), OK, STALE).astype(jnp.int32)
    block = jnp.where(status == OK, block, 0)
    radix = _along_paths(_count_loan(radix, block), block, -1)
    may_go = named & stored & (status == OK) & (radix.columns[LEASES, block] == 0)
    return remove(radix, _childless(radix, may_go, block), block), status


def _count_loan(radix: RadixState, block: Int32[Array, " ids"]) -> RadixState:
    """Count that blocks are lent or taken back."""

    def one(j: Array, columns: Array) -> Array:
        at = peek(block, j)
        return poke(columns, peek(columns, LENT, at) + (at > 0).astype(jnp.int32), LENT, at)

    return radix._replace(columns=lax.fori_loop(0, block.shape[0], one, radix.columns))


def _along_paths(radix: RadixState, block: Int32[Array, " ids"], by: int) -> RadixState:
    """Add leases to blocks and all they follow."""

    def walk(j: Array, radix: RadixState) -> RadixState:
        return lax.while_loop(lambda c: c[1] > 0, hop, (radix, peek(block, j)))[0]

    def hop(carry: tuple[RadixState, Array]) -> tuple[RadixState, Array]:
        radix, at = carry
        change = pool.lease_more if by > 0 else pool.lease_less
        parent = settled(lambda: peek(radix.columns, PARENT, at), at)
        return change(radix, at, abs(by)), parent

    return lax.fori_loop(0, block.shape[0], walk, radix)


def _childless(radix: RadixState, may_go: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Of blocks that may go, those all of whose children go too."""
    nodes = radix.num_nodes
    parent = jnp.where(radix.is_indexed, radix.parent, nodes)
    children = jnp.zeros(nodes, jnp.int32).at[parent].add(1, mode="drop")

    def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        gone, _ = carry
        going = jnp.zeros(nodes, jnp.int32).at[jnp.where(gone, radix.columns[PARENT, block], nodes)].add(1, mode="drop")
        left = gone & (children[block] == going[block])
        return left, jnp.any(left != gone)

    return lax.while_loop(lambda c: c[1], again, (may_go, jnp.any(may_go)))[0]
