"""Leases that belong to no sequence: allocation by hand, pins, and loans of blocks that are being copied to another tier.

A caller names blocks by handles, `(id, generation)`, as paths: the indexed blocks of a prefix from its first on, each the parent of
the next, then private ones. A lease on a block without its ancestors would let the tree lose the way to it, so anything but a path is
refused, as is a stale handle; a refused call changes nothing.

Size: leasing, releasing and lending check paths alike.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.native import each
from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_kvcache._src import keys, pool
from octavo_kvcache._src.change import Change
from octavo_kvcache._src.checks import check_array, check_count, check_handles, check_prompt
from octavo_kvcache._src.evict import eviction_key, remove, smallest
from octavo_kvcache._src.insert import MOST_FILED, Verdict, Work, filed, judge, run_keys
from octavo_kvcache._src.match import Match
from octavo_kvcache._src.policy import EvictionPolicy, LeastRecentlyUsed
from octavo_kvcache._src.release import Ending, end_leases, ending, set_back
from octavo_kvcache._src.scan import as_kernel, first_true
from octavo_kvcache._src.state import HOLD, WAYS, RadixState

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
    counters, j = radix.read(), jnp.arange(size, dtype=jnp.int32)
    can = (count >= 0) & (count <= jnp.minimum(counters.num_free, size))
    count = jnp.where(can, count, 0)
    block = jnp.where(j < count, radix.free[jnp.maximum(counters.num_free - 1 - j, 0)], 0)
    at = jnp.where(j < count, block, radix.free.shape[0])
    owner = jnp.clip(jnp.asarray(tenant, jnp.int32), 0, radix.num_tenants - 1)
    radix = radix._replace(
        leases=radix.leases.at[at].set(_LEASE, mode="drop"),
        generation=radix.generation.at[at].add(1, mode="drop"),
        tenant=radix.tenant.at[at].set(owner, mode="drop"),
    ).write(num_free=counters.num_free - count, used=counters.used.at[owner].add(count))
    return radix, block, jnp.where(block > 0, radix.generation[block], 0), jnp.where(can, OK, OUT_OF_BLOCKS)


def lease(
    radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"]
) -> tuple[RadixState, Int32[Array, ""]]:
    """Lease a cached path once more, as `match` answers it; 0 pads at its end. A pin is a lease that nobody releases soon.

    Returns:
        The tree, and `OK`, `STALE` or `NOT_A_PATH`.
    """
    check_handles(block_ids, generations)
    counters, leases, status = as_kernel(_leased, block_ids.shape[0])(radix, block_ids, generations)
    return radix.changed({"leases": [leases]}, counters=counters), status


def _leased(
    radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"]
) -> tuple[Int32[Array, " counters"], Change, Int32[Array, ""]]:
    named = block_ids != 0
    inside, at = _inside(radix, block_ids)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), at[:-1]])
    fresh = inside & (radix.generation[at] == generations) & (radix.slot[at] >= 0)
    status = _status(jnp.all(fresh | ~named), jnp.all((radix.parent[at] == before) | ~named) & _pads_last(named))
    taken = named & (status == OK)
    woken = taken & (radix.leases[at] == 0)
    leases = Change((at,), jnp.where(_is_end(taken), _LEASE, 1), taken, is_gain=True)
    evictable = radix.read().evictable - pool.by_tenant(radix, woken, at)
    return radix.write(evictable=evictable).counters, leases, status


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
    ends, tenant, status = as_kernel(_released, block_ids.shape[0])(radix, block_ids, generations)
    return end_leases(set_back(radix._replace(counters=ends.counters), policy), ends, tenant, policy), status


def _released(
    radix: RadixState, block_ids: Int32[Array, " ids"], generations: Int32[Array, " ids"]
) -> tuple[Ending, Int32[Array, ""], Int32[Array, ""]]:
    """What the end of a lease changes, whose path it is, and the status."""
    named = block_ids != 0
    inside, at = _inside(radix, block_ids)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), at[:-1]])
    indexed = radix.slot[at] >= 0
    ends = ~indexed | _is_end(indexed)
    held = inside & (radix.generation[at] == generations) & (~ends | (radix.leases[at] >= HOLD))
    # Indexed blocks follow one another from the first, so they differ; private ones come last and are looked at pair by pair.
    chained = jnp.where(indexed, radix.parent[at] == before, True) & jnp.all(indexed[1:] <= indexed[:-1])
    private = named & inside & ~indexed
    twice = lax.cond(jnp.any(private), lambda: jnp.any(_repeats(private, at)), lambda: jnp.bool_(False))
    status = _status(jnp.all(held | ~named), jnp.all(chained | ~named) & _pads_last(named) & ~twice)
    ended = named & (status == OK)
    radix = radix.write(clock=radix.read().clock + jnp.any(ended))
    return ending(radix, ended, at, jnp.where(ends, _LEASE, 1)), radix.tenant[at[0]], status


def _is_end(on_path: Bool[Array, " ids"]) -> Bool[Array, " ids"]:
    """Which of the entries on a path is the last."""
    return on_path & ~jnp.append(on_path[1:], False)


def _repeats(counted: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Which of the `counted` entries name a block that an earlier one names."""
    found = each(block.shape[0], lambda i: first_true((block == block[i]) & counted) < i)
    return counted & found


def _inside(radix: RadixState, block_ids: Int32[Array, "*ids"]) -> tuple[Bool[Array, "*ids"], Int32[Array, "*ids"]]:
    """Which ids are of the pool, and the ids with the others replaced by 0."""
    inside = (block_ids > 0) & (block_ids < radix.leases.shape[0])
    return inside, jnp.where(inside, block_ids, 0)


def _pads_last(named: Bool[Array, " ids"]) -> Bool[Array, ""]:
    return jnp.all(named[1:] <= named[:-1])


def _status(fresh: Bool[Array, ""], path: Bool[Array, ""]) -> Int32[Array, ""]:
    return jnp.where(fresh, jnp.where(path, OK, NOT_A_PATH), STALE).astype(jnp.int32)


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
    size = block_ids.shape[0]
    check_prompt(radix, tokens, namespace)
    check_array("tokens", tokens, (size * radix.tokens.shape[1],), "int32", f"{size} blocks")
    insertion = as_kernel(_inserted, size, most=MOST_FILED)
    counters, changes, block, generation, status = insertion(radix, prefix, tokens, block_ids, generations, namespace)
    return radix.changed(changes, counters=counters), block, generation, status


def _inserted(
    radix: RadixState,
    prefix: Match,
    tokens: Int32[Array, " new_len"],
    block_ids: Int32[Array, " new_blocks"],
    generations: Int32[Array, " new_blocks"],
    namespace: UInt32[Array, " 2"],
) -> tuple[
    Int32[Array, " counters"], dict[str, list[Change]], Int32[Array, " new_blocks"], Int32[Array, " new_blocks"], Int32[Array, ""]
]:
    size, named = block_ids.shape[0], block_ids != 0
    j = jnp.arange(size, dtype=jnp.int32)
    inside, at = _inside(radix, block_ids)
    last = jnp.maximum(prefix.num_blocks - 1, 0)
    base_inside, base = _inside(radix, jnp.where(prefix.num_blocks > 0, prefix.block_ids[last], 0))
    base_fresh = base_inside & (radix.generation[base] == prefix.generations[last]) & (radix.leases[base] >= HOLD)
    base_fresh |= prefix.num_blocks == 0
    fresh = inside & (radix.generation[at] == generations) & (radix.leases[at] >= HOLD)
    private = (radix.slot[at] < 0) & (radix.leases[at] == _LEASE) & ~_repeats(named, at)
    follows = _follows(radix, prefix, base, namespace)
    status = _status(jnp.all(fresh | ~named) & base_fresh, jnp.all(private | ~named) & _pads_last(named) & follows)
    live, blocks = named & (status == OK), tokens.reshape(size, -1)
    work = Work(
        live=live,
        first=jnp.where(live, 0, j),
        depth=prefix.num_blocks + j,
        base=jnp.broadcast_to(base, j.shape),
        own=jnp.where(live, at, 0),
        tokens=blocks,
        namespace=jnp.broadcast_to(namespace, (size, 2)),
        key=run_keys(jnp.where(live, 0, j), jnp.broadcast_to(prefix.chain, (size, 2)), blocks),
        sequence=jnp.full_like(j, -1),
    )
    verdict = judge(radix, work)
    counters, changes = filed(radix, work, verdict)
    changes["leases"] += _end_moved(verdict, base)
    block = jnp.where(verdict.done, verdict.block, block_ids)
    generation = jnp.where(verdict.done, radix.generation[verdict.block], generations)
    all_filed = jnp.all(verdict.done | ~live)
    return counters, changes, block, generation, jnp.where((status == OK) & ~all_filed, OUT_OF_BLOCKS, status)


def _follows(radix: RadixState, prefix: Match, base: Int32[Array, ""], namespace: UInt32[Array, " 2"]) -> Bool[Array, ""]:
    """Whether a prefix ends where and as its last block says: indexed, of that depth, namespace and key."""
    bucket, tag = keys.address(prefix.chain[None], radix.index_tag.shape[0])
    filed = (radix.slot[base] // WAYS == bucket[0]) & (radix.index_tag.reshape(-1)[radix.slot[base]] == tag[0])
    placed = (radix.slot[base] >= 0) & (radix.depth[base] == prefix.num_blocks - 1)
    whole = placed & filed & jnp.all(radix.namespace[base] == namespace)
    return jnp.where(prefix.num_blocks == 0, jnp.all(prefix.chain == keys.root_key(namespace)), whole)


def _end_moved(verdict: Verdict, base: Int32[Array, ""]) -> list[Change]:
    """What makes the leases on a prefix and on the blocks filed after it one, which ends at the last of them."""
    done, by = verdict.done, jnp.full_like(verdict.block, HOLD)
    starts = jnp.arange(done.shape[0]) == 0
    return [
        Change((verdict.block,), -by, verdict.new, is_gain=True),
        Change((jnp.broadcast_to(base, done.shape),), -by, starts & jnp.any(done) & (base > 0), is_gain=True),
        Change((verdict.block,), by, _is_end(done), is_gain=True),
    ]


def surplus(radix: RadixState, *, high: float = 0.88, low: float = 0.8) -> Int32[Array, ""]:
    """Blocks to demote or evict: none while at most `high` of the pool is in use, then as many as bring it down to `low`."""
    total = radix.free.shape[0] - 1
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
    return radix, Loan(block, jnp.where(named, radix.generation[block], 0), jnp.where(named, radix.lent[block], 0), count)


def settle(radix: RadixState, loan: Loan, stored: Bool[Array, " size"]) -> tuple[RadixState, Int32[Array, ""]]:
    """End a loan: phase two. Blocks that were `stored` elsewhere and that nobody leases or extended meanwhile are freed.

    Returns:
        The tree, and `OK` or `STALE` (the loan was settled before, or is of another tree; nothing changed).
    """
    check_handles(loan.block_ids, loan.generations)
    check_array("stored", stored, loan.block_ids.shape, "bool", "the loan")
    named, (inside, block) = loan.block_ids > 0, _inside(radix, loan.block_ids)
    lent = (radix.lent[block] == loan.lent) & (loan.lent % 2 == 1) & ~_repeats(named, block)
    fresh = inside & (radix.generation[block] == loan.generations) & lent
    status = jnp.where(jnp.all(fresh | ~named), OK, STALE).astype(jnp.int32)
    block = jnp.where(status == OK, block, 0)
    radix = _along_paths(_count_loan(radix, block), block, -1)
    may_go = named & stored & (status == OK) & (radix.leases[block] == 0)
    return remove(radix, _childless(radix, may_go, block), block), status


def _count_loan(radix: RadixState, block: Int32[Array, " ids"]) -> RadixState:
    """Count that blocks are lent or taken back."""
    at = jnp.where(block > 0, block, radix.lent.shape[0])
    return radix._replace(lent=radix.lent.at[at].add(1, mode="drop"))


def _along_paths(radix: RadixState, block: Int32[Array, " ids"], by: int) -> RadixState:
    """Add leases to blocks and all they follow, one hop of all paths at a time; what is idle is counted anew."""
    nodes = radix.leases.shape[0]

    def hop(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        leases, block = carry
        return leases.at[jnp.where(block > 0, block, nodes)].add(by, mode="drop"), radix.parent[block]

    leases, _ = lax.while_loop(lambda c: jnp.any(c[1] > 0), hop, (radix.leases, block))
    radix = radix._replace(leases=leases)
    idle = (leases == 0) & radix.is_indexed
    return radix.write(evictable=pool.by_tenant(radix, idle, jnp.arange(nodes, dtype=jnp.int32)))


def _childless(radix: RadixState, may_go: Bool[Array, " ids"], block: Int32[Array, " ids"]) -> Bool[Array, " ids"]:
    """Of blocks that may go, those all of whose children go too."""
    nodes = radix.leases.shape[0]
    parent = jnp.where(radix.is_indexed, radix.parent, nodes)
    children = jnp.zeros(nodes, jnp.int32).at[parent].add(1, mode="drop")

    def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        gone, _ = carry
        going = jnp.zeros(nodes, jnp.int32).at[jnp.where(gone, radix.parent[block], nodes)].add(1, mode="drop")
        left = gone & (children[block] == going[block])
        return left, jnp.any(left != gone)

    return lax.while_loop(lambda c: c[1], again, (may_go, jnp.any(may_go)))[0]
