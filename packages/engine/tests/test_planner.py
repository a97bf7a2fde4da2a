"""Scheduler and radix cache under one jit, as an engine runs them: any history, audited after every step."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_core.specs import CacheSpec
from octavo_core.testing.device import Stream
from octavo_core.testing.scheduler import HostLoop, check_served
from octavo_engine._src import planner as planner_module
from octavo_engine._src.packing import Packing
from octavo_engine._src.planner import Planner
from octavo_kvcache import RadixCache, audit
from octavo_scheduler import FREE, ChunkedScheduler, SchedulerConfig

SPEC = CacheSpec((12,), 4, 6, 8)
CONFIGS = {
    "fcfs": SchedulerConfig(max_num_seqs=4, token_budget=16, chunk_size=6, max_arrivals=3, reservation="none"),
    "lpm": SchedulerConfig(max_num_seqs=3, token_budget=12, max_arrivals=3, policy="lpm", max_overtakes=3),
    "fair": SchedulerConfig(
        max_num_seqs=4,
        token_budget=16,
        max_arrivals=3,
        policy="fair",
        tenant_weights=(1, 2),
        fair_quantum=9,
        chunk_policy="slo",
        step_sizes=(4, 8, 16),
        reservation="none",
    ),
}


@functools.cache
def planner_of(name: str) -> Planner:
    cache = RadixCache(SPEC)
    config = CONFIGS[name]
    planner = Planner(ChunkedScheduler(config, cache), cache, max_arrivals=3, max_rows=config.max_num_seqs)
    planner.compile()
    return planner


@st.composite
def workloads(draw):
    longest, streams, arrives_at = 32, [], 0
    common = draw(st.lists(st.integers(0, 5), min_size=longest, max_size=longest))
    for index in range(draw(st.integers(1, 9))):
        prompt_len = draw(st.integers(1, longest - 1))
        shared = draw(st.integers(0, prompt_len))
        limit_len = draw(st.integers(prompt_len + 1, longest))
        arrives_at += draw(st.integers(0, 3))
        streams.append(
            {
                "prompt": (*common[:shared], *[(7 * index + 3 * t) % 97 for t in range(prompt_len - shared)]),
                "limit_len": limit_len,
                "arrives_at": arrives_at,
                "stops_at": draw(st.none() | st.integers(prompt_len + 1, limit_len)),
                "aborts_at": draw(st.none() | st.integers(arrives_at, arrives_at + 30)),
                "tenant": draw(st.integers(0, 1)),
                "use_prefix": draw(st.booleans()),
            }
        )
    return streams


class Audited:
    """A planner whose cache is audited after each step, and whose ended sequences must hold nothing."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def arrive(self, arrivals):
        self.planner.arrive(arrivals)

    def step(self, result):
        plan = self.planner.step(result)
        state, cache = self.planner.state
        assert audit(cache, SPEC) == []
        held = np.asarray(cache.sequences.held)
        assert not held[np.asarray(state.status) == FREE].any(), "an ended sequence holds blocks"
        return plan


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_abort_anywhere_frees_everything_within_its_step_and_every_stream_gets_its_tokens(name, data):
    planner = planner_of(name)
    planner.reset()
    streams = [Stream(**s) for s in data.draw(workloads())]
    loop = HostLoop(Audited(planner), SPEC, streams, lag=data.draw(st.integers(0, 2)), max_arrivals=3)
    for _ in loop.run(sum(s.limit_len * (s.limit_len + 3) + 8 for s in streams)):
        pass
    check_served(loop)


class Beside(Audited):
    """Two planners, of which each plan and each state must be equal."""

    def __init__(self, planner: Planner, plain: Planner) -> None:
        super().__init__(planner)
        self.plain = plain

    def arrive(self, arrivals):
        super().arrive(arrivals)
        self.plain.arrive(arrivals)

    def step(self, result):
        plan = super().step(result)
        for ours, plain in zip(jax.tree.leaves(plan), jax.tree.leaves(self.plain.step(result)), strict=True):
            np.testing.assert_array_equal(ours, plain)
        for ours, plain in zip(jax.tree.leaves(self.planner.state), jax.tree.leaves(self.plain.state), strict=True):
            np.testing.assert_array_equal(ours, plain)
        return plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcfs", "fair"])
def test_xla_computes_in_place_what_it_computes_with_copies(name, monkeypatch):
    """Which arrays are copied is decided by an option that few programs use: what is served is compared with what it is without it."""
    cache = RadixCache(SPEC)
    plain = Planner(ChunkedScheduler(CONFIGS[name], cache), cache, max_arrivals=3, max_rows=CONFIGS[name].max_num_seqs)
    monkeypatch.setattr(planner_module, "_OPTIONS", {})
    plain.compile()
    planner = planner_of(name)
    planner.reset()
    rng = np.random.default_rng(5)
    prompts = [(*range(int(rng.integers(0, 9))), *rng.integers(0, 97, int(rng.integers(1, 20))).tolist()) for _ in range(24)]
    streams = [
        Stream(
            prompt=prompt,
            limit_len=len(prompt) + int(rng.integers(1, 32 - len(prompt))),
            arrives_at=int(rng.integers(0, 60)),
            aborts_at=None if i % 5 else 40,
            tenant=i % 2,
        )
        for i, prompt in enumerate(prompts)
    ]
    streams.sort(key=lambda stream: stream.arrives_at)
    loop = HostLoop(Beside(planner, plain), SPEC, streams, lag=1, max_arrivals=3)
    for _ in loop.run(4000):
        pass
    check_served(loop)


def test_a_step_is_compiled_once_and_copies_no_pool():
    spec = CacheSpec((515,), 8, 11, 13)
    cache = RadixCache(spec)
    planner = Planner(ChunkedScheduler(SchedulerConfig(max_num_seqs=8, token_budget=32), cache), cache, max_arrivals=2, max_rows=8)
    planner.compile()
    text = planner._step.as_text()
    assert "s32[515,8]" in text, "the pool's tokens were meant to be there"
    pools = re.compile(r"= \S*\[(515|515,8|515,2)\]\S* copy\(")
    assert [line for line in text.splitlines() if pools.search(line)] == []


def test_what_is_packed_comes_back_as_it_was():
    tree = {
        "flags": np.array([True, False]),
        "signed": np.array([[-1, 2]], np.int32),
        "lanes": np.array([2**32 - 1, 0], np.uint32),
        "seconds": np.float32(0.25),
        "large": np.arange(20_000, dtype=np.int32),
        "bytes": np.arange(3, dtype=np.uint8),
    }
    packing = Packing(tree)
    words, large = jax.tree.map(np.asarray, jax.jit(packing.pack)(tree))
    assert words.shape == (7,)
    assert len(large) == 2
    for again in (jax.jit(packing.unpack)(words, large), packing.unpack_host(words, large)):
        same = jax.tree.map(lambda a, b: np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype, tree, again)
        assert all(jax.tree.leaves(same)), same
    small = {name: tree[name] for name in ("flags", "signed", "lanes", "seconds")}
    assert np.array_equal(Packing(small).pack_host(small), np.asarray(jax.jit(Packing(small).pack)(small)[0]))
