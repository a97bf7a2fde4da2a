"""A decision written out for a `StepPlan`: compact rows, flat tokens, slots. Decides nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.native import pick_in_turn, put, running_sum
from octavo_scheduler._src.policy import blocks_for
from octavo_scheduler._src.state import SchedulerState


class Decision(NamedTuple):
    """What a step does: new tokens and sampling of each sequence, who was preempted (−1 nobody) and lost how much KV."""

    query_len: Int32[Array, " sequences"]
    samples: Bool[Array, " sequences"]
    preempted: Int32[Array, ""]
    lost_len: Int32[Array, ""]


class Rows(NamedTuple):
    """The rows of a step; pads have sequence −1 and zeros."""

    sequence: Int32[Array, " rows"]
    computed_len: Int32[Array, " rows"]
    known_len: Int32[Array, " rows"]
    cached_len: Int32[Array, " rows"]
    query_len: Int32[Array, " rows"]
    sample_rows: Int32[Array, " rows"]
    query_start: Int32[Array, " rows_plus_one"]
    context_len: Int32[Array, " rows"]
    num_tokens: Int32[Array, ""]
    num_rows: Int32[Array, ""]
    num_single: Int32[Array, ""]


class Tokens(NamedTuple):
    """The flat tokens of a step, and the blocks they read."""

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    row: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, "groups tokens"]
    block_table: Int32[Array, "groups rows max_blocks"]


def compact_rows(state: SchedulerState, decision: Decision, num_rows: int) -> Rows:
    """Sequences with new tokens as rows: those with one token first, policy order within each part."""

    ranked = decision.query_len[state.by_rank]
    one, many = ranked == 1, ranked > 1
    num_single = jnp.sum(one, dtype=jnp.int32)
    count = num_single + jnp.sum(many, dtype=jnp.int32)
    sequence = pick_in_turn(state.by_rank, one, jnp.full(num_rows + 1, -1, jnp.int32), jnp.int32(0))
    sequence = pick_in_turn(state.by_rank, many, sequence, num_single)
    is_row = jnp.arange(num_rows) < count
    sequence = jnp.where(is_row, sequence[:-1], -1)
    index = jnp.maximum(sequence, 0)

    def pick(field: Array) -> Array:
        return jnp.where(is_row, field[index], jnp.zeros((), field.dtype))

    query_len, computed_len = pick(decision.query_len), pick(state.computed_len)
    ends = running_sum(query_len)
    return Rows(
        sequence=sequence,
        computed_len=computed_len,
        known_len=pick(state.known_len),
        cached_len=pick(state.cached_len),
        query_len=query_len,
        sample_rows=jnp.where(pick(decision.samples), ends - 1, -1),
        query_start=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        context_len=computed_len + query_len,
        num_tokens=ends[-1],
        num_rows=count,
        num_single=num_single,
    )


def flatten_tokens(
    tokens: Int32[Array, "sequences max_len"],
    rows: Rows,
    block_table: Int32[Array, "groups sequences max_blocks"],
    num_tokens: int,
    block_size: int,
) -> Tokens:
    """Id, position, row and slot of each token of the step; pads are token 0 at position 0 of row `rows`, slot −1.

    Tables of the rows reach as far as their context; the reserved block 0 elsewhere.
    """
    groups, _, max_blocks = block_table.shape
    num_rows, columns = rows.sequence.size, jnp.arange(max_blocks, dtype=jnp.int32)

    def copy_row(r: Array, table: Array) -> Array:
        used = blocks_for(rows.computed_len[r] + rows.query_len[r], block_size)
        own = lax.dynamic_index_in_dim(block_table, rows.sequence[r], axis=1)
        return lax.dynamic_update_slice(table, jnp.where(columns < used, own, 0), (0, r, 0))

    table = lax.fori_loop(0, rows.num_rows, copy_row, jnp.zeros((groups, num_rows, max_blocks), jnp.int32))

    def write(t: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        r, ids, positions, row, slots = carry
        r += rows.query_start[r + 1] <= t  # rows have a token each at least
        position = rows.computed_len[r] + t - rows.query_start[r]
        token = jnp.where(position < rows.known_len[r], tokens[rows.sequence[r], position], -1)
        block, offset = position // block_size, position % block_size
        for g in range(groups):
            slots = put(slots, (g, t), table[g, r, block] * block_size + offset)
        return r, put(ids, (t,), token), put(positions, (t,), position), put(row, (t,), r), slots

    zeros, rest = jnp.zeros(num_tokens, jnp.int32), jnp.full(num_tokens, num_rows, jnp.int32)
    start = (jnp.int32(0), zeros, zeros, rest, jnp.full((groups, num_tokens), -1, jnp.int32))
    _, ids, positions, row, slots = lax.fori_loop(0, rows.query_start[-1], write, start)
    return Tokens(ids, positions, row, slots, table)
