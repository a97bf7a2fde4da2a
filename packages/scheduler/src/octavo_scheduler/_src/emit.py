"""A decision written out as a `StepPlan`: compact rows, flat tokens, slots. Decides nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from octavo_core.plan import CacheEvents, StepPlan
from octavo_scheduler._src.policy import blocks_for
from octavo_scheduler._src.state import WAITING, SchedulerState


class Decision(NamedTuple):
    """What a step does: new tokens and sampling of each sequence, who was preempted (−1 nobody) and lost how much KV, blocks to copy first."""

    query_len: Int32[Array, " sequences"]
    samples: Bool[Array, " sequences"]
    preempted: Int32[Array, ""]
    lost_len: Int32[Array, ""]
    copies: Int32[Array, "groups sequences 2"]


class Rows(NamedTuple):
    """The rows of a step; pads have sequence −1 and zeros."""

    sequence: Int32[Array, " rows"]
    computed_len: Int32[Array, " rows"]
    known_len: Int32[Array, " rows"]
    cached_len: Int32[Array, " rows"]
    query_len: Int32[Array, " rows"]
    samples: Bool[Array, " rows"]
    query_start: Int32[Array, " rows_plus_one"]


class Tokens(NamedTuple):
    """The flat tokens of a step."""

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    row: Int32[Array, " tokens"]
    slot_mapping: Int32[Array, "groups tokens"]


def emit_plan(
    before: SchedulerState,
    after: SchedulerState,
    decision: Decision,
    block_table: Int32[Array, "groups sequences max_blocks"],
    events: CacheEvents,
    *,
    num_rows: int,
    num_tokens: int,
    block_size: int,
) -> StepPlan:
    """The plan of a decision.

    Args:
        before: State from which the decision was made: lengths before the step.
        after: State with the decision carried out; only its counts are read.
        block_table: Of every sequence, as `commit` answered it.
        events: What `release` answered.
        num_rows: Static length of the rows axis.
        num_tokens: Static length of the tokens axis.
        block_size: Tokens in a block.
    """
    rows = compact_rows(before, decision, num_rows)
    table = row_tables(rows, block_table, block_size)
    tokens = flatten_tokens(before, rows, table, num_tokens, block_size)
    return StepPlan(
        token_ids=tokens.token_ids,
        positions=tokens.positions,
        row=tokens.row,
        query_start=rows.query_start,
        context_len=rows.computed_len + rows.query_len,
        block_table=table,
        slot_mapping=tokens.slot_mapping,
        sample_rows=jnp.where(rows.samples, rows.query_start[1:] - 1, -1),
        copies=decision.copies,
        sequence=rows.sequence,
        cached_len=rows.cached_len,
        num_tokens=rows.query_start[-1],
        num_rows=jnp.sum(rows.query_len > 0, dtype=jnp.int32),
        num_single=jnp.sum(rows.query_len == 1, dtype=jnp.int32),
        preempted=decision.preempted,
        lost_len=decision.lost_len,
        num_running=jnp.sum(after.is_running, dtype=jnp.int32),
        num_waiting=jnp.sum(after.status == WAITING, dtype=jnp.int32),
        events=events,
    )


def compact_rows(state: SchedulerState, decision: Decision, num_rows: int) -> Rows:
    """Sequences with new tokens as rows: those with one token first, policy order within each part."""
    ranked = decision.query_len[state.by_rank]
    one, many = ranked == 1, ranked > 1
    place_many = jnp.sum(one) + jnp.cumsum(many) - 1
    place = jnp.where(one, jnp.cumsum(one) - 1, jnp.where(many, place_many, num_rows))
    sequence = jnp.full(num_rows, -1, jnp.int32).at[place].set(state.by_rank, mode="drop")
    is_row, index = sequence >= 0, jnp.maximum(sequence, 0)

    def pick(field: Array) -> Array:
        return jnp.where(is_row, field[index], jnp.zeros((), field.dtype))

    query_len = pick(decision.query_len)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_len, dtype=jnp.int32)])
    return Rows(
        sequence=sequence,
        computed_len=pick(state.computed_len),
        known_len=pick(state.known_len),
        cached_len=pick(state.cached_len),
        query_len=query_len,
        samples=pick(decision.samples),
        query_start=starts,
    )


def row_tables(
    rows: Rows, block_table: Int32[Array, "groups sequences max_blocks"], block_size: int
) -> Int32[Array, "groups rows max_blocks"]:
    """Block tables of the rows, as far as their context reaches; the reserved block 0 elsewhere."""
    used = blocks_for(rows.computed_len + rows.query_len, block_size)
    inside = jnp.arange(block_table.shape[2], dtype=jnp.int32) < used[:, None]
    return jnp.where(inside, block_table[:, jnp.maximum(rows.sequence, 0)], 0)


def flatten_tokens(
    state: SchedulerState, rows: Rows, table: Int32[Array, "groups rows max_blocks"], num_tokens: int, block_size: int
) -> Tokens:
    """Id, position, row and slot of each token of the step; pads are token 0 at position 0 of row `rows`, slot −1."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    # Rows are dense from the first on, so counting the starts of later rows up to a token gives its row.
    marks = jnp.zeros(num_tokens, jnp.int32).at[rows.query_start[1:-1]].add(1, mode="drop")
    is_token = index < rows.query_start[-1]
    row = jnp.where(is_token, jnp.cumsum(marks), 0)
    positions = jnp.where(is_token, (rows.computed_len - rows.query_start[:-1])[row] + index, 0)
    known = state.tokens[jnp.maximum(rows.sequence, 0)[row], positions]
    token_ids = jnp.where(positions < rows.known_len[row], known, -1)
    slots = table[:, row, positions // block_size] * block_size + positions % block_size
    return Tokens(
        token_ids=jnp.where(is_token, token_ids, 0),
        positions=positions,
        row=jnp.where(is_token, row, rows.sequence.size),
        slot_mapping=jnp.where(is_token, slots, -1),
    )
