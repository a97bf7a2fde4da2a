"""The scheduler as a seam: `init`, `step`, `arrive`, in the order in which a step happens.

Knows the cache only as an object with the methods of `octavo_core.seams.PrefixCache`; knows nothing of models, requests or time.
Everything is pure and has fixed shapes: whoever composes the parts jits `step` and `arrive`, donating both states.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from octavo_core.errors import ConfigError
from octavo_core.native import inverse, one_kernel, put_one
from octavo_core.plan import OK, Arrivals, StepPlan, StepResult
from octavo_core.seams import MatchingCache, PrefixCache
from octavo_scheduler._src import chunks, order
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.emit import Decision, Rows, compact_rows, flatten_tokens
from octavo_scheduler._src.policy import (
    blocks_for,
    choose_victim,
    is_served_ahead,
    learn_growth,
    promised_blocks,
    query_lens,
    wanted_blocks,
)
from octavo_scheduler._src.state import (
    FREE,
    RUNNING,
    WAITING,
    SchedulerState,
    empty_state,
    store,
    take_arrivals,
    take_result,
)

C = TypeVar("C")
E = TypeVar("E")

RETRY_STEPS: Final = 16
"""Calls of `arrive` after which a sequence that was refused is tried again although the pool has no more room than then."""

_UNKNOWN: Final = -(2**30)


class ChunkedScheduler(Generic[C]):
    """Mixed batches of decode rows and prompt chunks under a token budget, with preemption by recompute.

    What the host owes it: a sequence fits the pool alone (`blocks(limit_len − 1) ≤ cache.spec.usable_blocks`; larger ones are refused
    before they arrive), `1 ≤ prompt_len < limit_len ≤ cache.spec.max_len`, arrivals name FREE indices, every sampled row comes back
    with `accepted ≥ 1` unless its sequence was finished meanwhile (then 0), and a sequence that reaches its limit is reported
    finished. While `StepPlan.num_waiting` is not 0, `arrive` is called between steps, with no arrivals if there are none.

    Size: the two jits of the seam and what they share.

    Args:
        config: Sizes and policy.
        cache: Who holds the blocks; `cache.spec` gives the axes `sequences` (running and waiting together) and `max_len`.

    Raises:
        ConfigError: When the cache holds fewer sequences than may run.
    """

    def __init__(self, config: SchedulerConfig, cache: PrefixCache[C]) -> None:
        if config.max_num_seqs > cache.spec.max_sequences:
            raise ConfigError(
                f"max_num_seqs is at most the cache's max_sequences, got {config.max_num_seqs} and {cache.spec.max_sequences}; "
                "lower the one or raise the other"
            )
        if config.policy == "lpm" and not isinstance(cache, MatchingCache):
            raise ConfigError(
                f"policy lpm wants a cache that says how long a cached prefix is, and {type(cache).__name__} has no method `match`; "
                "choose another policy"
            )
        self.config = config
        self.cache = cache

    def turned(self, knobs: Mapping[str, Any]) -> ChunkedScheduler[C]:
        """The same scheduler with values of a program that is being traced for settings that decide no shape."""
        scheduler = copy.copy(self)
        scheduler.config = self.config.turned(knobs)
        return scheduler

    def init(self) -> SchedulerState:
        """No sequences."""
        spec = self.cache.spec
        empty = empty_state(spec.max_sequences, spec.max_len, len(self.config.tenant_weights))
        return empty._replace(costs=chunks.assumed(self.config))

    def step(self, state: SchedulerState, cache: C, result: StepResult) -> tuple[SchedulerState, C, StepPlan]:
        """Take in a result and plan the next step.

        Finished sequences and at most one preempted one give their blocks back at the end of the step, after their full blocks
        were made findable: the device executes in order, so what this step computes may be found by the next.
        """
        state, cache, (ended, rows), (copies, block_table, events) = self._serve(state, cache, result, self._end_in_rows)
        config, decision = self.config, ended.decision
        flat = one_kernel(functools.partial(flatten_tokens, num_tokens=config.token_budget, block_size=self.cache.spec.block_size))(
            state.tokens, rows, block_table
        )
        plan = StepPlan(
            token_ids=flat.token_ids,
            positions=flat.positions,
            row=flat.row,
            query_start=rows.query_start,
            context_len=rows.context_len,
            block_table=flat.block_table,
            slot_mapping=flat.slot_mapping,
            sample_rows=rows.sample_rows,
            copies=copies,
            sequence=rows.sequence,
            cached_len=rows.cached_len,
            num_tokens=rows.num_tokens,
            num_rows=rows.num_rows,
            num_single=rows.num_single,
            preempted=decision.preempted,
            lost_len=decision.lost_len,
            num_running=ended.num_running,
            num_waiting=ended.num_waiting,
            events=events,
        )
        return state, cache, plan

    def decide(self, state: SchedulerState, cache: C, result: StepResult) -> tuple[SchedulerState, C, Decided]:
        """`step` without the plan for a device: who computes and samples how much. What a simulation wants of a step."""
        running_len = state.computed_len
        state, cache, (ended, _), (_, _, events) = self._serve(state, cache, result, self._end)
        query_len = ended.decision.query_len
        return (
            state,
            cache,
            Decided(
                query_len=query_len,
                context_len=jnp.where(query_len > 0, running_len + query_len, 0),
                samples=ended.decision.samples,
                cached_len=jnp.where(query_len > 0, state.cached_len, 0),
                preempted=ended.decision.preempted,
                lost_len=ended.decision.lost_len,
                num_running=ended.num_running,
                num_waiting=ended.num_waiting,
                num_free=events.num_free[0],
            ),
        )

    def _serve(
        self, state: SchedulerState, cache: C, result: StepResult, end: Callable[[SchedulerState, _Begun, Any], tuple[_Ended, E]]
    ) -> tuple[SchedulerState, C, tuple[_Ended, E], tuple[Any, ...]]:
        """Everything in a step but what is written out for a device: copies, block table and events are handed on."""
        begun = one_kernel(self._begin)(state, result)
        state = state._replace(tokens=store(state.tokens, begun.positions, result.token_ids), **begun.changed._asdict())
        cache, _, copies, status = self.cache.grow(cache, self._of_groups(begun.need), begun.rank)
        ended, more = one_kernel(end)(state, begun, status)
        cache, block_table = self.cache.commit(cache, state.tokens, ended.findable)
        cache, events = self.cache.release(cache, ended.leaves)
        room = jnp.min(events.num_free + events.num_evictable)
        return state._replace(room=room, **ended.changed._asdict()), cache, (ended, more), (copies, block_table, events)

    def _begin(self, state: SchedulerState, result: StepResult) -> _Begun:
        """Take the result in and share the budget: everything before blocks are asked for."""
        was_running = state.is_running
        costs = chunks.learn(state.costs, result) if self.config.chunk_policy == "slo" else state.costs
        state, done, positions = take_result(state._replace(costs=costs), result)
        rank = inverse(state.by_rank)
        query_len = query_lens(state, self.config, self.cache.spec.block_size, rank)
        blocks = blocks_for(state.computed_len + query_len, self.cache.spec.block_size)
        changed = _Taken(state.status, state.known_len, state.in_flight, state.costs)
        return _Begun(changed, done, positions, was_running, rank, query_len, jnp.where(query_len > 0, blocks, 0))

    def _end(self, state: SchedulerState, begun: _Begun, status: Int32[Array, " sequences"]) -> tuple[_Ended, None]:
        """Who gives way, and what holds after the step: everything once blocks were given."""
        decision = self._decide(state, begun, status)
        is_victim = jnp.arange(status.size) == decision.preempted
        computed_len = state.computed_len + decision.query_len
        served = state.served
        if self.config.policy == "fair":
            served = order.charge(state, self.config, decision.query_len, decision.samples)
        changed = _Stepped(
            status=jnp.where(is_victim, WAITING, state.status),
            in_flight=jnp.where(state.status == FREE, 0, state.in_flight + decision.samples),
            computed_len=jnp.where(is_victim, 0, computed_len),
            guard_len=jnp.where(is_victim, state.total_len, state.guard_len),
            growth=learn_growth(state, decision.preempted >= 0),
            served=served,
        )
        ended = _Ended(
            changed=changed,
            decision=decision,
            findable=jnp.where(begun.was_running, jnp.minimum(computed_len, state.known_len), 0),
            leaves=begun.done | is_victim,
            num_running=jnp.sum(changed.status == RUNNING, dtype=jnp.int32),
            num_waiting=jnp.sum(changed.status == WAITING, dtype=jnp.int32),
        )
        return ended, None

    def _end_in_rows(self, state: SchedulerState, begun: _Begun, status: Int32[Array, " sequences"]) -> tuple[_Ended, Rows]:
        """The same, and the rows of the plan."""
        ended, _ = self._end(state, begun, status)
        return ended, compact_rows(state, ended.decision, self.config.max_num_seqs)

    def arrive(self, state: SchedulerState, cache: C, arrivals: Arrivals) -> tuple[SchedulerState, C]:
        """Take in new sequences, then admit waiting ones in policy order until one does not fit.

        Who was refused is tried again once the pool has more room for it, or after `RETRY_STEPS`: its prefix may be there by then.

        Cost: one `PrefixCache.admit` for each sequence tried, at most `max_arrivals`; under `lpm` as many look-ups before them.
        """
        if self.config.policy == "fair":
            state = order.settle_shares(state)
        state = take_arrivals(state, arrivals)
        if self.config.policy == "lpm":
            state = self._look_up(state, cache, arrivals)
        state = order.put_in_order(state, self.config)
        first = _first_waiting(state)
        margin = state.room - self._kept(state) - wanted_blocks(state, self.config, self.cache.spec.block_size)[first]
        who, was_short, turns = state.refusal
        waits = (who == first) & (margin <= was_short) & (turns < RETRY_STEPS)
        start = _Admission(state, cache, jnp.int32(0), ~waits)
        end: _Admission[C] = jax.lax.while_loop(self._may_admit, self._admit_first, start)
        # Behind somebody who was let in just now, what the pool was short of is known after the next step.
        is_sure = end.num_tried == 1
        refused = jnp.stack([_first_waiting(end.state), jnp.where(is_sure, margin, _UNKNOWN), jnp.int32(0)])
        none = jnp.array([-1, 0, 0], jnp.int32)
        refusal = jnp.where(waits, state.refusal + jnp.array([0, 0, 1]), jnp.where(end.is_open, none, refused))
        return end.state._replace(claim=self._claim_of_first(end.state), refusal=refusal), end.cache

    def _kept(self, state: SchedulerState) -> Int32[Array, ""]:
        """Blocks that newcomers must leave alone."""
        watermark = jnp.where(jnp.any(state.is_running), self.config.watermark_blocks, 0)
        return promised_blocks(state, self.config, self.cache.spec.block_size) + watermark

    def _decide(self, state: SchedulerState, begun: _Begun, status: Int32[Array, " sequences"]) -> Decision:
        """Choose who gives way if blocks ran out, or somebody is owed, and nobody ended."""
        query_len, block_size = begun.query_len, self.cache.spec.block_size
        refused = (query_len > 0) & (status != OK)
        lack = jnp.sum(jnp.where(refused, begun.need - blocks_for(state.computed_len, block_size), 0), dtype=jnp.int32)
        gives_way = (jnp.any(refused) | (state.claim > 0)) & ~jnp.any(begun.done & begun.was_running)
        victim = jax.lax.cond(
            gives_way,
            lambda: choose_victim(state, begun.rank, jnp.maximum(lack, state.claim), self.config, block_size),
            lambda: jnp.int32(-1),
        )
        is_victim = jnp.arange(status.size) == victim
        query_len = jnp.where(refused | is_victim, 0, query_len)
        samples = (query_len > 0) & (state.computed_len + query_len == state.total_len)
        lost_len = jnp.sum(jnp.where(is_victim, state.computed_len, 0), dtype=jnp.int32)
        return Decision(query_len, samples, victim, lost_len)

    def _look_up(self, state: SchedulerState, cache: C, arrivals: Arrivals) -> SchedulerState:
        """Ask how long the cached prefix is, of newcomers and of as many others that wait, in turn."""
        cache_of: Any = self.cache
        size, count = state.status.size, arrivals.sequence.size
        turn = (jnp.arange(size, dtype=jnp.int32) - state.cursor) % size
        others = jnp.argsort(jnp.where((state.status == WAITING) & (state.in_flight == 0), turn, size))[:count].astype(jnp.int32)
        found_len = state.found_len
        for these in (others, arrivals.sequence):
            index = jnp.clip(these, 0, size - 1)
            asks = (these >= 0) & (state.status[index] == WAITING) & state.use_prefix[index]
            answer = cache_of.match(
                cache, state.tokens[index], jnp.where(asks, state.known_len[index], 1), state.namespace[index], state.tenant[index]
            )
            to = jnp.where(asks, index, size)
            found_len = found_len.at[to].set(answer, mode="drop")
        return state._replace(found_len=found_len, cursor=(others[-1] + 1) % size)

    def _claim_of_first(self, state: SchedulerState) -> Int32[Array, ""]:
        """Blocks that the first in line, left waiting, may have taken from a tenant that was served more."""
        if self.config.policy != "fair":
            return state.claim
        first = _first_waiting(state)
        is_owed = (state.status[first] == WAITING) & is_served_ahead(state, first, self.config)
        return jnp.where(is_owed, wanted_blocks(state, self.config, self.cache.spec.block_size)[first], 0)

    def _of_groups(self, blocks: Int32[Array, "*axes"]) -> Int32[Array, "*axes groups"]:
        """The same number of blocks in every KV group."""
        return jnp.broadcast_to(blocks[..., None], (*blocks.shape, self.cache.spec.groups))

    def _may_admit(self, now: _Admission[C]) -> Bool[Array, ""]:
        """Whether there is a first in line, its ids are all known, and a row is free for it."""
        first = _first_waiting(now.state)
        is_ready = (now.state.status[first] == WAITING) & (now.state.in_flight[first] == 0)
        has_row = jnp.sum(now.state.is_running) < self.config.max_num_seqs
        return now.is_open & is_ready & has_row & (now.num_tried < self.config.max_arrivals)

    def _admit_first(self, now: _Admission[C]) -> _Admission[C]:
        """Try the first in line. A sequence that wants no match asks for one of its first token, which finds nothing."""
        state, block_size = now.state, self.cache.spec.block_size
        first = _first_waiting(state)
        cache, answer = self.cache.admit(
            now.cache,
            first[None],
            state.tokens[first][None],
            jnp.where(state.use_prefix[first], state.known_len[first], 1)[None],
            state.namespace[first][None],
            state.tenant[first][None],
            self._of_groups(wanted_blocks(state, self.config, block_size)[first][None]),
            self._of_groups(self._kept(state)),
        )
        is_admitted, found = answer.status[0] == OK, answer.cached_len[0]
        cached_len = jnp.where(state.cached_len[first] < 0, found, state.cached_len[first])
        state = state._replace(
            passed=jnp.where(is_admitted, order.note_overtaken(state, first), state.passed),
            status=put_one(state.status, first, jnp.int32(RUNNING), is_admitted),
            found_len=put_one(state.found_len, first, found, is_admitted),
            computed_len=put_one(state.computed_len, first, found, is_admitted),
            cached_len=put_one(state.cached_len, first, cached_len, is_admitted),
        )
        return _Admission(state, cache, now.num_tried + 1, is_admitted)


class Decided(NamedTuple):
    """What a step does, by sequence; those it leaves out have zeros.

    Attributes:
        query_len: New tokens.
        context_len: Tokens of KV after the step.
        samples: Whether a token is made.
        cached_len: Tokens that were found at its first admission.
        preempted: Who was preempted, −1 nobody.
        lost_len: Tokens whose KV that one lost.
        num_running, num_waiting, num_free: After the step: sequences, and blocks nobody holds.
    """

    query_len: Int32[Array, " sequences"]
    context_len: Int32[Array, " sequences"]
    samples: Bool[Array, " sequences"]
    cached_len: Int32[Array, " sequences"]
    preempted: Int32[Array, ""]
    lost_len: Int32[Array, ""]
    num_running: Int32[Array, ""]
    num_waiting: Int32[Array, ""]
    num_free: Int32[Array, ""]


class _Taken(NamedTuple):
    """What a result changes of the state."""

    status: Int32[Array, " sequences"]
    known_len: Int32[Array, " sequences"]
    in_flight: Int32[Array, " sequences"]
    costs: Float32[Array, "7 4"]


class _Stepped(NamedTuple):
    """What a decision changes of the state."""

    status: Int32[Array, " sequences"]
    in_flight: Int32[Array, " sequences"]
    computed_len: Int32[Array, " sequences"]
    guard_len: Int32[Array, " sequences"]
    growth: Int32[Array, ""]
    served: Int32[Array, " tenants"]


class _Begun(NamedTuple):
    """A step before it asks for blocks: who ended, where ids go, who ran before, places in policy order, tokens and blocks wanted."""

    changed: _Taken
    done: Bool[Array, " sequences"]
    positions: Int32[Array, "sequences draft_plus_one"]
    was_running: Bool[Array, " sequences"]
    rank: Int32[Array, " sequences"]
    query_len: Int32[Array, " sequences"]
    need: Int32[Array, " sequences"]


class _Ended(NamedTuple):
    """A step once blocks were given: tokens that may be found, who gives its blocks back, and counts."""

    changed: _Stepped
    decision: Decision
    findable: Int32[Array, " sequences"]
    leaves: Bool[Array, " sequences"]
    num_running: Int32[Array, ""]
    num_waiting: Int32[Array, ""]


class _Admission(NamedTuple, Generic[C]):
    """Where the admission loop stands; `is_open` until somebody did not fit."""

    state: SchedulerState
    cache: C
    num_tried: Int32[Array, ""]
    is_open: Bool[Array, ""]


def _first_waiting(state: SchedulerState) -> Int32[Array, ""]:
    """The waiting sequence first in policy order; any other index where nobody waits."""
    return state.by_rank[jnp.argmax(state.status[state.by_rank] == WAITING)]
