"""The simulation, one program, against an engine and its clock in plain Python around the jitted scheduler."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.plan import Arrivals, StepResult
from octavo_core.specs import CacheSpec
from octavo_core.testing.scheduler import JittedPlanner
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import ChunkedScheduler, SchedulerConfig
from octavo_scheduler._src.sim_state import TICK_S, blank_arrivals, blank_result
from octavo_scheduler.simulate import CostModel, CountingCache, HostRules, Simulator, make_trace

COST = CostModel((0.004,), decode_s=1e-4, prefill_s=2e-4, context_s=1e-6, pairs_s=1e-7, host_s=3e-4)
SPEC = CacheSpec((24,), 4, 6, 12)
CONFIG = SchedulerConfig(max_num_seqs=4, token_budget=10, chunk_size=7, max_arrivals=2)


class PlainEngine:
    """Serves a trace with a planner; a request is `[arrival, prompt_len, output_len, limit_len]` and its book a dict."""

    def __init__(self, planner, spec, cost, rules):
        self.planner, self.spec, self.cost, self.rules = planner, spec, cost, rules

    def run(self, trace):
        queue = collections.deque(range(len(trace)))
        arrivals = [round(at / TICK_S) for at in trace.arrival_s]
        books = [{"made": 0, "gaps": [], "preemptions": 0} for _ in queue]
        slots, results = {}, collections.deque([[]] * (self.rules.lag + 1))
        now, waiting, lines = 0.0, 0, []
        for _ in range(100_000):
            if all("end" in book for book in books):
                return books, lines
            if not slots and queue:
                now = max(now, arrivals[queue[0]])
            free = [s for s in range(self.spec.max_sequences) if s not in slots]
            new = []
            while queue and free and len(new) < self.rules.max_arrivals and arrivals[queue[0]] <= int(now):
                new.append((free.pop(0), queue.popleft()))
            slots.update(new)
            if new or waiting:
                self.planner.arrive(self.arrivals(new, trace))
            told = results.popleft()
            plan = self.planner.step(self.result(told))
            waiting, start = int(plan.num_waiting), int(now)
            rows = int(plan.num_rows)
            if rows:
                now += (self.seconds(plan) + self.cost.host_s) / TICK_S
                lines.append((start, int(plan.num_single), int(plan.num_tokens), int(plan.num_running)))
            results.append(self.note(plan, rows, slots, books, start, int(now), trace))
            for slot, _, ends in told:
                if ends:
                    del slots[slot]
        raise AssertionError("the plain engine does not end")

    def seconds(self, plan):
        rows = int(plan.num_rows)
        query, context = np.diff(plan.query_start)[:rows], plan.context_len[:rows]
        pairs = sum(q * c - q * (q - 1) / 2 for q, c in zip(query.tolist(), context.tolist(), strict=True) if q > 1)
        decode = int(plan.num_single)
        cost = self.cost
        prefill = int(plan.num_tokens) - decode
        return (
            cost.base_s[0]
            + cost.decode_s * decode
            + cost.prefill_s * prefill
            + cost.context_s * context.sum()
            + cost.pairs_s * pairs
        )

    def note(self, plan, rows, slots, books, start, end, trace):
        told = []
        if plan.preempted >= 0 and int(plan.preempted) in slots:
            books[slots[int(plan.preempted)]]["preemptions"] += 1
        for row in range(rows):
            slot = int(plan.sequence[row])
            book = books[slots[slot]]
            if "end" in book:
                continue
            book.setdefault("started", start)
            if plan.sample_rows[row] < 0:
                continue
            book["made"] += 1
            book["gaps"] += [end - book["last"]] if "last" in book else []
            book["last"] = end
            book.setdefault("first", end)
            ends = book["made"] == trace.output_len[slots[slot]]
            if ends:
                book["end"] = end
            told.append((slot, book["made"], ends))
        return told

    def arrivals(self, new, trace) -> Arrivals:
        empty = blank_arrivals(self.rules.max_arrivals, self.spec.max_len)
        filled = {name: np.array(value) for name, value in empty._asdict().items()}
        for at, (slot, request) in enumerate(new):
            filled["sequence"][at], filled["order"][at] = slot, request
            filled["prompt_len"][at], filled["limit_len"][at] = trace.prompt_len[request], trace.limit_len[request]
            filled["tenant"][at], filled["priority"][at] = trace.tenant[request], trace.priority[request]
        return Arrivals(**filled)

    def result(self, told) -> StepResult:
        empty = {name: np.array(value) for name, value in blank_result(self.spec.max_sequences)._asdict().items()}
        for slot, made, ends in told:
            empty["accepted"][slot], empty["token_ids"][slot, 0], empty["finished"][slot] = 1, made, ends
        return StepResult(**empty)


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def engines(request):
    """The same engine three times, compiled once: plain, simulated, and simulated with blocks only counted."""
    rules = HostRules(lag=request.param, max_arrivals=2, span=48)
    small, counting = SmallCache(SPEC), CountingCache(24, 4, 6)
    plain = PlainEngine(JittedPlanner(ChunkedScheduler(CONFIG, small), small), SPEC, COST, rules)
    return plain, *(Simulator(ChunkedScheduler(CONFIG, cache), cache, COST, rules) for cache in (small, counting))


@st.composite
def traces(draw):
    count = draw(st.integers(1, 9))
    arrival = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    prompt = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
    output = draw(st.lists(st.integers(1, 15), min_size=count, max_size=count))
    slack = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    return arrival, prompt, output, [p + o + s for p, o, s in zip(prompt, output, slack, strict=True)]


@settings(max_examples=8)
@given(drawn=traces())
def test_a_simulated_engine_does_at_each_time_what_a_plain_one_does(engines, drawn):
    arrival, prompt, output, limit = drawn
    trace = make_trace("drawn", np.array(arrival) / 100, prompt, output, limit_len=limit)
    plain, *simulators = engines
    plain.planner.reset()
    books, lines = plain.run(trace)
    for simulator in simulators:
        found, steps = simulator.run(trace, chunk=64)
        assert found.made.tolist() == trace.output_len.tolist()
        for name in ("started", "first", "last", "preemptions"):
            assert getattr(found, name) == pytest.approx(np.array([b[name] for b in books]), abs=1), name
        assert found.gap == pytest.approx(np.array([max(b["gaps"], default=0) for b in books]), abs=2)
        tokens = steps.num_decodes + steps.prefill_tokens
        simulated = list(zip(steps.num_decodes.tolist(), tokens.tolist(), steps.num_running.tolist(), strict=True))
        # A step planned before the last token was known is computed in vain.
        assert len(lines) <= len(simulated) <= len(lines) + simulator.rules.lag
        assert simulated[: len(lines)] == [line[1:] for line in lines]
        assert steps.start[: len(lines)] == pytest.approx(np.array([line[0] for line in lines]), abs=1)
