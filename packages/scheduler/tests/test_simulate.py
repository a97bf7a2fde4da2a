"""What a simulation says, on cases small enough to work out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_scheduler import SchedulerConfig
from octavo_scheduler._src.sim_state import DONE, REFUSED
from octavo_scheduler._src.sim_sweep import points
from octavo_scheduler.simulate import (
    TICK_S,
    CostModel,
    Setup,
    StepLine,
    make_trace,
    pareto,
    parse_sweep,
    simulate,
    sweep,
    window_rates,
)

COST = CostModel((0.004,), decode_s=1e-4, prefill_s=2e-4, context_s=1e-6, pairs_s=1e-7, host_s=3e-4)
BASE = Setup(config=SchedulerConfig(max_num_seqs=3, token_budget=8), blocks=128, block_size=4)


def test_one_request_alone_takes_what_the_cost_model_says():
    outcome = simulate(make_trace("one", [0.0], [12], [3]), BASE, COST)
    first = 0.004 + 8 * 2e-4 + 8e-6 + 8 * 9 / 2 * 1e-7 + 3e-4
    second = 0.004 + 4 * 2e-4 + 12e-6 + (4 * 12 - 6) * 1e-7 + 3e-4
    third = 0.004 + 1e-4 + 13e-6 + 3e-4
    assert outcome.ttft_s == pytest.approx([first + second], abs=2 * TICK_S)
    assert outcome.tpot_s == pytest.approx([third + 0.5e-6], abs=2 * TICK_S)
    assert [(r.num_decodes, r.prefill_tokens, r.context_tokens) for r in outcome.records()] == [
        (0, 8, 8),
        (0, 4, 12),
        (1, 0, 13),
        (1, 0, 14),
    ]


def test_parts_of_a_tick_are_not_lost():
    outcome = simulate(make_trace("long", [0.0], [1], [400]), BASE, COST)
    assert outcome.makespan_s == pytest.approx(400 * (0.004 + 1e-4 + 3e-4) + sum(range(1, 401)) * 1e-6, abs=2 * TICK_S)


def test_what_the_trace_says_is_cached_is_not_computed():
    trace = make_trace("hits", [0.0, 1.0], [40, 40], [2, 2], cached_len=[0, 36])
    outcome = simulate(trace, BASE, COST)
    assert outcome.books.cached.tolist() == [0, 36]
    assert outcome.steps.prefill_tokens.sum() == 44
    assert outcome.summary()["cached_share"] == pytest.approx(36 / 80)
    without = simulate(trace, BASE.with_values({"use_prefix": False}), COST)
    assert without.books.cached.tolist() == [0, 0]


def test_a_bounded_queue_refuses_what_comes_beyond_it():
    trace = make_trace("surge", [0.0] * 12, [8] * 12, [4] * 12)
    outcome = simulate(trace, BASE.with_values({"waiting": 0, "max_queued_requests": 3}), COST)
    status = outcome.books.status.tolist()
    assert status == [DONE] * 3 + [REFUSED] * 9
    assert outcome.summary()["refused"] == 9
    assert len(outcome.ttft_s) == 3
    by_tokens = simulate(trace, BASE.with_values({"waiting": 0, "max_queued_tokens": 20}), COST)
    assert by_tokens.books.status.tolist() == [DONE] * 2 + [REFUSED] * 10


def test_a_request_that_can_never_fit_is_named():
    trace = make_trace("large", [0.0, 0.0], [10, 200], [4, 4])
    with pytest.raises(ConfigError, match=r"request 1 of large may have 204 tokens, but the pool holds 124"):
        simulate(trace, BASE.with_values({"blocks": 32}), COST)


def test_a_trace_longer_than_the_clock_is_refused():
    with pytest.raises(ConfigError, match="the clock holds 19327 s, days takes 90000 s"):
        simulate(make_trace("days", [0.0, 90_000.0], [4, 4], [1, 1]), BASE, COST)


def test_twice_the_load_is_served_by_the_program_that_served_once():
    trace = make_trace("load", np.arange(20) / 10, [9] * 20, [5] * 20)
    slow, fast = sweep(trace, {"load": [1.0, 4.0]}, BASE, COST)
    assert fast.summary()["ttft_s_p90"] > slow.summary()["ttft_s_p90"]
    assert fast.label == {"load": 4.0}
    assert fast.trace.arrival_s[-1] == pytest.approx(1.9 / 4)


@pytest.mark.slow
def test_a_sweep_in_two_processes_finds_what_one_finds():
    trace = make_trace("jobs", np.arange(6) / 50, [9] * 6, [5] * 6)
    grid = {"token_budget": [4, 8]}
    one, two = (sweep(trace, grid, BASE, COST, jobs=jobs) for jobs in (1, 2))
    assert [o.summary() for o in one] == [o.summary() for o in two]
    assert one[0].summary()["steps"] > one[1].summary()["steps"]


def test_a_sweep_says_what_it_does_not_know():
    base = Setup()
    assert parse_sweep("chunk-size=1K:2K,load=0.5:2,policy=fcfs", base) == {
        "chunk_size": [1024, 2048],
        "load": [0.5, 2.0],
        "policy": ["fcfs"],
    }
    assert parse_sweep("policy,token_budget,use_prefix", base)["token_budget"] == [1024, 2048, 4096]
    assert "priority" in parse_sweep("policy", base)["policy"]
    for text, finding in [
        ("token_buget", "nothing to sweep is called 'token_buget'; did you mean 'token_budget'"),
        ("blocks=many", "blocks"),
        ("load=x", "wanted a float for load, got 'x'"),
        ("use_prefix=2", "wanted a bool for use_prefix, got '2'"),
        ("chunk_size", "say which values to try, such as chunk_size=1:2:4"),
        ("", "names at least one setting"),
        ("policy=best", "policy is one of"),
    ]:
        with pytest.raises(ConfigError, match=finding):
            list(points(parse_sweep(text, base), base))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20))
def test_the_front_holds_exactly_the_values_that_nothing_beats(values):
    costs, gains = [float(c) for c, _ in values], [float(g) for _, g in values]
    front = {values[i] for i in pareto(costs, gains)}
    beaten = {(c, g) for c, g in values if any(a <= c and b >= g and (a, b) != (c, g) for a, b in values)}
    assert front == set(values) - beaten


def test_windows_count_useful_tokens_and_take_off_what_is_lost():
    at = np.arange(400, dtype=np.int32)
    nothing = {name: np.zeros(400, np.int32) for name in StepLine._fields}
    steps = StepLine(**{**nothing, "start": at * 1_000, "end": (at + 1) * 1_000, "num_decodes": np.ones(400, np.int32)})
    assert window_rates(steps, 1.0) == pytest.approx(100)
    lossy = steps._replace(
        lost=np.where(at == 200, 50, 0).astype(np.int32), prefill_tokens=np.where(at < 100, 3, 0).astype(np.int32)
    )
    rates = window_rates(lossy, 1.0)
    assert (rates[0], rates.min(), rates[-1]) == pytest.approx((400, 50, 100))
    assert len(window_rates(lossy, 1.0, until_s=2.0)) == 101
