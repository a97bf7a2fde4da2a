"""Plans of the jitted scheduler against those of the plain-Python one, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_core.specs import CacheSpec
from octavo_core.testing.device import Stream
from octavo_core.testing.scheduler import HostLoop, JittedPlanner, check_served
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import ChunkedScheduler, SchedulerConfig
from octavo_tools.plain_scheduler import PlainPlanner

pytestmark = pytest.mark.slow


def of(**options: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_arrivals": 3, "reservation": "none", **options})


# Pools from roomy to exactly one longest sequence; budgets 1 to 64; chunks larger and smaller than the budget; every policy.
SETUPS = {
    "roomy": (of(max_num_seqs=4, token_budget=16, chunk_size=5), CacheSpec((40,), 4, 6, 6)),
    "one sequence fills the pool": (of(max_num_seqs=4, token_budget=8, reservation="optimistic"), CacheSpec((7,), 4, 6, 6)),
    "budget of one token": (of(max_num_seqs=3, token_budget=1), CacheSpec((6,), 4, 5, 5)),
    "fewer tokens than rows": (of(max_num_seqs=5, token_budget=3, chunk_size=2, policy="edf"), CacheSpec((9,), 2, 5, 8)),
    "chunk beyond the budget": (
        of(max_num_seqs=6, token_budget=64, chunk_size=317, watermark_blocks=2, reservation="guaranteed"),
        CacheSpec((13, 11), 8, 7, 9),
    ),
    "priority under pressure": (of(max_num_seqs=6, token_budget=12, chunk_size=7, policy="priority"), CacheSpec((8,), 3, 8, 7)),
    "fair under pressure": (
        of(max_num_seqs=4, token_budget=12, chunk_size=7, policy="fair", tenant_weights=(1, 3), fair_quantum=5),
        CacheSpec((9,), 3, 8, 8),
    ),
    "long and short prompts": (
        of(
            max_num_seqs=6,
            token_budget=20,
            chunk_policy="adaptive",
            max_num_partial_prefills=3,
            long_prefill_token_threshold=6,
        ),
        CacheSpec((20,), 4, 8, 8),
    ),
}


class Lockstep:
    """Two planners given the same; their plans must be equal."""

    def __init__(self, one, other):
        self.one, self.other, self.preempted = one, other, 0

    def arrive(self, arrivals):
        self.one.arrive(arrivals)
        self.other.arrive(arrivals)

    def step(self, result):
        plan, want = self.one.step(result), self.other.step(result)
        for name, one, other in zip(plan._fields, plan, want, strict=True):
            pairs = zip(one, other, strict=True) if name == "events" else [(one, other)]
            assert all(np.array_equal(a, b) for a, b in pairs), f"{name}: jitted {one}, oracle {other}"
        return plan


@st.composite
def workloads(draw, longest, budget):
    edges = [n for n in (1, budget - 1, budget, budget + 1, longest - 1) if 1 <= n < longest]
    streams, arrives_at = [], 0
    for index in range(draw(st.integers(1, 10))):
        prompt_len = draw(st.sampled_from(edges) | st.integers(1, longest - 1))
        limit_len = draw(st.integers(prompt_len + 1, longest))
        arrives_at += draw(st.integers(0, 3))
        streams.append(
            {
                "prompt": tuple((7 * index + 3 * t) % 97 for t in range(prompt_len)),
                "limit_len": limit_len,
                "arrives_at": arrives_at,
                "stops_at": draw(st.none() | st.integers(prompt_len + 1, limit_len)),
                "aborts_at": draw(st.none() | st.integers(arrives_at, arrives_at + 25)),
                "priority": draw(st.integers(-1, 1)),
                "tenant": draw(st.integers(0, 2)),
                "deadline": draw(st.integers(0, 30)),
                "use_prefix": draw(st.booleans()),
            }
        )
    return streams


@pytest.fixture(scope="module", params=SETUPS)
def setup(request):
    config, spec = SETUPS[request.param]
    cache = SmallCache(spec)
    return config, spec, JittedPlanner(ChunkedScheduler(config, cache), cache)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_plan_equals_the_plain_schedulers_and_every_stream_gets_its_tokens_in_bounded_steps(setup, data):
    config, spec, planner = setup
    planner.reset()
    # Specs are read and streams built outside the strategy: runtime type checks draw random numbers, which hypothesis forbids there.
    longest = min(spec.max_len, spec.usable_blocks * spec.block_size)
    streams = [Stream(**s) for s in data.draw(workloads(longest, config.token_budget))]
    both = Lockstep(planner, PlainPlanner(config, spec))
    loop = HostLoop(both, spec, streams, lag=data.draw(st.integers(0, 2)), max_arrivals=3)
    # Alone, a stream takes its chunks and a step (and the lag) per token; preempted after each token, all its chunks again.
    bound = sum(s.limit_len * (s.limit_len + 3) + 8 for s in streams)
    for _ in loop.run(bound):
        pass
    check_served(loop)
    assert planner.trace_counts() == (1, 1)
