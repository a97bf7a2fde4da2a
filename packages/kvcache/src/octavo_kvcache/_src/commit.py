"""Commit: make the full blocks of sequences findable, or point the sequences at the equal blocks that are findable already."""

from __future__ import annotations

import functools
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from octavo_kvcache._src.change import Change
from octavo_kvcache._src.insert import MOST_FILED, Verdict, Work, adopt, filed, judge, run_keys
from octavo_kvcache._src.scan import as_kernel, prefix_sum, rank_in
from octavo_kvcache._src.state import CacheState, Layout, Sequences

NARROW: Final = 16
"""Blocks committed at a small part of the price of many."""


def commit(
    layout: Layout,
    cache: CacheState,
    tokens: Int32[Array, "sequences max_len"],
    upto: Int32[Array, " sequences"],
    max_commits: int,
) -> CacheState:
    """See `RadixCache.commit`."""
    sequences = cache.sequences
    full = jnp.minimum(upto // cache.radix.tokens.shape[1], sequences.held)
    pending = jnp.where(sequences.sealed, 0, jnp.maximum(full - sequences.committed, 0))

    def some(cache: CacheState, width: int) -> CacheState:
        work, row, verdict, counters, changes = _judged(layout, cache, tokens, pending, width)
        radix = cache.radix.changed(changes, counters=counters)
        cache = CacheState(radix, _point(layout, cache.sequences, work, verdict, row))
        for number, table in enumerate(layout.side):
            own = jnp.where(work.live, cache.sequences.block_table[table, row, work.depth], 0)
            radix, kept = adopt(cache.radix, number, work, verdict, own)
            to = jnp.where(kept != own, row, pending.shape[0])
            block_table = cache.sequences.block_table.at[table, to, work.depth].set(kept, mode="drop")
            cache = CacheState(radix, cache.sequences._replace(block_table=block_table))
        return cache

    # Work is as wide as the most there may be, and a step that only decodes ends few blocks. One `cond` after the other: of three
    # branches XLA keeps copies of the pool.
    count = jnp.sum(pending)
    if max_commits <= NARROW:
        return lax.cond(count > 0, functools.partial(some, width=max_commits), lambda c: c, cache)
    is_narrow = (count > 0) & (count <= NARROW)
    cache = lax.cond(is_narrow, functools.partial(some, width=NARROW), lambda c: c, cache)
    return lax.cond(count > NARROW, functools.partial(some, width=max_commits), lambda c: c, cache)


def _judged(
    layout: Layout,
    cache: CacheState,
    tokens: Int32[Array, "sequences max_len"],
    pending: Int32[Array, " sequences"],
    max_commits: int,
) -> tuple[Work, Int32[Array, " work"], Verdict, Int32[Array, " counters"], dict[str, list[Change]]]:
    """The blocks to commit, whose each is, what becomes of it, and what that changes in the tree."""

    def kernel(cache: CacheState, tokens: Array, pending: Array) -> Any:
        work, row = _gather(layout, cache, tokens, pending, max_commits)
        verdict = judge(cache.radix, work)
        return work, row, verdict, *filed(cache.radix, work, verdict)

    return as_kernel(kernel, max_commits, most=MOST_FILED)(cache, tokens, pending)


def _gather(
    layout: Layout,
    cache: CacheState,
    tokens: Int32[Array, "sequences max_len"],
    pending: Int32[Array, " sequences"],
    max_commits: int,
) -> tuple[Work, Int32[Array, " work"]]:
    """The list of blocks to commit, and whose each is."""
    sequences = cache.sequences
    rows, max_blocks = sequences.block_table.shape[1:]
    j = jnp.arange(max_commits, dtype=jnp.int32)
    end = prefix_sum(pending)
    live = j < end[-1]
    row = jnp.minimum(rank_in(end, j), rows - 1)
    first = jnp.where(live, end[row] - pending[row], j)
    column = jnp.where(live, sequences.committed[row] + j - first, 0)
    blocks = tokens.reshape(rows * max_blocks, -1)[row * max_blocks + column]
    path = sequences.block_table[layout.whole[0]]
    work = Work(
        live=live,
        first=first,
        depth=column,
        base=jnp.where(column > 0, path[row, jnp.maximum(column - 1, 0)], 0),
        own=jnp.where(live, path[row, column], 0),
        tokens=blocks,
        namespace=sequences.namespace[row],
        key=run_keys(first, sequences.chain[row], blocks),
        sequence=row,
    )
    return work, row


def _point(layout: Layout, sequences: Sequences, work: Work, verdict: Verdict, row: Int32[Array, " work"]) -> Sequences:
    """Point sequences at canonical blocks and move their marks past what was committed."""
    rows = sequences.held.shape[0]
    to, table = jnp.where(verdict.moved(work), row, rows), sequences.block_table
    for whole in layout.whole:
        table = table.at[whole, to, work.depth].set(verdict.block, mode="drop")
    live = jnp.where(work.live, row, rows)
    count = jnp.zeros_like(sequences.held).at[live].add(verdict.done.astype(jnp.int32), mode="drop")
    last = jnp.where(verdict.done & (work.depth == sequences.committed[row] + count[row] - 1), row, rows)
    return sequences._replace(
        block_table=table,
        committed=sequences.committed + count,
        chain=sequences.chain.at[last].set(work.key, mode="drop"),
        sealed=sequences.sealed.at[jnp.where(work.live & ~verdict.done, row, rows)].set(True, mode="drop"),
    )
