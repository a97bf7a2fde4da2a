"""What the scheduler remembers of each sequence, and how a result changes it. Knows tokens and counts; knows no blocks."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from octavo_core.native import put_all
from octavo_core.plan import Arrivals, StepResult

FREE: Final = 0
WAITING: Final = 1
RUNNING: Final = 2

SHARE_AT_START: Final = 700
"""Thousandths of what a sequence may still write that are kept for it, before anything is known."""


class SchedulerState(NamedTuple):
    """Every sequence, by index. Fields of a FREE sequence mean nothing.

    Attributes:
        tokens: Ids known to the host, prompt first; valid below `known_len`.
        status: `FREE`, `WAITING` (holds no blocks) or `RUNNING`.
        known_len: Tokens whose ids have arrived in a `StepResult` or with the prompt.
        in_flight: Samplings dispatched whose ids have not arrived; their tokens follow the known ones.
        computed_len: Tokens whose KV is written by dispatched steps.
        limit_len: Most tokens of prompt and answer together.
        guard_len: Tokens the sequence had when it was last preempted; until it has more it is not preempted again.
        cached_len: Tokens found in the cache at its first admission, −1 before.
        found_len: Tokens found in the cache when it was last looked up.
        passed: Later arrivals that were admitted before it.
        namespace, tenant, priority, deadline, order, use_prefix: As they arrived.
        by_rank: Sequences in policy order; where FREE ones stand does not matter. Only `arrive` changes the order, so only it sorts.
        served: Weighted tokens each tenant was served beyond the least served one that has sequences (`fair`).
        growth: Thousandths of what sequences may still write that are kept for them (`optimistic`).
        claim: Blocks the first in line wants of a tenant that is ahead of it (`fair`); 0: it wants none.
        room: Blocks that were free or evictable after the newest step.
        refusal: Who was refused last (−1 nobody), by how many blocks the pool was short then (below 0), and steps since.
        cursor: Where the next look at the prefixes of waiting sequences begins (`lpm`).
        costs: What steps cost, see `octavo_scheduler._src.chunks` (`slo`).
    """

    tokens: Int32[Array, "sequences max_len"]
    status: Int32[Array, " sequences"]
    known_len: Int32[Array, " sequences"]
    in_flight: Int32[Array, " sequences"]
    computed_len: Int32[Array, " sequences"]
    limit_len: Int32[Array, " sequences"]
    guard_len: Int32[Array, " sequences"]
    cached_len: Int32[Array, " sequences"]
    found_len: Int32[Array, " sequences"]
    passed: Int32[Array, " sequences"]
    namespace: UInt32[Array, "sequences 2"]
    tenant: Int32[Array, " sequences"]
    priority: Int32[Array, " sequences"]
    deadline: Int32[Array, " sequences"]
    order: Int32[Array, " sequences"]
    use_prefix: Bool[Array, " sequences"]
    by_rank: Int32[Array, " sequences"]
    served: Int32[Array, " tenants"]
    growth: Int32[Array, ""]
    claim: Int32[Array, ""]
    room: Int32[Array, ""]
    refusal: Int32[Array, " 3"]
    cursor: Int32[Array, ""]
    costs: Float32[Array, "7 4"]

    @property
    def total_len(self) -> Int32[Array, " sequences"]:
        """Tokens of each sequence, those in flight included."""
        return self.known_len + self.in_flight

    @property
    def is_running(self) -> Bool[Array, " sequences"]:
        """Who holds blocks."""
        return self.status == RUNNING

    @property
    def is_open(self) -> Bool[Array, " sequences"]:
        """Running and short of its limit; the others among the running only wait for the host to end them."""
        return self.is_running & (self.total_len < self.limit_len)


def empty_state(num_sequences: int, max_len: int, num_tenants: int = 1) -> SchedulerState:
    """No sequences. Every field is a buffer of its own, so that all can be donated."""

    def zeros() -> Int32[Array, " sequences"]:
        return jnp.zeros(num_sequences, jnp.int32)

    return SchedulerState(
        tokens=jnp.zeros((num_sequences, max_len), jnp.int32),
        status=zeros(),
        known_len=zeros(),
        in_flight=zeros(),
        computed_len=zeros(),
        limit_len=zeros(),
        guard_len=zeros(),
        cached_len=zeros(),
        found_len=zeros(),
        passed=zeros(),
        namespace=jnp.zeros((num_sequences, 2), jnp.uint32),
        tenant=zeros(),
        priority=zeros(),
        deadline=zeros(),
        order=zeros(),
        use_prefix=jnp.zeros(num_sequences, bool),
        by_rank=jnp.arange(num_sequences, dtype=jnp.int32),
        served=jnp.zeros(num_tenants, jnp.int32),
        growth=jnp.full((), SHARE_AT_START, jnp.int32),
        claim=jnp.zeros((), jnp.int32),
        room=jnp.zeros((), jnp.int32),
        refusal=jnp.array([-1, 0, 0], jnp.int32),
        cursor=jnp.zeros((), jnp.int32),
        costs=jnp.zeros((7, 4), jnp.float32),
    )


def take_result(
    state: SchedulerState, result: StepResult
) -> tuple[SchedulerState, Bool[Array, " sequences"], Int32[Array, "sequences draft_plus_one"]]:
    """Count the accepted ids and free the finished sequences.

    Returns:
        The state, who finished just now, and where `store` puts the ids. Lengths of the finished stay readable for the rest of the step.
    """
    lives = state.status != FREE
    accepted = jnp.where(lives & (state.in_flight > 0), result.accepted, 0)
    offsets = jnp.arange(result.token_ids.shape[1], dtype=jnp.int32)
    # Positions that take no token point past the end, where `store` puts nothing.
    positions = jnp.where(offsets < accepted[:, None], state.known_len[:, None] + offsets, state.tokens.shape[1])
    done = result.finished & lives
    state = state._replace(
        known_len=state.known_len + accepted,
        in_flight=state.in_flight - (accepted > 0),
        status=jnp.where(done, FREE, state.status),
    )
    return state, done, positions


def store(
    tokens: Int32[Array, "sequences max_len"],
    positions: Int32[Array, "sequences draft_plus_one"],
    token_ids: Int32[Array, "sequences draft_plus_one"],
) -> Int32[Array, "sequences max_len"]:
    """Put ids in their places."""
    indices = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    for offset in range(positions.shape[1]):
        at = positions[:, offset]
        tokens = put_all(tokens, (indices, at), token_ids[:, offset], at < tokens.shape[1])
    return tokens


def take_arrivals(state: SchedulerState, arrivals: Arrivals) -> SchedulerState:
    """Store new sequences as WAITING. Their place in policy order is the caller's to find."""
    is_new = arrivals.sequence >= 0

    def put(field: Array, value: Array | int) -> Array:
        values = jnp.broadcast_to(jnp.asarray(value, field.dtype), (is_new.size, *field.shape[1:]))
        return put_all(field, (arrivals.sequence,), values, is_new)

    return state._replace(
        tokens=put(state.tokens, arrivals.tokens),
        status=put(state.status, WAITING),
        known_len=put(state.known_len, arrivals.prompt_len),
        in_flight=put(state.in_flight, 0),
        computed_len=put(state.computed_len, 0),
        limit_len=put(state.limit_len, arrivals.limit_len),
        guard_len=put(state.guard_len, 0),
        cached_len=put(state.cached_len, -1),
        found_len=put(state.found_len, 0),
        passed=put(state.passed, 0),
        namespace=put(state.namespace, arrivals.namespace),
        tenant=put(state.tenant, arrivals.tenant),
        priority=put(state.priority, arrivals.priority),
        deadline=put(state.deadline, arrivals.deadline),
        order=put(state.order, arrivals.order),
        use_prefix=put(state.use_prefix, arrivals.use_prefix),
    )
