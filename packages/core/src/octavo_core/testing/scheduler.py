"""Conformance of the `Scheduler` seam: a host that overlaps, driving a simulated device, and what every plan must satisfy.

`HostLoop` is the host's side of the step loop in the least code that is honest about timing; it drives anything that plans.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.seams import PrefixCache, Scheduler
from octavo_core.specs import CacheSpec
from octavo_core.testing.device import SimulatedDevice, Stream, check_plan, expect, expected_tokens


@runtime_checkable
class Planner(Protocol):
    """What `HostLoop` drives: a scheduler with its states inside."""

    def arrive(self, arrivals: Arrivals) -> None:
        """Hand over new sequences, possibly none."""

    def step(self, result: StepResult) -> StepPlan:
        """The next plan, with NumPy arrays."""


class JittedPlanner:
    """A scheduler and its cache behind two jits, both states donated, as an engine runs them."""

    def __init__(self, scheduler: Scheduler[Any, Any], cache: PrefixCache[Any]) -> None:
        self._scheduler, self._cache = scheduler, cache
        self._step = jax.jit(scheduler.step, donate_argnums=(0, 1))
        self._arrive = jax.jit(scheduler.arrive, donate_argnums=(0, 1))
        self.reset()

    def reset(self) -> None:
        """Forget every sequence; what is compiled stays."""
        self.state, self.cache_state = self._scheduler.init(), self._cache.init()

    def arrive(self, arrivals: Arrivals) -> None:
        """See `Planner`."""
        self.state, self.cache_state = self._arrive(self.state, self.cache_state, arrivals)

    def step(self, result: StepResult) -> StepPlan:
        """See `Planner`."""
        self.state, self.cache_state, plan = self._step(self.state, self.cache_state, result)
        return jax.tree.map(np.asarray, plan)  # type: ignore[no-any-return]

    def trace_counts(self) -> tuple[int, int]:
        """How often `step` and `arrive` were compiled."""
        steps: Any = self._step
        arrives: Any = self._arrive
        return steps._cache_size(), arrives._cache_size()


class HostLoop:
    """The host's side of the step loop: arrivals, overlap, stops and aborts, without a clock.

    Args:
        planner: Plans.
        spec: Sizes of its cache.
        streams: What is to be served, in order of arrival.
        vocab_size: Of the simulated device.
        lag: Steps whose results are still unknown when the next one is planned; 1 is what an overlapping engine does.
        max_arrivals: Length of the arrivals axis.
    """

    def __init__(
        self,
        planner: Planner,
        spec: CacheSpec,
        streams: Sequence[Stream],
        *,
        vocab_size: int = 97,
        lag: int = 1,
        max_arrivals: int = 4,
    ) -> None:
        self.planner, self.spec, self.streams, self.lag, self.max_arrivals = planner, spec, streams, lag, max_arrivals
        self.device = SimulatedDevice(spec, vocab_size)
        self.tokens = {i: list(s.prompt) for i, s in enumerate(streams)}
        self.first_cached_len: dict[int, int] = {}
        self.stream_of: dict[int, int] = {}
        self.num_steps = 0
        self.plan: StepPlan | None = None
        self._queue = collections.deque(sorted(self.tokens, key=lambda i: streams[i].arrives_at))
        self._results: collections.deque[dict[int, tuple[int, int]]] = collections.deque()

    @property
    def is_done(self) -> bool:
        """Every stream has ended."""
        return not self._queue and not self.stream_of

    def run(self, max_steps: int) -> Iterator[StepPlan]:
        """Step until every stream has ended.

        Raises:
            AssertionError: It took more than `max_steps`, or a plan or what the device saw was wrong.
        """
        while not self.is_done:
            expect(
                self.num_steps < max_steps, "{} waiting, {} live after {} steps", len(self._queue), len(self.stream_of), max_steps
            )
            yield self.step()

    def step(self) -> StepPlan:
        """Hand over arrivals, plan with what is known, and execute."""
        arrivals = self._next_arrivals()
        if (arrivals.sequence >= 0).any() or self.plan is None or self.plan.num_waiting:
            self.planner.arrive(arrivals)
        self.plan = plan = self.planner.step(self._next_result())
        check_plan(plan, self.spec)
        for sequence, cached_len in zip(plan.sequence[: plan.num_rows].tolist(), plan.cached_len.tolist(), strict=False):
            expect(sequence in self.stream_of, "sequence {} is planned, but none is there", sequence)
            self.first_cached_len.setdefault(self.stream_of[sequence], cached_len)
        sampled = self.device.run(plan)
        self._results.append({s: (self.stream_of[s], t) for s, t in sampled.items()})
        self.num_steps += 1
        return plan

    def _next_result(self) -> StepResult:
        size = self.spec.max_sequences
        result = empty_result(size)
        known = self._results.popleft() if len(self._results) > self.lag else {}
        for sequence, (stream, token) in known.items():
            if self.stream_of.get(sequence) == stream:
                self.tokens[stream].append(token)
                result.accepted[sequence], result.token_ids[sequence, 0] = 1, token
        for sequence, stream in list(self.stream_of.items()):
            if len(self.tokens[stream]) >= self.streams[stream].end_len or self._is_aborted(stream):
                result.finished[sequence] = True
                del self.stream_of[sequence]
        return result

    def _is_aborted(self, stream: int) -> bool:
        aborts_at = self.streams[stream].aborts_at
        return aborts_at is not None and self.num_steps >= aborts_at

    def _next_arrivals(self) -> Arrivals:
        """Streams that are due, at indices the scheduler knows to be free."""
        free = [s for s in range(self.spec.max_sequences) if s not in self.stream_of]
        due: list[tuple[int, int]] = []
        while self._queue and len(due) < min(len(free), self.max_arrivals):
            if self.streams[self._queue[0]].arrives_at > self.num_steps:
                break
            due.append((free[len(due)], self._queue.popleft()))
        self.stream_of.update(due)
        return pack_arrivals([(s, i, self.streams[i]) for s, i in due], self.spec.max_len, self.max_arrivals)


def empty_result(num_sequences: int, draft_plus_one: int = 1) -> StepResult:
    """A result that says nothing, as NumPy arrays to be filled in."""
    ids = (num_sequences, draft_plus_one)
    ends, loads = _zeros(num_sequences, dtype=bool), _zeros(num_sequences, dtype=bool)
    return StepResult(_zeros(num_sequences), _zeros(*ids), ends, loads, _zeros(dtype=np.float32), _zeros(), _zeros())


def _zeros(*shape: int, dtype: Any = np.int32) -> Any:
    """NumPy zeros where an annotation says jax's Array: jit takes both."""
    return np.zeros(shape, dtype)


def pack_arrivals(due: Sequence[tuple[int, int, Stream]], max_len: int, max_arrivals: int) -> Arrivals:
    """(sequence, order, stream) of each arrival as arrays."""
    arrivals = Arrivals(
        sequence=_zeros(max_arrivals) - 1,
        tokens=_zeros(max_arrivals, max_len),
        prompt_len=_zeros(max_arrivals),
        limit_len=_zeros(max_arrivals),
        namespace=_zeros(max_arrivals, 2, dtype=np.uint32),
        tenant=_zeros(max_arrivals),
        priority=_zeros(max_arrivals),
        deadline=_zeros(max_arrivals),
        order=_zeros(max_arrivals),
        use_prefix=_zeros(max_arrivals, dtype=bool),
    )
    for at, (sequence, order, stream) in enumerate(due):
        arrivals.tokens[at, : len(stream.prompt)] = stream.prompt
        arrivals.sequence[at], arrivals.order[at], arrivals.priority[at] = sequence, order, stream.priority
        arrivals.prompt_len[at], arrivals.limit_len[at] = len(stream.prompt), stream.limit_len
        arrivals.namespace[at], arrivals.use_prefix[at] = stream.namespace, stream.use_prefix
        arrivals.tenant[at], arrivals.deadline[at] = stream.tenant, stream.deadline
    return arrivals


def random_streams(rng: np.random.Generator, spec: CacheSpec, count: int, *, vocab_size: int = 97) -> list[Stream]:
    """Streams that each fit the pool alone: every length, common beginnings, priorities, two namespaces, stops and aborts."""
    longest = min(spec.max_len, spec.usable_blocks * spec.block_size)
    common = rng.integers(0, vocab_size, longest).tolist()
    streams = []
    for arrives_at in np.sort(rng.integers(0, 2 * count, count)).tolist():
        limit_len = int(rng.integers(2, longest + 1))
        prompt_len = int(rng.integers(1, limit_len))
        shared = int(rng.integers(0, prompt_len + 1))
        stops_at = int(rng.integers(prompt_len + 1, limit_len + 1)) if rng.random() < 0.3 else None
        streams.append(
            Stream(
                prompt=(*common[:shared], *rng.integers(0, vocab_size, prompt_len - shared).tolist()),
                limit_len=limit_len,
                arrives_at=arrives_at,
                stops_at=stops_at,
                aborts_at=arrives_at + int(rng.integers(0, 20)) if rng.random() < 0.2 else None,
                priority=int(rng.integers(-1, 2)),
                namespace=(int(rng.integers(0, 2)), 0),
                use_prefix=bool(rng.random() < 0.8),
            )
        )
    return streams


def check_served(loop: HostLoop) -> None:
    """Raise AssertionError unless a finished loop served every stream its tokens and has every block back."""
    for index, stream in enumerate(loop.streams):
        want, got = expected_tokens(stream, loop.device.vocab_size), loop.tokens[index]
        complete = len(got) == len(want) or stream.aborts_at is not None
        expect(complete and got == want[: len(got)], f"stream {index} {stream} wanted {want}, got {got}")
        cached_len = loop.first_cached_len.get(index, 0)
        expect(
            0 <= cached_len < len(stream.prompt) or not cached_len,
            f"stream {index} found {cached_len} tokens of {len(stream.prompt)}",
        )
        expect(stream.use_prefix or not cached_len, f"stream {index} wanted no match and found {cached_len} tokens")
    plan = loop.plan
    if plan is not None:
        expect(
            plan.num_running == 0 and plan.num_waiting == 0, f"{plan.num_running} running and {plan.num_waiting} waiting of none"
        )
        back = plan.events.num_free + plan.events.num_evictable
        expect((back == np.array(loop.spec.num_blocks) - 1).all(), f"{back} of {loop.spec.num_blocks} blocks came back")


def check_scheduler(scheduler: Scheduler[Any, Any], cache: PrefixCache[Any], *, seed: int = 0, num_streams: int = 24) -> None:
    """Serve random streams and hold the scheduler to its seam: tokens, plans, blocks, bounded steps, one compilation.

    Args:
        scheduler: Built around `cache`.
        cache: Any conforming cache.
        seed: Of the workload.
        num_streams: Size of the workload.

    Raises:
        AssertionError: For the first broken promise.
    """
    planner = JittedPlanner(scheduler, cache)
    streams = random_streams(np.random.default_rng(seed), cache.spec, num_streams)
    for lag in (0, 1, 2):
        planner.reset()
        loop = HostLoop(planner, cache.spec, streams, lag=lag)
        # Worst case: each sequence alone, a token at a time, recomputed once for every token it makes.
        bound = sum(s.limit_len * s.limit_len + 8 for s in streams) + 4 * num_streams
        for _ in loop.run(bound):
            pass
        check_served(loop)
    expect(planner.trace_counts() == (1, 1), f"step and arrive compile once each, got {planner.trace_counts()}")
