"""Commit: file the full blocks of sequences in the index, or point the sequence at the equal block that is filed already.

Works on a flat list of at most `max_commits` blocks, those of one sequence in a row, without a loop. A block is either *known*
(an equal prefix is in the index), a *twin* (of a block earlier in the list) or *new*. It *fails* when its bucket is
full or holds another prefix under the same tag; then its sequence is sealed: the block and all after it stay
private, because a child without a findable parent could never be found.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_kvcache._src import index, keys, pool
from octavo_kvcache._src.scan import prefix_sum, rank_in
from octavo_kvcache._src.state import CacheState


class _Work(NamedTuple):
    """The flat list. `row`, `column`: sequence and place in its table; `first`: list index where the sequence's run begins."""

    live: Bool[Array, " work"]
    row: Int32[Array, " work"]
    column: Int32[Array, " work"]
    first: Int32[Array, " work"]
    own: Int32[Array, " work"]
    tokens: Int32[Array, "work block_size"]
    namespace: UInt32[Array, "work 2"]
    key: UInt32[Array, "work 2"]
    bucket: Int32[Array, " work"]
    tag: UInt32[Array, " work"]


class _Verdict(NamedTuple):
    """What becomes of each entry. `block`: the canonical block; `parent`: the canonical block before it."""

    done: Bool[Array, " work"]
    new: Bool[Array, " work"]
    known: Bool[Array, " work"]
    block: Int32[Array, " work"]
    parent: Int32[Array, " work"]
    way: Int32[Array, " work"]


def commit(
    cache: CacheState, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"], max_commits: int
) -> CacheState:
    """See `BlockCache.commit`."""
    full = jnp.minimum(upto // cache.tokens.shape[1], cache.held)
    pending = jnp.where(cache.sealed, 0, jnp.maximum(full - cache.committed, 0))

    def file(cache: CacheState) -> CacheState:
        work = _gather(cache, tokens, pending, max_commits)
        return _apply(cache, work, _judge(cache, work))

    return lax.cond(jnp.any(pending > 0), file, lambda c: c, cache)


def _gather(
    cache: CacheState, tokens: Int32[Array, "sequences max_len"], pending: Int32[Array, " sequences"], max_commits: int
) -> _Work:
    sequences, max_blocks = cache.block_table.shape[1:]
    j = jnp.arange(max_commits, dtype=jnp.int32)
    end = prefix_sum(pending)
    live = j < end[-1]
    row = jnp.minimum(rank_in(end, j), sequences - 1)
    first = jnp.where(live, end[row] - pending[row], j)
    column = jnp.where(live, cache.committed[row] + j - first, 0)
    blocks = tokens.reshape(sequences * max_blocks, -1)[row * max_blocks + column]
    key = keys.chain(first, cache.chain[row], keys.fingerprint(blocks))
    bucket, tag = keys.address(key, cache.index_tag.shape[0])
    own = jnp.where(live, cache.block_table[0, row, column], 0)
    return _Work(live, row, column, first, own, blocks, cache.sequence_namespace[row], key, bucket, tag)


def _judge(cache: CacheState, work: _Work) -> _Verdict:
    j = jnp.arange(work.row.shape[0], dtype=jnp.int32)
    begins = j == work.first
    base = jnp.where(work.column > 0, cache.block_table[0, work.row, jnp.maximum(work.column - 1, 0)], 0)
    found = index.probe(cache, work.bucket, work.tag, work.tokens, work.namespace)
    before = jnp.where(begins, base, jnp.roll(found.block, 1))
    known = ~_from_first(work, ~(work.live & found.same & (cache.parent[found.block] == before)))
    fresh = work.live & ~known

    # The first fresh entry under the same bucket and tag is the one that may be filed.
    alike = (work.bucket[:, None] == work.bucket) & (work.tag[:, None] == work.tag) & fresh
    leader = jnp.where(fresh, jnp.argmax(alike, axis=1), j).astype(jnp.int32)
    block = jnp.where(known, found.block, work.own[leader])
    parent = jnp.where(begins, base, jnp.roll(block, 1))
    equal = jnp.all(work.tokens == work.tokens[leader], axis=1) & jnp.all(work.namespace == work.namespace[leader], axis=1)
    fits, way = index.room(cache, work.bucket, fresh & (leader == j) & (found.block == 0))
    failed = fresh & jnp.where(leader == j, ~fits, ~equal | (parent != parent[leader]))
    failed = _spread(work, failed, leader)
    done = work.live & ~failed
    return _Verdict(done, done & fresh & (leader == j), known, block, parent, way)


def _from_first(work: _Work, bad: Bool[Array, " work"]) -> Bool[Array, " work"]:
    """Whether something bad came at or before each entry in its own run."""
    j = jnp.arange(bad.shape[0], dtype=jnp.int32)
    return jnp.any(bad & (j >= work.first[:, None]) & (j <= j[:, None]), axis=1)


def _spread(work: _Work, failed: Bool[Array, " work"], leader: Int32[Array, " work"]) -> Bool[Array, " work"]:
    """Fail what comes after a failure in its run and what relies on a failed leader, until nothing changes."""

    def again(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        failed, _ = carry
        more = _from_first(work, failed | failed[leader]) & work.live
        return more, jnp.any(more != failed)

    return lax.while_loop(lambda c: c[1], again, (failed, jnp.any(failed)))[0]


def _apply(cache: CacheState, work: _Work, verdict: _Verdict) -> CacheState:
    sequences, nodes = cache.held.shape[0], cache.refcount.shape[0]
    moved = verdict.done & (verdict.block != work.own)
    idle = jnp.sum(verdict.known & moved & (cache.refcount[verdict.block] == 0) & _is_first(verdict), dtype=jnp.int32)
    row = jnp.where(moved, work.row, sequences)
    refcount = cache.refcount.at[jnp.where(moved, work.own, nodes)].set(0, mode="drop")
    cache = cache._replace(
        refcount=refcount.at[jnp.where(moved, verdict.block, nodes)].add(1, mode="drop"),
        block_table=cache.block_table.at[:, row, work.column].set(verdict.block, mode="drop"),
    )
    cache = pool.give_back(cache.write(num_evictable=cache.read().num_evictable - idle), moved, work.own)
    return _advance(_file(cache, work, verdict), work, verdict)


def _is_first(verdict: _Verdict) -> Bool[Array, " work"]:
    """Whether no earlier known entry has the same block, so that two sequences meeting an idle block count it once."""
    same = (verdict.block[:, None] == verdict.block) & verdict.known
    return jnp.argmax(same, axis=1) == jnp.arange(verdict.block.shape[0])


def _file(cache: CacheState, work: _Work, verdict: _Verdict) -> CacheState:
    at = jnp.where(verdict.new, work.own, cache.refcount.shape[0])
    generation = cache.generation[work.own]
    stored, num_stored = pool.log(
        cache.stored, cache.read().num_stored, verdict.new, work.own, generation, cache.block_table.shape[0]
    )
    cache = cache._replace(
        tokens=cache.tokens.at[at].set(work.tokens, mode="drop"),
        parent=cache.parent.at[at].set(verdict.parent, mode="drop"),
        depth=cache.depth.at[at].set(work.column, mode="drop"),
        namespace=cache.namespace.at[at].set(work.namespace, mode="drop"),
        stored=stored,
    )
    return index.enter(cache.write(num_stored=num_stored), verdict.new, work.own, work.bucket, verdict.way, work.tag)


def _advance(cache: CacheState, work: _Work, verdict: _Verdict) -> CacheState:
    """Move the sequences' marks past what was committed."""
    sequences = cache.held.shape[0]
    row = jnp.where(work.live, work.row, sequences)
    count = jnp.zeros_like(cache.held).at[row].add(verdict.done.astype(jnp.int32), mode="drop")
    last = jnp.where(verdict.done & (work.column == cache.committed[work.row] + count[work.row] - 1), work.row, sequences)
    return cache._replace(
        committed=cache.committed + count,
        chain=cache.chain.at[last].set(work.key, mode="drop"),
        sealed=cache.sealed.at[jnp.where(work.live & ~verdict.done, work.row, sequences)].set(True, mode="drop"),
    )
