"""One turn of a simulated engine: what the host does around a step of the scheduler, as one traceable function.

Hand over arrivals, plan with what is known, compute (here: let time pass), note the tokens. What it does not know: detokenisation,
sampling, aborts, and clients that stop reading.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.errors import ConfigError
from octavo_core.native import if_so, is_kernel, pick_in_turn, put_all, running_sum
from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.seams import PrefixCache, Scheduler
from octavo_scheduler._src.scheduler import ChunkedScheduler, Decided
from octavo_scheduler._src.sim_cache import CountingCache
from octavo_scheduler._src.sim_cost import CostModel, StepSize, size_of
from octavo_scheduler._src.sim_state import (
    DONE,
    PENDING,
    REFUSED,
    TAKEN,
    TICK_S,
    Books,
    Requests,
    Serving,
    StepLine,
    World,
    blank_arrivals,
    blank_result,
    newly_served,
)


@dataclasses.dataclass(frozen=True)
class HostRules:
    """What the host around the scheduler does.

    Attributes:
        lag: Steps whose results a plan does not know yet; 1 in an engine that plans while a step runs.
        max_arrivals: Requests handed over between two steps.
        max_queued_requests, max_queued_tokens: Bounds beyond which a newcomer is refused; 0: none.
        use_prefix: Match the cache.
        span: Tokens of a part of a prompt.
        deadline_s, deadline_per_token_s: When the first token is due: so long after the arrival, and so much longer for each prompt token.
    """

    lag: int = 1
    max_arrivals: int = 8
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    use_prefix: bool = True
    span: int = 512
    deadline_s: float = 0.0
    deadline_per_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("lag", 0), ("max_arrivals", 1), ("max_queued_requests", 0), ("max_queued_tokens", 0), ("span", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is at least {least}, got {getattr(self, name)}")
        if min(self.deadline_s, self.deadline_per_token_s) < 0:
            raise ConfigError(f"deadlines are at least 0, got {self.deadline_s:g} and {self.deadline_per_token_s:g} a token")


class Turn:
    """A turn around a scheduler and its cache.

    Args:
        scheduler: Built around `cache`.
        cache: Who holds the blocks.
        cost: How long a step takes.
        rules: Of the host.
    """

    def __init__(self, scheduler: Scheduler[Any, Any], cache: PrefixCache[Any], cost: CostModel, rules: HostRules) -> None:
        self.scheduler, self.cache, self.cost, self.rules = scheduler, cache, cost, rules
        self.counts_only = isinstance(cache, CountingCache)
        self.knobs: dict[str, Any] = {}
        if self.counts_only and isinstance(scheduler, ChunkedScheduler):
            self.knobs = scheduler.config.knobs

    def __call__(self, world: World, requests: Requests) -> tuple[World, StepLine]:
        """One step of the engine; traceable."""
        world = self._wait(world, requests)
        world, newcomers = self._take(self._refuse(world, requests), requests)
        return self.serve(self._arrive(world, requests, newcomers), requests)

    def serve(self, world: World, requests: Requests) -> tuple[World, StepLine]:
        """The part of a turn after arrivals: plan, let time pass, note what was made."""
        result, results = world.results[0], world.results[1:]
        scheduler, cache, did = self._decide(world, result)
        leaving = result.finished & (world.request >= 0)
        start, size = world.now, size_of(did)
        step_s = jnp.where(size.rows > 0, self.cost.step_s(size), 0.0)
        end, rest = self._elapse(world, size, step_s)
        world = world._replace(scheduler=scheduler, cache=cache, num_waiting=did.num_waiting)
        line = _line(world, did, size, requests, start, end)
        world, told = self._note(world._replace(now=end, rest=rest), did, requests, start)
        told = told._replace(step_s=step_s, num_decodes=size.decode, num_prefill_tokens=size.prefill)
        world = world._replace(results=(*results, told))
        line = line._replace(sampled=jnp.sum(world.results[-1].accepted))
        return world._replace(request=jnp.where(leaving, -1, world.request), ended=world.ended & ~leaving), line

    def _wait(self, world: World, requests: Requests) -> World:
        """Where nobody is being served, the next arrival is what happens next."""
        count = requests.arrival.shape[0]
        is_idle = jnp.all(world.request < 0) & (world.cursor < world.num_offered)
        following = requests.arrival[world.queue[jnp.minimum(world.cursor, count - 1)]]
        return world._replace(now=jnp.where(is_idle, jnp.maximum(world.now, following), world.now))

    def _refuse(self, world: World, requests: Requests) -> World:
        """Turn newcomers away that a bounded queue has no room for."""
        rules = self.rules
        if not (rules.max_queued_requests or rules.max_queued_tokens):
            return world
        at = jnp.arange(world.queue.size, dtype=jnp.int32)
        queued = (at >= world.cursor) & (at < world.num_offered) & (requests.arrival[world.queue] <= world.now)
        queued &= world.books.status[world.queue] == PENDING
        before = jnp.cumsum(queued) - queued + world.num_waiting
        tokens = jnp.cumsum(jnp.where(queued, requests.prompt_len[world.queue], 0).astype(jnp.float32))
        full = jnp.zeros_like(queued)
        if rules.max_queued_requests:
            full |= before >= rules.max_queued_requests
        if rules.max_queued_tokens:
            full |= (tokens > rules.max_queued_tokens) & (before > 0)
        refused = jnp.full(queued.size, REFUSED, jnp.int32)
        status = put_all(world.books.status, (world.queue,), refused, queued & full)
        return world._replace(books=world.books._replace(status=status))

    def _take(self, world: World, requests: Requests) -> tuple[World, Int32[Array, "arrivals 2"]]:
        """Give free indices to requests whose turn it is.

        Returns:
            The world, and (index, request) of each newcomer; −1 pads.
        """
        size, count = self.rules.max_arrivals, requests.arrival.shape[0]
        at = world.cursor + jnp.arange(size, dtype=jnp.int32)
        request = world.queue[jnp.minimum(at, count - 1)]
        is_due = (at < world.num_offered) & (requests.arrival[request] <= world.now)
        is_due = jnp.cumprod(is_due).astype(bool)

        def give(now: tuple[Any, ...]) -> tuple[Any, ...]:
            taken, cursor, status, serving, _ = now
            wanted = is_due & (status[request] == PENDING)
            free = taken < 0
            every = jnp.arange(free.size, dtype=jnp.int32)
            index = pick_in_turn(every, free, jnp.full(size + 1, -1, jnp.int32), jnp.int32(0))[:-1]
            index = jnp.where(jnp.arange(size) < jnp.sum(free), index, -1)
            given = jnp.where(wanted, index[running_sum(wanted) - wanted], -1)
            passed = is_due & (~wanted | (given >= 0))
            passed = jnp.cumprod(passed).astype(bool)
            is_new = passed & wanted
            status = put_all(status, (request,), jnp.full(size, TAKEN, jnp.int32), is_new)
            new = newly_served(requests.output_len[request])
            serving = Serving(*(put_all(f, (given,), n, is_new) for f, n in zip(serving, new, strict=True)))
            newcomers = jnp.stack([jnp.where(is_new, given, -1), jnp.where(is_new, request, -1)], axis=1)
            return put_all(taken, (given,), request, is_new), cursor + jnp.sum(passed, dtype=jnp.int32), status, serving, newcomers

        start = world.request, world.cursor, world.books.status, world.serving, jnp.full((size, 2), -1, jnp.int32)
        taken, cursor, status, serving, newcomers = if_so(is_due[0], give, start)
        books = world.books._replace(status=status)
        return world._replace(request=taken, cursor=cursor, serving=serving, books=books), newcomers

    def _arrive(self, world: World, requests: Requests, newcomers: Int32[Array, "arrivals 2"]) -> World:
        """Hand newcomers over and let waiting sequences in, where there are any. Nobody moves prompts where nobody is new."""

        scheduler = self._turned(world)

        def arrive(states: tuple[Any, Any]) -> tuple[Any, Any]:
            return scheduler.arrive(*states, self._arrivals(requests, newcomers))

        def let_in(states: tuple[Any, Any]) -> tuple[Any, Any]:
            return scheduler.arrive(*states, blank_arrivals(1, self.cache.spec.max_len))

        case = jnp.where(jnp.any(newcomers[:, 0] >= 0), 2, (world.num_waiting > 0).astype(jnp.int32))
        states = world.scheduler, world.cache
        if is_kernel():
            state, cache = if_so(case > 0, arrive, states)
        else:
            state, cache = lax.switch(case, (lambda states: states, let_in, arrive), states)
        return world._replace(scheduler=state, cache=cache)

    def _arrivals(self, requests: Requests, newcomers: Int32[Array, "arrivals 2"]) -> Arrivals:
        sequence, request = newcomers[:, 0], jnp.maximum(newcomers[:, 1], 0)
        spec = self.cache.spec
        if self.counts_only:
            found = jnp.where(self.rules.use_prefix, requests.found[request], 0)
            tokens = jnp.where(jnp.arange(spec.max_len) == 0, found[:, None], 0)
        else:
            tokens = prompt_tokens(requests.parts[request], self.rules.span, spec.max_len)
        return blank_arrivals(self.rules.max_arrivals, spec.max_len)._replace(
            sequence=sequence,
            tokens=tokens,
            prompt_len=requests.prompt_len[request],
            limit_len=requests.limit_len[request],
            tenant=requests.tenant[request],
            priority=requests.priority[request],
            deadline=self._deadlines(requests, request),
            order=newcomers[:, 1],
            use_prefix=jnp.full(request.size, self.rules.use_prefix),
        )

    def _deadlines(self, requests: Requests, request: Int32[Array, " arrivals"]) -> Int32[Array, " arrivals"]:
        rules = self.rules
        patience_s = rules.deadline_s + rules.deadline_per_token_s * requests.prompt_len[request]
        return requests.arrival[request] + jnp.minimum(patience_s / TICK_S, 2.0**29).astype(jnp.int32)

    def _turned(self, world: World) -> Any:
        """The scheduler with the knobs of this world."""
        scheduler: Any = self.scheduler
        return scheduler.turned(world.knobs) if world.knobs else scheduler

    def _decide(self, world: World, result: StepResult) -> tuple[Any, Any, Decided]:
        """A step of the scheduler, by what it decides or, where it only plans, by its plan."""
        scheduler = self._turned(world)
        if hasattr(scheduler, "decide"):
            decided: tuple[Any, Any, Decided] = scheduler.decide(world.scheduler, world.cache, result)
            return decided
        state, cache, plan = scheduler.step(world.scheduler, world.cache, result)
        return state, cache, decided_of(plan, result.accepted.shape[0])

    def _elapse(self, world: World, size: StepSize, step_s: Array) -> tuple[Int32[Array, ""], Any]:
        """When the step ends, and the part of a tick that is left over."""
        ticks = jnp.where(size.rows > 0, step_s + self.cost.host_s, 0.0) / TICK_S + world.rest
        whole = jnp.floor(ticks)
        return world.now + whole.astype(jnp.int32), ticks - whole

    def _note(self, world: World, did: Decided, requests: Requests, start: Int32[Array, ""]) -> tuple[World, StepResult]:
        """Write down which tokens were made and who ended.

        Returns:
            The world, and what the scheduler is to be told.
        """
        is_there = world.request >= 0
        lives, so_far, end = is_there & ~world.ended, world.serving, world.now
        makes = did.samples & lives
        made = so_far.made + makes
        ends = makes & (made >= so_far.output_len)
        begins = lives & (did.query_len > 0) & (so_far.started < 0)
        is_first = makes & (so_far.first < 0)
        gives_way = is_there & (jnp.arange(made.size) == did.preempted)
        serving = Serving(
            output_len=so_far.output_len,
            started=jnp.where(begins, start, so_far.started),
            first=jnp.where(is_first, end, so_far.first),
            last=jnp.where(makes, end, so_far.last),
            gap=jnp.where(makes & ~is_first, jnp.maximum(so_far.gap, end - so_far.last), so_far.gap),
            made=made,
            cached=jnp.where(begins, did.cached_len, so_far.cached),
            preemptions=so_far.preemptions + gives_way,
        )
        ended = world.ended | ends
        world = _settle(world._replace(serving=serving, ended=ended), ends | (gives_way & world.ended))
        told = blank_result(made.size)._replace(accepted=makes.astype(jnp.int32), finished=ends)
        if not self.counts_only:
            request = jnp.maximum(world.request, 0)
            ids = answer_tokens(request, requests.prompt_len[request] + made - 1)
            told = told._replace(token_ids=ids[:, None])
        return world, told

    def settled(self, world: World) -> World:
        """With everything that is known of each request in its books."""
        return _settle(world, world.request >= 0)


def _settle(world: World, whose: Bool[Array, " sequences"]) -> World:
    """Carry what is known of requests at these indices to the books."""

    def write(books: Books) -> Books:
        at, known = (world.request,), world.serving._asdict()
        done = jnp.full(whose.size, DONE, jnp.int32)
        status = put_all(books.status, at, done, whose & world.ended)
        others = {name: put_all(f, at, known[name], whose) for name, f in books._asdict().items() if name != "status"}
        return Books(status=status, **others)

    return world._replace(books=if_so(jnp.any(whose), write, world.books))


def _line(
    world: World, did: Decided, size: StepSize, requests: Requests, start: Int32[Array, ""], end: Int32[Array, ""]
) -> StepLine:
    victim = jnp.maximum(did.preempted, 0)
    return StepLine(
        start=start,
        end=end,
        num_decodes=size.decode,
        num_prefills=size.rows - size.decode,
        prefill_tokens=size.prefill,
        context_tokens=jnp.sum(did.context_len, dtype=jnp.int32),
        prefill_pairs=size.pairs,
        sampled=jnp.int32(0),
        num_running=did.num_running,
        num_waiting=did.num_waiting + _num_due(world, requests, start),
        num_free_blocks=did.num_free,
        preempted=jnp.where(did.preempted >= 0, world.request[victim], -1),
        lost=did.lost_len,
    )


def _num_due(world: World, requests: Requests, now: Int32[Array, ""]) -> Int32[Array, ""]:
    """Requests of the queue, which is in order of arrival, that are there and have no index."""
    if not is_kernel():
        at = jnp.arange(world.queue.size, dtype=jnp.int32)
        is_due = (at >= world.cursor) & (at < world.num_offered) & (requests.arrival[world.queue] <= now)
        return jnp.sum(is_due, dtype=jnp.int32)

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_due = requests.arrival[world.queue[middle]] <= now
        return jnp.where(is_due, middle + 1, low), jnp.where(is_due, high, middle)

    low, _ = lax.while_loop(lambda b: b[0] < b[1], halve, (world.cursor, jnp.maximum(world.num_offered, world.cursor)))
    return low - world.cursor


def decided_of(plan: StepPlan, sequences: int) -> Decided:
    """What a plan says, by sequence."""
    at = jnp.where(plan.sequence >= 0, plan.sequence, sequences)

    def spread(values: Array) -> Array:
        return jnp.zeros(sequences, values.dtype).at[at].set(values, mode="drop")

    return Decided(
        query_len=spread(jnp.diff(plan.query_start)),
        context_len=spread(plan.context_len),
        samples=spread(plan.sample_rows >= 0),
        cached_len=spread(plan.cached_len),
        preempted=plan.preempted,
        lost_len=plan.lost_len,
        num_running=plan.num_running,
        num_waiting=plan.num_waiting,
        num_free=plan.events.num_free[0],
    )


def _mixed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Bits of 32-bit words, stirred. Source: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def prompt_tokens(parts: Int32[Array, "arrivals parts"], span: int, max_len: int) -> Int32[Array, "arrivals max_len"]:
    """Tokens that are equal where parts are, up to chance: a function of the part's name and the place in it."""
    position = jnp.arange(max_len, dtype=jnp.int32)
    names = parts[:, jnp.minimum(position // span, parts.shape[1] - 1)].astype(jnp.uint32)
    place = (position % span).astype(jnp.uint32)
    return (_mixed(names * jnp.uint32(0x9E3779B9) + _mixed(place + 1)) >> 1).astype(jnp.int32)


def answer_tokens(request: Int32[Array, " sequences"], position: Int32[Array, " sequences"]) -> Int32[Array, " sequences"]:
    """Tokens of answers, each request's own."""
    mixed = _mixed(_mixed(request.astype(jnp.uint32) + jnp.uint32(0x51ED270B)) + position.astype(jnp.uint32))
    return (mixed >> 1).astype(jnp.int32)
