"""Commit: make the full blocks of sequences findable, or point the sequences at the equal blocks that are findable already."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from octavo_kvcache._src.insert import Work, adopt, file, note
from octavo_kvcache._src.loops import peek, poke
from octavo_kvcache._src.scan import prefix_sum
from octavo_kvcache._src.state import CacheState, Layout, Sequences


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
    end = prefix_sum(pending)
    goal = sequences.committed + jnp.clip(max_commits - (end - pending), 0, pending)
    work = _list(layout, sequences, jnp.where(end[-1] > 0, goal, 0), max_commits)
    blocks = tokens.reshape(-1, cache.radix.tokens.shape[1])
    source = work.row * sequences.block_table.shape[2] + work.column
    radix, chain = note(cache.radix, work, blocks, source, sequences.chain[work.row], sequences.namespace[work.row])
    radix, block = file(radix, work, chain)
    cache = CacheState(radix, _point(layout, sequences, work, chain, block))
    for number, table in enumerate(layout.side):
        radix, sequences = cache
        own = jnp.where(block > 0, sequences.block_table[table, work.row, work.column], 0)
        radix, kept = adopt(radix, number, work, block, own)
        to = jnp.where(kept != own, work.row, sequences.held.shape[0])
        block_table = sequences.block_table.at[table, to, work.column].set(kept, mode="drop")
        cache = CacheState(radix, sequences._replace(block_table=block_table))
    return cache


def _list(layout: Layout, sequences: Sequences, goal: Int32[Array, " sequences"], size: int) -> Work:
    """The blocks of each sequence up to its goal."""
    path = layout.whole[0]

    def sequence(row: Array, work: Work) -> Work:
        start = peek(sequences.committed, row)

        def block(column: Array, work: Work) -> Work:
            before = jnp.where(column > 0, peek(sequences.block_table, path, row, jnp.maximum(column - 1, 0)), 0)
            values = (peek(sequences.block_table, path, row, column), jnp.where(column == start, before, -1), row, column)
            own, base, rows, columns = (poke(part, value, work.length) for part, value in zip(work[:4], values, strict=True))
            return Work(own, base, rows, columns, work.length + 1)

        return lax.fori_loop(start, peek(goal, row), block, work)

    none = jnp.zeros(size, jnp.int32)
    rows = jnp.where(jnp.any(goal > 0), goal.shape[0], 0)
    return lax.fori_loop(0, rows, sequence, Work(none, none, none, none, jnp.int32(0)))


def _point(
    layout: Layout, sequences: Sequences, work: Work, keys: UInt32[Array, "work 2"], block: Int32[Array, " work"]
) -> Sequences:
    """Point sequences at canonical blocks and move their marks past what was committed."""

    def one(n: Array, sequences: Sequences) -> Sequences:
        row, column, canonical = peek(work.row, n), peek(work.column, n), peek(block, n)
        done, table = canonical > 0, sequences.block_table
        for whole in layout.whole:
            table = poke(table, jnp.where(done, canonical, peek(work.own, n)), whole, row, column)
        chain = sequences.chain
        for lane in (0, 1):
            chain = poke(chain, jnp.where(done, peek(keys, n, lane), peek(chain, row, lane)), row, lane)
        return sequences._replace(
            block_table=table,
            committed=poke(sequences.committed, peek(sequences.committed, row) + done.astype(jnp.int32), row),
            chain=chain,
            sealed=poke(sequences.sealed, peek(sequences.sealed, row) | ~done, row),
        )

    return lax.fori_loop(0, work.length, one, sequences)
