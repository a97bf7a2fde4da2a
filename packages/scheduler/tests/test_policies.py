"""What each policy promises, seen from the host: who goes first, who gives way, what is kept for whom."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import CacheSpec
from octavo_core.testing.device import Stream
from octavo_core.testing.scheduler import HostLoop, JittedPlanner, check_served, random_streams
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import WAITING, ChunkedScheduler, SchedulerConfig

PRESSED = CacheSpec((9,), 4, 6, 8)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt + 5 * t) % 97 for t in range(length))


def order_of_starts(loop) -> list[int]:
    order: list[int] = []
    for plan in loop.run(400):
        order += [i for s in plan.sequence[: plan.num_rows].tolist() if (i := loop.stream_of[s]) not in order]
    check_served(loop)
    return order


def test_priority_goes_before_arrival_and_arrival_breaks_ties(make_setup):
    config = SchedulerConfig(max_num_seqs=1, token_budget=16, policy="priority")
    ready = make_setup(config, CacheSpec((60,), 4, 6, 8))
    ready.planner.reset()
    streams = [Stream(prompt(3, i), 5, priority=p) for i, p in enumerate([2, 1, 0, 1])]
    loop = HostLoop(ready.planner, ready.spec, streams)
    assert order_of_starts(loop) == [2, 1, 3, 0]


def test_nobody_is_preempted_where_all_a_sequence_may_write_is_reserved(make_setup):
    config = SchedulerConfig(max_num_seqs=4, token_budget=16, max_arrivals=4, reservation="guaranteed")
    ready = make_setup(config, PRESSED)
    for seed in range(4):
        ready.planner.reset()
        loop = HostLoop(ready.planner, ready.spec, random_streams(np.random.default_rng(seed), ready.spec, 12))
        assert all(plan.preempted < 0 for plan in loop.run(2000))
        check_served(loop)


def test_the_estimate_rises_with_preemptions_and_falls_with_time(make_setup):
    config = SchedulerConfig(max_num_seqs=4, token_budget=16, max_arrivals=4)
    ready = make_setup(config, CacheSpec((22,), 4, 6, 20))
    ready.planner.reset()
    ready.planner.state = ready.planner.state._replace(growth=np.int32(100))
    loop = HostLoop(ready.planner, ready.spec, [Stream(prompt(2, i), 79) for i in range(4)])
    growth = [100]
    for plan in loop.run(2000):
        growth.append(int(ready.planner.state.growth))
        assert growth[-1] == (min(1000, 2 * growth[-2]) if plan.preempted >= 0 else max(100, growth[-2] - 1))
    check_served(loop)
    assert max(growth) > 190, "somebody was meant to be preempted"


def test_the_earliest_deadline_goes_first(make_setup):
    ready = make_setup(SchedulerConfig(max_num_seqs=1, token_budget=16, policy="edf"), CacheSpec((60,), 4, 6, 8))
    ready.planner.reset()
    streams = [Stream(prompt(3, i), 5, deadline=d) for i, d in enumerate([50, 40, 7, 40])]
    assert order_of_starts(HostLoop(ready.planner, ready.spec, streams)) == [2, 1, 3, 0]


class Lengths(SmallCache):
    """Says that as many tokens are cached as a sequence's first token says, and finds none of them."""

    def match(self, cache, tokens, lengths, namespace, tenant):
        return jnp.where(lengths > 1, tokens[:, 0], 0)


def test_the_longest_cached_prefix_goes_first_and_nobody_is_passed_more_often_than_allowed():
    cache = Lengths(CacheSpec((60,), 4, 16, 8))
    config = SchedulerConfig(max_num_seqs=1, token_budget=16, policy="lpm", max_overtakes=4, max_arrivals=2)
    planner = JittedPlanner(ChunkedScheduler(config, cache), cache)
    lengths = [1, 5, 9, 7, 9, 9, 9, 9, 9, 9, 9]
    streams = [Stream((n, 3, 4), 5) for n in lengths]
    order = order_of_starts(HostLoop(planner, cache.spec, streams, max_arrivals=2))
    assert order.index(2) < order.index(3)
    for stream in range(len(lengths)):
        assert sum(later > stream for later in order[: order.index(stream)]) <= 4
    assert order != sorted(order)


def test_lpm_is_refused_where_the_cache_cannot_say_how_long_a_prefix_is():
    with pytest.raises(ConfigError, match="lpm wants a cache"):
        ChunkedScheduler(SchedulerConfig(max_num_seqs=4, policy="lpm"), SmallCache(CacheSpec((9,), 4, 6, 8)))


QUANTUM = 24


@pytest.mark.parametrize("num_greedy", [4, 12])
@pytest.mark.parametrize("arrives_at", [1, 9, 30])
@pytest.mark.parametrize("weights", [(1, 1), (3, 1)])
def test_a_greedy_tenant_cannot_hold_up_a_light_one_beyond_the_bound(make_setup, num_greedy, arrives_at, weights):
    """The bound: the greedy one is served the quantum (its weight times), then a row gives way; each step of it serves a token at least."""
    config = SchedulerConfig(
        max_num_seqs=2,
        token_budget=8,
        policy="fair",
        tenant_weights=weights,
        fair_quantum=QUANTUM,
        max_arrivals=4,
        reservation="none",
    )
    ready = make_setup(config, CacheSpec((40,), 4, 16, 16))
    ready.planner.reset()
    greedy = [Stream(prompt(6, i), 64) for i in range(num_greedy)]
    light = Stream(prompt(12, 50), 20, arrives_at=arrives_at, tenant=1)
    loop = HostLoop(ready.planner, ready.spec, [*greedy, light], max_arrivals=4)
    started = first = None
    for _ in loop.run(4000):
        there = num_greedy in loop.stream_of.values()
        started = loop.num_steps if there and started is None else started
        if there and first is None and len(loop.tokens[num_greedy]) > 12:
            first = loop.num_steps
    check_served(loop)
    # Two rows are served 2 × DECODE_COST a step: then one gives way (and another, were the pool full), and the prompt takes 2 chunks.
    bound = weights[0] * QUANTUM // 4 + 2 + 2 + 2
    assert first - started <= bound


def test_tenants_that_ask_for_more_than_there_is_are_served_by_their_weights(make_setup):
    config = SchedulerConfig(
        max_num_seqs=4, token_budget=8, policy="fair", tenant_weights=(1, 3), fair_quantum=QUANTUM, max_arrivals=4
    )
    ready = make_setup(config, CacheSpec((60,), 4, 64, 16))
    ready.planner.reset()
    streams = [Stream(prompt(6, i), 24 + i % 5, tenant=i % 2, arrives_at=i // 4) for i in range(60)]
    loop = HostLoop(ready.planner, ready.spec, streams, max_arrivals=4)
    made, before = np.zeros(2), np.zeros(len(streams))
    for _ in loop.run(4000):
        has = np.array([len(loop.tokens[i]) for i in range(len(streams))])
        waits = np.asarray(ready.planner.state.status) == WAITING
        if {streams[i].tenant for s, i in loop.stream_of.items() if waits[s]} == {0, 1} and loop.num_steps > 20:
            made += [(has - before)[tenant::2].sum() for tenant in range(2)]
        before = has
    check_served(loop)
    assert made.sum() > 300
    assert 2.4 <= made[1] / made[0] <= 3.6
