"""Filing full blocks in the index, or finding that equal ones are filed already.

Works on a flat list of blocks, those of one sequence in a row, without a loop. A block is either *known* (an equal prefix is in the
index), a *twin* (of a block earlier in the list) or *new*. It *fails* when its bucket is full or holds another prefix
under the same tag; then nothing after it in its run is filed either, because a child without a findable parent
could never be found. Knows no sequences: callers move their leases to the canonical blocks.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar, cast

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.native import each, is_kernel, loop, put, unless
from octavo_kvcache._src import index, keys, pool
from octavo_kvcache._src.change import Change
from octavo_kvcache._src.scan import first_true
from octavo_kvcache._src.state import WAYS, RadixState, Side

T = TypeVar("T")

MOST_FILED: Final = 256
"""Blocks in a list that is filed by a kernel: it compares every block with every other, one after another."""


class Work(NamedTuple):
    """The flat list.

    Attributes:
        live: The entry exists.
        first: List index where the entry's run begins.
        depth: Blocks before it in its prefix.
        base: Block before its run; 0 where the run begins a prefix.
        own: The block that holds its KV, leased once and private.
        tokens, namespace, key: Of the block.
        sequence: Who filed it, for events; −1 nobody.
    """

    live: Bool[Array, " work"]
    first: Int32[Array, " work"]
    depth: Int32[Array, " work"]
    base: Int32[Array, " work"]
    own: Int32[Array, " work"]
    tokens: Int32[Array, "work block_size"]
    namespace: UInt32[Array, "work 2"]
    key: UInt32[Array, "work 2"]
    sequence: Int32[Array, " work"]


class Verdict(NamedTuple):
    """What becomes of each entry. `block`: the canonical block; `parent`: the canonical block before it."""

    done: Bool[Array, " work"]
    new: Bool[Array, " work"]
    known: Bool[Array, " work"]
    block: Int32[Array, " work"]
    parent: Int32[Array, " work"]
    bucket: Int32[Array, " work"]
    tag: UInt32[Array, " work"]
    way: Int32[Array, " work"]

    def moved(self, work: Work) -> Bool[Array, " work"]:
        """Entries whose canonical block is not their own."""
        return self.done & (self.block != work.own)


def run_keys(
    first: Int32[Array, " work"], before: UInt32[Array, "work 2"], tokens: Int32[Array, "work block_size"]
) -> UInt32[Array, "work 2"]:
    """Keys of runs of blocks; `before` is the key before each run."""
    return keys.chain(first, before, keys.fingerprint(tokens))


def judge(radix: RadixState, work: Work) -> Verdict:
    """Say what each entry is; changes nothing."""
    j = jnp.arange(work.own.shape[0], dtype=jnp.int32)
    bucket, tag = keys.address(work.key, radix.index_tag.shape[0])
    begins = j == work.first
    found = index.probe(radix, bucket, tag, work.tokens, work.namespace)
    before = jnp.where(begins, work.base, jnp.roll(found.block, 1))
    same = found.same & (radix.parent[found.block] == before) & _is_own(radix, work, found.block)
    known = _settled(~_from_first(work, ~(work.live & same)))
    fresh = work.live & ~known

    # The first fresh entry under the same bucket and tag is the one that may be filed.
    alike = each(j.shape[0], lambda i: first_true((bucket == bucket[i]) & (tag == tag[i]) & fresh))
    leader = _settled(jnp.where(fresh, jnp.minimum(alike, j), j))
    block = _settled(jnp.where(known, found.block, work.own[leader]))
    parent = jnp.where(begins, work.base, jnp.roll(block, 1))
    equal = (
        _is_own(radix, work, work.own[leader])
        & index.same_rows(work.tokens, leader, work.tokens)
        & index.same_rows(work.namespace, leader, work.namespace)
    )
    fits, way = _settled(index.room(radix, bucket, fresh & (leader == j) & (found.block == 0)))
    alien = begins & (work.base > 0) & ~_is_own(radix, work, work.base)
    failed = _settled(fresh & (alien | jnp.where(leader == j, ~fits, ~equal | (parent != parent[leader]))))
    failed = _spread(work, failed, leader)
    done = work.live & ~failed
    return Verdict(done, done & fresh & (leader == j), known, block, parent, bucket, tag, way)


def _settled(value: T) -> T:
    """The same value, computed once: XLA would compute it again in every loop over pairs of entries that uses it."""
    return cast(T, lax.optimization_barrier(value))


def _is_own(radix: RadixState, work: Work, block: Int32[Array, " work"]) -> Bool[Array, " work"]:
    """Whether blocks belong to the tenants of the entries: a path has one owner, or what its owner may lose would lead to others' blocks."""
    if radix.num_tenants == 1:
        return jnp.ones_like(work.live)
    return radix.tenant[block] == radix.tenant[work.own]


def _from_first(work: Work, bad: Bool[Array, " work"]) -> Bool[Array, " work"]:
    """Whether something bad came at or before each entry in its own run."""
    j = jnp.arange(bad.shape[0], dtype=jnp.int32)
    if is_kernel():

        def look(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            came = bad[i] | (carry[1] & (work.first[i] != i))
            return put(carry[0], (i,), came), came

        return loop(j.shape[0], look, (bad, jnp.bool_(False)))[0]
    return jnp.any(bad & (j >= work.first[:, None]) & (j <= j[:, None]), axis=1)


def _spread(work: Work, failed: Bool[Array, " work"], leader: Int32[Array, " work"]) -> Bool[Array, " work"]:
    """Fail what comes after a failure in its run and what relies on a failed leader, until nothing changes."""

    def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        failed, _ = carry
        more = _from_first(work, failed | failed[leader]) & work.live
        return more, jnp.any(more != failed)

    return lax.while_loop(lambda c: c[1], again, (failed, jnp.any(failed)))[0]


def filed(radix: RadixState, work: Work, verdict: Verdict) -> tuple[Int32[Array, " counters"], dict[str, list[Change]]]:
    """What carrying a verdict out changes: file what is new; free the own block of what moved, whose one lease goes to the canonical block."""
    own, new, moved, counters = work.own, verdict.new, verdict.moved(work), radix.read()
    woken = verdict.known & moved & (radix.leases[verdict.block] == 0)
    woken = unless(~jnp.any(woken), lambda: woken, lambda: woken & _is_first(verdict))
    at, num_free = pool.places(counters.num_free, moved)
    event, num_stored = pool.entries(
        radix.stored.shape[0], counters.num_stored, new, 0, own, radix.generation[own], work.sequence, work.depth
    )
    after = radix.write(
        num_free=num_free,
        num_stored=num_stored,
        evictable=counters.evictable - pool.by_tenant(radix, woken, verdict.block),
        used=counters.used - pool.by_tenant(radix, moved, own),
    )
    of_new = {
        "tokens": work.tokens,
        "first": keys.first_mark(work.tokens[:, 0], work.namespace),
        "parent": verdict.parent,
        "depth": work.depth,
        "stamp": jnp.zeros_like(own),
        "namespace": work.namespace,
        "slot": verdict.bucket * WAYS + verdict.way,
    }
    filing = {
        **{name: [Change((own,), values, new)] for name, values in of_new.items()},
        "index_tag": [Change((verdict.bucket, verdict.way), verdict.tag, new)],
        "index_block": [Change((verdict.bucket, verdict.way), own, new)],
        "leases": [
            Change((own,), -radix.leases[own], moved, is_gain=True),
            Change((verdict.block,), jnp.ones_like(own), moved, is_gain=True),
        ],
        "free": [Change((at,), own, moved)],
        "stored": [event],
    }
    return after.counters, filing


def _is_first(verdict: Verdict) -> Bool[Array, " work"]:
    """Whether no earlier known entry has the same block, so that two sequences meeting an idle block count it once."""
    block, known = verdict.block, verdict.known
    return each(block.shape[0], lambda i: first_true((block == block[i]) & known) == i)


def adopt(
    radix: RadixState, number: int, work: Work, verdict: Verdict, own: Int32[Array, " work"]
) -> tuple[RadixState, Int32[Array, " work"]]:
    """Give nodes the blocks that entries hold in a side group, or entries the blocks that nodes have already.

    Args:
        radix: The tree, with the verdict carried out.
        number: Which side group.
        work: The list.
        verdict: Of it.
        own: Block of each entry in that group, leased once; 0 where it was given up.

    Returns:
        The tree, and the block each entry holds now.
    """
    side, node, has = radix.sides[number], verdict.block, verdict.done & (own > 0)
    vacant = has & (side.node_block[node] == 0)
    node_block = side.node_block.at[jnp.where(vacant, node, side.node_block.shape[0])].set(own, mode="drop")
    kept = jnp.where(has, node_block[node], own)
    installed, lost, blocks = vacant & (kept == own), has & (kept != own), side.owner.shape[0]
    refcount = side.refcount.at[jnp.where(lost, own, blocks)].set(0, mode="drop")
    side = side._replace(
        node_block=node_block,
        owner=side.owner.at[jnp.where(installed, own, blocks)].set(node, mode="drop"),
        refcount=refcount.at[jnp.where(lost, kept, blocks)].add(1, mode="drop"),
    )
    side = count_idle(pool.give_back_side(side, lost, own))
    stored, num_stored = pool.log(
        radix.stored, radix.read().num_stored, installed, 1 + number, own, side.generation[own], work.sequence, work.depth
    )
    sides = (*radix.sides[:number], side, *radix.sides[number + 1 :])
    return radix._replace(sides=sides, stored=stored).write(num_stored=num_stored), kept


def count_idle(side: Side) -> Side:
    """Count the blocks with an owner that nobody leases."""
    idle = jnp.sum((side.owner > 0) & (side.refcount == 0), dtype=jnp.int32)
    return side._replace(counts=side.counts.at[1].set(idle))
