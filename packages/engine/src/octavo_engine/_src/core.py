"""The step loop, one turn at a time: take in, plan, dispatch, collect. Single-threaded; whoever calls `turn` owns it.

Who owns what: the queue and `Sequence` records belong to the host; a slot belongs to a sequence from its arrival until the plan
that releases it; blocks belong to the cache's state, which the planner owns; KV bytes to the runner. With overlap step k+1 is planned
and dispatched while step k runs, so what the host learns reaches the scheduler one or two steps late.

Size: the one loop, whose order of events is easier to follow in one place.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter, deque
from typing import Any

import jax
import msgspec
import numpy as np

from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.records import PlanCall, StepRecord
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FinishReason, ModelCard
from octavo_engine._src.collect import PromptScores, token_scores
from octavo_engine._src.dispatched import Dispatched
from octavo_engine._src.intake import Queue, fill_arrivals, fill_sampling
from octavo_engine._src.kv_events import KVEvents
from octavo_engine._src.logs import Logs, prefill_pairs
from octavo_engine._src.occupancy import Occupancy
from octavo_engine._src.offload import Offload
from octavo_engine._src.planner import Planner
from octavo_engine._src.recording import Recording
from octavo_engine._src.runner import ModelRunner
from octavo_engine._src.sequence import NO_DEADLINE, Sequence
from octavo_engine._src.turns import InFlight
from octavo_engine._src.validate import check_request
from octavo_engine.config import EngineConfig

_LOG = logging.getLogger(__name__)

_LOADING_S = 0.002
"""How long a turn waits where all there is to do is to wait for bytes."""


class EngineCore:
    """The engine without threads.

    Size: requests, planning, dispatch and collection share one set of books, which stay auditable in one place.

    Args:
        config: What was asked for.
        card: What is served.
        planner, runner: Compiled.
        sampling_template: NumPy arrays in the shape of the sampler's arrivals.
        logs: Where steps and finished sequences are written.
        kv_events: Told what each step changed in the cache; None: nobody is.
        overlap: The next step is planned and dispatched before this one is read: a plan knows the results up to the step before the last.
        offload: Tiers of KV below the device; None: there are none.
        recording: Told what the scheduler is told; None: nobody is.
    """

    def __init__(
        self,
        config: EngineConfig,
        card: ModelCard,
        planner: Planner,
        runner: ModelRunner,
        sampling_template: Any,
        logs: Logs,
        kv_events: KVEvents | None,
        *,
        overlap: bool,
        offload: Offload | None = None,
        recording: Recording | None = None,
    ) -> None:
        self._overlap, self.offload, self._recording = overlap, offload, recording
        self._ready_s = 0.0
        self.config, self.card = config, card
        self.planner, self._runner, self._logs, self._kv_events = planner, runner, logs, kv_events
        self._occupancy = Occupancy(planner.spec.max_sequences, planner.spec.block_size)
        self._sampling_template = sampling_template
        self._queue = Queue(
            policy=config.scheduling_policy,
            max_requests=config.max_num_queued_reqs,
            max_tokens=config.max_num_queued_tokens,
        )
        self._live: dict[str, Sequence] = {}
        self._slots: list[Sequence | None] = [None] * planner.spec.max_sequences
        self._free_slots = deque(range(planner.spec.max_sequences))
        self._leaving: list[int] = []
        self._result = planner.empty_result()
        self._calls: list[PlanCall] = []
        self._in_flight: deque[InFlight] = deque()
        self._waiting_in_plan = 0
        self._order = 0
        self._queue_checked_s = 0.0
        self._outbox: list[EngineOutput] = []
        self._started_s = time.monotonic()
        self._eos = frozenset(card.eos_token_ids)
        self._seeds = random.Random(config.seed or None)
        self._count = dict.fromkeys(("steps", "prompt", "generated", "queries", "hits", "preemptions", "preempted"), 0)
        self._gauges = {"running": 0, "free": planner.spec.num_blocks[0] - 1, "evictable": 0}

    # Requests ---------------------------------------------------------------------------------------------------------

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps, for those who measure it."""
        return self._runner

    def check(self, requests: list[EngineRequest], *, also_waiting: list[EngineRequest] | None = None) -> None:
        """Refuse requests that cannot be served, together: either all could be added or none. May be called from any thread.

        Args:
            requests: Newcomers.
            also_waiting: Requests that passed and are not added yet.

        Raises:
            RequestError: A request is wrong.
            OverloadedError: The queue has no room for all of them.
        """
        for request in requests:
            check_request(request, self.card)
        ahead = [len(r.prompt_ids) for r in also_waiting or ()]
        waiting = self._waiting_in_plan + len(ahead) + (0 if self.offload is None else self.offload.num_loading)
        self._queue.check_room([len(r.prompt_ids) for r in requests], waiting, sum(ahead))

    def add(self, request: EngineRequest) -> None:
        """Queue a request that `check` passed."""
        sampling = request.sampling
        most = self.card.max_model_len - len(request.prompt_ids)
        sequence = Sequence(
            request=request,
            order=self._order,
            limit_len=len(request.prompt_ids) + (most if sampling.max_tokens is None else min(sampling.max_tokens, most)),
            seed=self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed & (2**64 - 1),
            eos_token_ids=self._eos,
            arrival_s=request.arrival_s or time.monotonic(),
        )
        if request.deadline_s is not None:
            due_s = sequence.arrival_s + request.deadline_s - self._started_s
            sequence.deadline = int(max(-NO_DEADLINE, min(due_s * 100, NO_DEADLINE - 1)))
        self._order += 1
        self._live[request.request_id] = sequence
        may_load = self.offload is not None and self.config.enable_prefix_caching and not sequence.wants_prompt_scores
        if not (may_load and self.offload is not None and self.offload.begin(sequence)):
            self._queue.push(sequence)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, sequence.end(FinishReason.ABORT))

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        return bool(self._live or self._in_flight or self._leaving or self._outbox)

    # One turn ---------------------------------------------------------------------------------------------------------

    def turn(self) -> list[EngineOutput]:
        """Run one planned step and collect it (or, with steps in flight, the one before it)."""
        if self.offload is not None:
            return self._turn_with_tiers(self.offload)
        return self._turn()

    def _turn_with_tiers(self, offload: Offload) -> list[EngineOutput]:
        """Copies are begun before the turn, when nobody waits for what the one before it said."""
        offload.is_amid_turn = True
        offload.catch_up()
        if not self.has_work:
            offload.idle()
        outputs = self._turn()
        if not (outputs or self._in_flight) and 0 < offload.num_loading == len(self._live):
            offload.wait(_LOADING_S)
        offload.is_amid_turn = False
        return outputs

    def _turn(self) -> list[EngineOutput]:
        if not self.has_work:
            self._ready_s = 0.0
            return []
        plan, plan_s = self._plan()
        if int(plan.num_rows):
            self._dispatch(plan, plan_s)
        keep = 1 if self._overlap and int(plan.num_rows) else 0
        while len(self._in_flight) > keep:
            self._collect()
        return self._drain()

    def _plan(self) -> tuple[StepPlan, float]:
        """Give free slots to queued sequences and plan the next step; how long planning took."""
        self._end_those_that_waited_too_long()
        for arrived in self.offload.arrived() if self.offload is not None else ():
            self._queue.push(arrived)
        newcomers: list[Sequence] = []
        waiting = Counter[int]()
        if len(self._queue):  # in a steady step nobody is queued, and nobody need be counted
            waiting.update(s.request.tenant for s in self._slots if s is not None and s.started_s is None)
        slots = len(self._slots) - self.planner.max_rows
        while self._free_slots and len(newcomers) < self.planner.max_arrivals:
            sequence = self._queue.pop(waiting, slots)
            if sequence is None:
                break
            sequence.slot = self._free_slots.popleft()
            self._slots[sequence.slot] = sequence
            newcomers.append(sequence)
            waiting[sequence.request.tenant] += 1
        if newcomers:
            self._runner.begin(fill_sampling(jax.tree.map(np.copy, self._sampling_template), newcomers))
        if self.offload is not None:
            self.offload.admit(newcomers)
        arrivals = None
        if newcomers or self._waiting_in_plan:
            arrivals = fill_arrivals(self.planner.empty_arrivals(), newcomers, use_prefix=self.config.enable_prefix_caching)
        result, self._result = self._result, self.planner.empty_result()
        leaving, self._leaving = self._leaving, []
        plan, plan_s = self._run_planner(arrivals, result)
        self._follow(plan, leaving)
        return plan, plan_s

    def _end_those_that_waited_too_long(self) -> None:
        """Sequences that waited `max_queue_s` for their first step end with an error; looked for ten times in that time."""
        most_s, now_s = self.config.max_queue_s, time.monotonic()
        if not most_s or now_s < self._queue_checked_s + most_s / 10:
            return
        self._queue_checked_s = now_s
        late = [s for s in self._live.values() if s.started_s is None and now_s - s.arrival_s > most_s]
        for sequence in late:
            error = f"the request waited {now_s - sequence.arrival_s:.1f} s for its first step, {most_s:g} s are allowed; try again later"
            self._end(sequence, sequence.end(FinishReason.ERROR, error))

    def _run_planner(self, arrivals: Arrivals | None, result: StepResult) -> tuple[StepPlan, float]:
        start_s, offload = time.monotonic(), self.offload
        if offload is not None:
            offload.load()
        if self._recording is not None:
            self._recording.told(arrivals, result)
        if arrivals is not None:
            self.planner.arrive(arrivals)
        if offload is not None:
            offload.unload()
        plan = self.planner.step(result)
        if offload is not None:
            offload.lend(plan)
        return plan, time.monotonic() - start_s

    def _follow(self, plan: StepPlan, leaving: list[int]) -> None:
        """What a plan says of blocks and slots."""
        if self._recording is not None:
            self._recording.planned(plan)
            for slot in leaving:
                self._recording.left(slot)
            if int(plan.num_rows):
                self._calls = self._recording.take()
        self._occupancy.follow(plan, leaving)
        if self._kv_events is not None:  # while the slots of those who leave still name them
            self._kv_events.take(plan.events, self._slots)
        if self.offload is not None:
            self.offload.follow(plan, self._slots)
        for slot in leaving:
            self._slots[slot] = None
            self._free_slots.append(slot)
        self._waiting_in_plan = int(plan.num_waiting)
        self._gauges["running"] = int(plan.num_running)
        self._gauges["free"], self._gauges["evictable"] = int(plan.events.num_free[0]), int(plan.events.num_evictable[0])

    def _dispatch(self, plan: StepPlan, plan_s: float) -> None:
        num_rows = int(plan.num_rows)
        rows = [self._slots[slot] for slot in plan.sequence[:num_rows].tolist()]
        now_s = time.monotonic()
        found = [] if self._recording is None else self._recording.found_again(plan)
        for i, sequence in enumerate(rows):
            if sequence is not None and sequence.started_s is None:
                sequence.started_s = now_s
                found.append((sequence.slot, int(plan.cached_len[i])))
                self._note_first_step(sequence, int(plan.cached_len[i]))
                if self.offload is not None and sequence.cached_len:
                    self.offload.reuse(sequence, sequence.cached_len)
        preempted = self._note_preemption(int(plan.preempted), int(plan.lost_len))
        dispatched = self._runner.dispatch(plan)
        scores = self._score_prompts(dispatched, rows) if any(s is not None and s.wants_prompt_scores for s in rows) else []
        told = (self._calls, found)
        self._in_flight.append(InFlight(self._count["steps"], dispatched, rows, scores, plan_s, preempted, told))
        self._count["steps"] += 1

    def _note_first_step(self, sequence: Sequence, cached_len: int) -> None:
        sequence.cached_len = cached_len
        self._count["queries"] += sequence.prompt_len
        self._count["hits"] += cached_len
        self._count["prompt"] += sequence.prompt_len

    def _note_preemption(self, slot: int, lost_len: int) -> str | None:
        sequence = self._slots[slot] if slot >= 0 else None
        if self._recording is not None and slot >= 0:
            self._recording.preempted(slot)
        if sequence is None:
            return None
        sequence.preemptions += 1
        self._count["preemptions"] += 1
        self._count["preempted"] += lost_len
        _LOG.warning("preempted request %s: it gives up the KV of %d tokens", sequence.request.request_id, lost_len)
        return sequence.request.request_id

    def _score_prompts(self, dispatched: Dispatched, rows: list[Sequence | None]) -> list[PromptScores]:
        plan, out = dispatched.plan, []
        for i, sequence in enumerate(rows):
            if sequence is None or not sequence.wants_prompt_scores:
                continue
            first, last = int(plan.query_start[i]), int(plan.query_start[i + 1])
            position = int(plan.positions[first])
            begin = max(position, sequence.scored_len)
            end = min(position + last - first, sequence.prompt_len - 1)
            if begin < end:
                at = list(range(first + begin - position, first + end - position))
                targets = list(sequence.request.prompt_ids[begin + 1 : end + 1])
                out.append(PromptScores(sequence, targets, self._runner.score(dispatched, at, targets)))
                sequence.scored_len = end
        return out

    # Collecting -------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Read the oldest step in flight: extend its sequences, note who ended."""
        flight = self._in_flight.popleft()
        dispatched = flight.dispatched
        ids, ran = dispatched.wait()
        assert ran.ended_s is not None
        now_s, ended_s = time.monotonic(), ran.ended_s
        host_s = max(0.0, ran.started_s - self._ready_s) if self._ready_s else flight.plan_s
        step_s = ended_s - max(ran.started_s, self._ready_s)
        self._note_cost(flight, step_s)
        self._ready_s = ended_s
        for scores in flight.scores:
            scores.collect()
        ended = [flight.rows[row] for row in dispatched.ending]
        wanted = {
            i: s.request.sampling.logprobs
            for i, s in enumerate(ended)
            if s is not None and s.finish is None and s.request.sampling.logprobs is not None
        }
        scored = token_scores(ran.sampled, wanted) if ran.sampled is not None and wanted else {}
        for i, sequence in enumerate(ended):
            if sequence is not None and sequence.finish is None:
                self._accept(sequence, ids[i], scored.get(i), now_s)
        self._log_step(flight, ran.started_s, (step_s, host_s, time.monotonic() - now_s))

    def _note_cost(self, flight: InFlight, step_s: float) -> None:
        """Tell the scheduler how long the step took, from when the device was free for it."""
        plan = flight.dispatched.plan
        num_single = int(plan.num_single)
        if self.offload is not None:
            self.offload.learn(step_s, int(plan.num_tokens) - num_single)
        self._result = self._result._replace(
            step_s=np.float32(step_s),  # type: ignore[arg-type]
            num_decodes=np.int32(num_single),  # type: ignore[arg-type]
            num_prefill_tokens=np.int32(int(plan.num_tokens) - num_single),  # type: ignore[arg-type]
        )

    def _accept(self, sequence: Sequence, token: int, score: Any, now_s: float) -> None:
        self._result.accepted[sequence.slot] = 1  # type: ignore[index]
        self._result.token_ids[sequence.slot, 0] = token  # type: ignore[index]
        self._count["generated"] += 1
        output = sequence.accept(token, score, now_s)
        if sequence.finish is None:
            self._outbox.append(output)
        else:
            self._end(sequence, output)

    def _end(self, sequence: Sequence, output: EngineOutput) -> None:
        self._live.pop(sequence.request.request_id, None)
        self._outbox.append(output)
        if sequence.slot >= 0:
            self._result.finished[sequence.slot] = True  # type: ignore[index]
            self._leaving.append(sequence.slot)
        else:
            self._queue.discard(sequence)
        if self.offload is not None:
            self.offload.forget(sequence)
        self._logs.request(sequence, self._started_s, time.monotonic())

    def _drain(self) -> list[EngineOutput]:
        outbox, self._outbox = self._outbox, []
        return outbox

    # Looking in -------------------------------------------------------------------------------------------------------

    def _log_step(self, flight: InFlight, started_s: float, spent_s: tuple[float, float, float]) -> None:
        if not self._logs.wants_steps:
            return
        plan, dispatched = flight.dispatched.plan, flight.dispatched
        device_s, host_s, output_s = spent_s
        num_rows, num_single = int(plan.num_rows), int(plan.num_single)
        self._logs.step(
            StepRecord(
                step=flight.step,
                time_s=started_s - self._started_s,
                num_decodes=num_single,
                num_prefills=num_rows - num_single,
                prefill_tokens=int(plan.num_tokens) - num_single,
                context_tokens=int(plan.context_len[:num_rows].sum()),
                bucket_tokens=dispatched.bucket.tokens,
                bucket_rows=dispatched.bucket.rows,
                device_s=device_s,
                host_s=host_s,
                plan_s=flight.plan_s,
                output_s=output_s,
                num_running=int(plan.num_running),
                num_waiting=int(plan.num_waiting) + len(self._queue),
                num_free_blocks=int(plan.events.num_free[0]),
                preempted=flight.preempted,
                prefill_pairs=prefill_pairs(plan),
                calls=flight.told[0] or msgspec.UNSET,
                found=flight.told[1] or msgspec.UNSET,
            )
        )

    def stats(self) -> EngineStats:
        """Gauges and counters; the caller adds readiness."""
        spec, count, gauges = self.planner.spec, self._count, self._gauges
        usable = spec.num_blocks[0] - 1
        wasted, waste = self._occupancy.read()
        return EngineStats(
            num_running=gauges["running"] if self._live else 0,
            num_waiting=self._waiting_in_plan + len(self._queue) + (0 if self.offload is None else self.offload.num_loading),
            kv_usage=1.0 - (gauges["free"] + gauges["evictable"]) / usable,
            kv_wasted_slots=wasted,
            kv_waste=waste,
            num_free_blocks=gauges["free"],
            num_blocks=spec.num_blocks[0],
            block_size=spec.block_size,
            steps=count["steps"],
            prompt_tokens=count["prompt"],
            generation_tokens=count["generated"],
            prefix_queries_tokens=count["queries"],
            prefix_hits_tokens=count["hits"],
            preemptions=count["preemptions"],
            preempted_tokens=count["preempted"],
            kv_event_batches_dropped=0 if self._kv_events is None else self._kv_events.num_dropped,
            kv_tiers=[] if self.offload is None else self.offload.stats(),
        )
