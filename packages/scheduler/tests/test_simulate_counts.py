"""A simulation that only counts blocks, one native function, against the one that keeps every block by name."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.specs import CacheSpec
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import ChunkedScheduler, SchedulerConfig
from octavo_scheduler._src.sim_sweep import simulator
from octavo_scheduler.simulate import CostModel, CountingCache, HostRules, Setup, Simulator, make_trace, sweep

COST = CostModel((0.004,), decode_s=1e-4, prefill_s=2e-4, context_s=1e-6, host_s=3e-4)
BLOCKS, BLOCK_SIZE, SEQUENCES, MAX_BLOCKS = 20, 4, 6, 12

ENGINES = {
    "fcfs": (SchedulerConfig(max_num_seqs=4, token_budget=10, chunk_size=7, max_arrivals=2), HostRules()),
    "priority, two partial prefills": (
        SchedulerConfig(
            max_num_seqs=5,
            token_budget=9,
            policy="priority",
            max_num_partial_prefills=2,
            long_prefill_token_threshold=5,
            reservation="none",
            max_arrivals=3,
        ),
        HostRules(lag=0, max_queued_requests=4),
    ),
    "fair, slo": (
        SchedulerConfig(
            max_num_seqs=6,
            token_budget=16,
            policy="fair",
            tenant_weights=(1, 3),
            fair_quantum=8,
            chunk_policy="slo",
            max_arrivals=2,
        ),
        HostRules(max_queued_tokens=60),
    ),
    "edf, fewer tokens than rows": (
        SchedulerConfig(max_num_seqs=6, token_budget=3, policy="edf", reservation="none"),
        HostRules(lag=2, deadline_s=0.1, deadline_per_token_s=0.01),
    ),
}


class OnlyPlans:
    """A scheduler of which nothing is known but the seam."""

    def __init__(self, scheduler):
        self.init, self.step, self.arrive = scheduler.init, scheduler.step, scheduler.arrive


@pytest.fixture(
    scope="module", params=[name if name == "fair, slo" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def simulators(request):
    config, rules = ENGINES[request.param]
    rules = HostRules(**{**rules.__dict__, "use_prefix": False, "span": 48, "max_arrivals": config.max_arrivals})
    full = SmallCache(CacheSpec((BLOCKS,), BLOCK_SIZE, SEQUENCES, MAX_BLOCKS))
    counts = CountingCache(BLOCKS, BLOCK_SIZE, SEQUENCES)
    return (
        Simulator(OnlyPlans(ChunkedScheduler(config, full)), full, COST, rules),
        Simulator(ChunkedScheduler(config, counts), counts, COST, rules),
    )


@st.composite
def traces(draw):
    count = draw(st.integers(1, 12))

    def column(least, most):
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    prompt, output, slack = column(1, 30), column(1, 15), column(0, 3)
    limit = [p + o + s for p, o, s in zip(prompt, output, slack, strict=True)]
    return column(0, 30), prompt, output, {"limit_len": limit, "tenant": column(0, 1), "priority": column(0, 2)}


@settings(max_examples=8)
@given(drawn=traces())
def test_counting_simulates_what_named_blocks_do_step_by_step(simulators, drawn):
    arrival, prompt, output, others = drawn
    trace = make_trace("drawn", np.array(arrival) / 100, prompt, output, **others)
    (books, steps), (counted_books, counted_steps) = (simulator.run(trace, chunk=64) for simulator in simulators)
    for name, expected in steps._asdict().items():
        assert getattr(counted_steps, name).tolist() == expected.tolist(), name
    for name, expected in books._asdict().items():
        assert getattr(counted_books, name).tolist() == expected.tolist(), name


def test_a_sweep_of_what_decides_no_shape_compiles_once_and_says_what_each_engine_says():
    trace = make_trace("many", np.arange(16) / 100, [19] * 16, [6] * 16, tenant=[0, 1] * 8)
    base = Setup(SchedulerConfig(max_num_seqs=4, policy="fair", tenant_weights=(1, 1)), blocks=40, block_size=4, waiting=3)
    grid = {"token_budget": [8, 21], "chunk_size": [0, 5], "fair_quantum": [4, 400]}
    outcomes = sweep(trace, grid, base, COST)
    shared = simulator(base, COST, trace.span, 25, None)
    assert shared._run._cache_size() == 1
    assert len({outcome.summary()["makespan_s"] for outcome in outcomes}) > 3
    last = {name: values[-1] for name, values in grid.items()}
    alone = base.with_values(last | {"watermark_blocks": 1}).config
    full = SmallCache(CacheSpec((40,), 4, 7, 7))
    _, steps = Simulator(ChunkedScheduler(alone, full), full, COST, HostRules(use_prefix=False)).run(trace)
    assert outcomes[-1].label == last
    assert steps.end.tolist() == outcomes[-1].steps.end.tolist()
