"""Pieces for those who write a scheduler: the books of its sequences, and a step's plan from how many tokens each sequence gets.

Pure functions over fixed shapes, traced inside the scheduler's jit. Knows no policy, no cache and no device. Nobody has to use them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import Arrivals, CacheEvents, StepPlan, StepResult
from octavo_core.specs import CacheSpec

FREE: Final = 0
WAITING: Final = 1
RUNNING: Final = 2


class Books(NamedTuple):
    """What is known of every sequence.

    Attributes:
        tokens: Prompt and answer.
        known: Tokens whose ids are here.
        total: These, and the one that is being sampled.
        computed: Tokens whose KV is there or on its way.
        limit: Most tokens of prompt and answer.
        order: Rises with arrival.
        namespace, tenant: Of its prefixes.
        status: `FREE`, `WAITING` or `RUNNING`.
    """

    tokens: Int32[Array, "sequences max_len"]
    known: Int32[Array, " sequences"]
    total: Int32[Array, " sequences"]
    computed: Int32[Array, " sequences"]
    limit: Int32[Array, " sequences"]
    order: Int32[Array, " sequences"]
    namespace: UInt32[Array, "sequences 2"]
    tenant: Int32[Array, " sequences"]
    status: Int32[Array, " sequences"]


def empty_books(spec: CacheSpec) -> Books:
    """Books of nobody."""
    n, zeros = spec.max_sequences, jnp.zeros
    counts = [zeros(n, jnp.int32) for _ in range(7)]  # each its own: they are donated
    known, total, computed, limit, order, tenant, status = counts
    return Books(
        zeros((n, spec.max_len), jnp.int32), known, total, computed, limit, order, zeros((n, 2), jnp.uint32), tenant, status
    )


def enter(books: Books, new: Arrivals) -> Books:
    """Write new sequences into the books; they wait."""
    at = jnp.where(new.sequence < 0, len(books.status), new.sequence)
    none = jnp.zeros_like(new.prompt_len)
    values = Books(
        new.tokens, new.prompt_len, new.prompt_len, none, new.limit_len, new.order, new.namespace, new.tenant, none + WAITING
    )
    return Books(*(old.at[at].set(x, mode="drop") for old, x in zip(books, values, strict=True)))


def accept(books: Books, result: StepResult) -> Books:
    """Take in what the host has learnt: one new id for those that have one, and who has ended."""
    n = jnp.arange(len(books.status))
    at = jnp.where(result.accepted > 0, books.known, books.tokens.shape[1])
    return books._replace(
        tokens=books.tokens.at[n, at].set(result.token_ids[:, 0], mode="drop"),
        known=books.known + result.accepted,
        status=jnp.where(result.finished, FREE, books.status),
    )


def blocks_of(tokens: Int32[Array, " sequences"], spec: CacheSpec) -> Int32[Array, "sequences groups"]:
    """Blocks that hold so many tokens, in every group."""
    return jnp.repeat(-(-tokens // spec.block_size)[:, None], spec.groups, axis=1)


def advance(books: Books, length: Int32[Array, " sequences"]) -> tuple[Books, Bool[Array, " sequences"]]:
    """The books once `length` more tokens of each are computed, and who samples: those whose every token is."""
    samples = (length > 0) & (books.computed + length == books.total)
    return books._replace(computed=books.computed + length, total=books.total + samples), samples


def lay_out(
    before: Books,
    length: Int32[Array, " sequences"],
    samples: Bool[Array, " sequences"],
    table: Int32[Array, "groups sequences max_blocks"],
    copies: Int32[Array, "groups sequences 2"],
    events: CacheEvents,
    *,
    block_size: int,
    max_rows: int,
    max_tokens: int,
) -> StepPlan:
    """The plan of a step.

    Args:
        before: The books, with `computed` as it was before this step.
        length: Tokens of each sequence in the step, 0: none; at most `max_tokens` together, of at most `max_rows` sequences.
        samples: Whose last token is sampled.
        table, copies: Blocks of every sequence, as the cache answers.
        events: What the cache tells.
        block_size: Tokens in a block.
        max_rows, max_tokens: Sizes of the plan.
    """
    kind = jnp.where(length == 0, 2, jnp.where(length == 1, 0, 1))
    pick = jnp.lexsort((before.order, kind))[:max_rows].astype(jnp.int32)
    size, is_row = length[pick], length[pick] > 0
    ends = jnp.cumsum(size).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    index = jnp.arange(max_tokens, dtype=jnp.int32)
    live, row = index < ends[-1], jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    of = pick[jnp.minimum(row, max_rows - 1)]
    at = jnp.where(live, before.computed[of] + index - starts[jnp.minimum(row, max_rows - 1)], 0)
    known = jnp.where(at < before.known[of], before.tokens[of, at], -1)
    context = jnp.where(is_row, before.computed[pick] + size, 0)
    slots = table[:, of, at // block_size] * block_size + at % block_size
    return StepPlan(
        token_ids=jnp.where(live, known, 0),
        positions=at,
        row=jnp.where(live, row, max_rows),
        query_start=starts,
        context_len=context,
        block_table=jnp.where(jnp.arange(table.shape[2]) < -(-context // block_size)[:, None], table[:, pick], 0),
        slot_mapping=jnp.where(live, slots, -1),
        sample_rows=jnp.where(is_row & samples[pick], ends - 1, -1),
        copies=copies,
        sequence=jnp.where(is_row, pick, -1),
        cached_len=jnp.zeros(max_rows, jnp.int32),
        num_tokens=ends[-1],
        num_rows=_count(is_row),
        num_single=_count(size == 1),
        preempted=jnp.int32(-1),
        lost_len=jnp.int32(0),
        num_running=_count(before.status == RUNNING),
        num_waiting=_count(before.status == WAITING),
        events=events,
    )


def _count(chosen: Bool[Array, " items"]) -> Int32[Array, ""]:
    return jnp.sum(chosen, dtype=jnp.int32)
