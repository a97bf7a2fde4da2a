"""One turn of a simulated engine: what the host does around a step of the scheduler, as one traceable function.

Hand over arrivals, plan with what is known, compute (here: let time pass), note the tokens. What it does not know: detokenisation,
sampling, aborts, and clients that stop reading.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from octavo_core.errors import ConfigError
from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.seams import PrefixCache, Scheduler
from octavo_scheduler._src.sim_cache import CountingCache
from octavo_scheduler._src.sim_cost import CostModel, size_of
from octavo_scheduler._src.sim_state import (
    DONE,
    PENDING,
    REFUSED,
    TAKEN,
    TICK_S,
    Requests,
    StepLine,
    World,
    blank_arrivals,
    blank_result,
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

    def __call__(self, world: World, requests: Requests) -> tuple[World, StepLine]:
        """One step of the engine; traceable."""
        world = self._wait(world, requests)
        world, newcomers = self._take(self._refuse(world, requests), requests)
        return self.serve(self._arrive(world, requests, newcomers), requests)

    def serve(self, world: World, requests: Requests) -> tuple[World, StepLine]:
        """The part of a turn after arrivals: plan, let time pass, note what was made."""
        result, results = world.results[0], world.results[1:]
        scheduler, cache, plan = self.scheduler.step(world.scheduler, world.cache, result)
        leaving = result.finished & (world.request >= 0)
        start = world.now
        end, rest = self._elapse(world, plan)
        world = world._replace(scheduler=scheduler, cache=cache, num_waiting=plan.num_waiting)
        line = self._line(world, plan, requests, start, end)
        world = self._note(world._replace(now=end, rest=rest), plan, requests, results, start)
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
        to = jnp.where(queued & full, world.queue, world.books.status.size)
        return world._replace(books=world.books._replace(status=world.books.status.at[to].set(REFUSED, mode="drop")))

    def _take(self, world: World, requests: Requests) -> tuple[World, Int32[Array, "arrivals 2"]]:
        """Give free indices to requests whose turn it is.

        Returns:
            The world, and (index, request) of each newcomer; −1 pads.
        """
        size, count = self.rules.max_arrivals, requests.arrival.shape[0]
        sequences = world.request.size
        at = world.cursor + jnp.arange(size, dtype=jnp.int32)
        request = world.queue[jnp.minimum(at, count - 1)]
        is_due = (at < world.num_offered) & (requests.arrival[request] <= world.now)
        is_due = jnp.cumprod(is_due).astype(bool)
        wanted = is_due & (world.books.status[request] == PENDING)
        place = jnp.cumsum(wanted) - wanted
        free = world.request < 0
        rank = jnp.cumsum(free) - 1
        index = (
            jnp.full(size, -1, jnp.int32).at[jnp.where(free, rank, size)].set(jnp.arange(sequences, dtype=jnp.int32), mode="drop")
        )
        given = jnp.where(wanted, index[place], -1)
        passed = is_due & (~wanted | (given >= 0))
        passed = jnp.cumprod(passed).astype(bool)
        given = jnp.where(passed & wanted, given, -1)
        to = jnp.where(given >= 0, given, sequences)
        status = world.books.status.at[jnp.where(given >= 0, request, count)].set(TAKEN, mode="drop")
        world = world._replace(
            request=world.request.at[to].set(request, mode="drop"),
            cursor=world.cursor + jnp.sum(passed, dtype=jnp.int32),
            books=world.books._replace(status=status),
        )
        return world, jnp.stack([given, jnp.where(given >= 0, request, -1)], axis=1)

    def _arrive(self, world: World, requests: Requests, newcomers: Int32[Array, "arrivals 2"]) -> World:
        """Hand newcomers over and let waiting sequences in, where there are any. Nobody moves prompts where nobody is new."""

        def arrive(states: tuple[Any, Any]) -> tuple[Any, Any]:
            return self.scheduler.arrive(*states, self._arrivals(requests, newcomers))

        def let_in(states: tuple[Any, Any]) -> tuple[Any, Any]:
            return self.scheduler.arrive(*states, blank_arrivals(1, self.cache.spec.max_len))

        case = jnp.where(jnp.any(newcomers[:, 0] >= 0), 2, (world.num_waiting > 0).astype(jnp.int32))
        scheduler, cache = lax.switch(case, (lambda states: states, let_in, arrive), (world.scheduler, world.cache))
        return world._replace(scheduler=scheduler, cache=cache)

    def _arrivals(self, requests: Requests, newcomers: Int32[Array, "arrivals 2"]) -> Arrivals:
        sequence, request = newcomers[:, 0], jnp.maximum(newcomers[:, 1], 0)
        spec = self.cache.spec
        if self.counts_only:
            found = jnp.where(self.rules.use_prefix, requests.found[request], 0)
            tokens = jnp.zeros((request.size, spec.max_len), jnp.int32).at[:, 0].set(found)
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

    def _elapse(self, world: World, plan: StepPlan) -> tuple[Int32[Array, ""], Any]:
        """When the step ends, and the part of a tick that is left over."""
        step_s = jnp.where(plan.num_rows > 0, self.cost.step_s(size_of(plan)) + self.cost.host_s, 0.0)
        ticks = step_s / TICK_S + world.rest
        whole = jnp.floor(ticks)
        return world.now + whole.astype(jnp.int32), ticks - whole

    def _note(
        self, world: World, plan: StepPlan, requests: Requests, results: tuple[StepResult, ...], start: Int32[Array, ""]
    ) -> World:
        """Write down which tokens were made and who ended."""
        sequences, books, count = world.request.size, world.books, requests.arrival.shape[0]
        is_row = plan.sequence >= 0
        to = jnp.where(is_row & (plan.sample_rows >= 0), plan.sequence, sequences)
        sampled = jnp.zeros(sequences, bool).at[to].set(True, mode="drop")
        at = jnp.where(is_row, plan.sequence, sequences)
        cached = jnp.full(sequences, -1, jnp.int32).at[at].set(plan.cached_len, mode="drop")
        lives = (world.request >= 0) & ~world.ended
        request, none = jnp.maximum(world.request, 0), jnp.full(sequences, count)
        makes = sampled & lives
        made = books.made[request] + makes
        ends = lives & makes & (made >= requests.output_len[request])
        begins = lives & (cached >= 0) & (books.started[request] < 0)
        to, last = jnp.where(makes, request, none), books.last[request]
        is_first = makes & (last < 0)
        end, starting = world.now, jnp.where(begins, request, none)
        preempted = jnp.where(plan.preempted >= 0, world.request[jnp.maximum(plan.preempted, 0)], count)
        books = books._replace(
            status=books.status.at[jnp.where(ends, request, none)].set(DONE, mode="drop"),
            started=books.started.at[starting].set(start, mode="drop"),
            first=books.first.at[jnp.where(is_first, request, none)].set(end, mode="drop"),
            last=books.last.at[to].set(end, mode="drop"),
            gap=books.gap.at[jnp.where(is_first, none, to)].max(end - last, mode="drop"),
            made=books.made.at[to].set(made, mode="drop"),
            cached=books.cached.at[starting].set(cached, mode="drop"),
            preemptions=books.preemptions.at[preempted].add(1, mode="drop"),
        )
        ids = answer_tokens(request, requests.prompt_len[request] + made - 1)
        told = {"accepted": makes.astype(jnp.int32), "token_ids": ids[:, None], "finished": ends, **self._measured(plan)}
        newest = blank_result(sequences)._replace(**told)
        return world._replace(books=books, ended=world.ended | ends, results=(*results, newest))

    def _measured(self, plan: StepPlan) -> dict[str, Array]:
        """What the host measures of a step and tells the scheduler with its tokens."""
        return {
            "step_s": jnp.where(plan.num_rows > 0, self.cost.step_s(size_of(plan)), 0.0),
            "num_decodes": plan.num_single,
            "num_prefill_tokens": plan.num_tokens - plan.num_single,
        }

    def _line(self, world: World, plan: StepPlan, requests: Requests, start: Int32[Array, ""], end: Int32[Array, ""]) -> StepLine:
        size = size_of(plan)
        victim = jnp.maximum(plan.preempted, 0)
        at = jnp.arange(world.queue.size, dtype=jnp.int32)
        is_due = (at >= world.cursor) & (at < world.num_offered) & (requests.arrival[world.queue] <= start)
        return StepLine(
            start=start,
            end=end,
            num_decodes=plan.num_single,
            num_prefills=plan.num_rows - plan.num_single,
            prefill_tokens=size.prefill,
            context_tokens=jnp.sum(plan.context_len),
            prefill_pairs=size.pairs,
            sampled=jnp.int32(0),
            num_running=plan.num_running,
            num_waiting=plan.num_waiting + jnp.sum(is_due, dtype=jnp.int32),
            num_free_blocks=plan.events.num_free[0],
            preempted=jnp.where(plan.preempted >= 0, world.request[victim], -1),
            lost=plan.lost_len,
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
