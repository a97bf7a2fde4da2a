"""Plans of the jitted scheduler against those of the plain-Python one, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_core.testing.device import Stream
from octavo_core.testing.scheduler import HostLoop, check_served

pytestmark = pytest.mark.slow


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
                "use_prefix": draw(st.booleans()),
            }
        )
    return streams


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_plan_equals_the_oracles_and_every_stream_gets_its_tokens_in_bounded_steps(setup, oracle, data):
    setup.planner.reset()
    # Specs are read and streams built outside the strategy: runtime type checks draw random numbers, which hypothesis forbids there.
    longest = min(setup.spec.max_len, setup.spec.usable_blocks * setup.spec.block_size)
    streams = [Stream(**s) for s in data.draw(workloads(longest, setup.config.token_budget))]
    both = Lockstep(setup.planner, oracle.OraclePlanner(setup.config, setup.spec))
    loop = HostLoop(both, setup.spec, streams, lag=data.draw(st.integers(0, 2)), max_arrivals=3)
    # Alone, a stream takes its chunks and a step (and the lag) per token; preempted after each token, all its chunks again.
    bound = sum(s.limit_len * (s.limit_len + 3) + 8 for s in streams)
    for _ in loop.run(bound):
        pass
    check_served(loop)
    assert setup.planner.trace_counts() == (1, 1)
