"""What the scheduler promises, seen from the host: order, fairness, preemption, aborts, fixed shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.plan import Admitted, StepPlan, from_bytes, to_bytes
from octavo_core.specs import CacheSpec
from octavo_core.testing.device import Stream, check_plan
from octavo_core.testing.scheduler import (
    HostLoop,
    JittedPlanner,
    check_scheduler,
    check_served,
    empty_result,
    pack_arrivals,
    random_streams,
)
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import RUNNING, WAITING, ChunkedScheduler, SchedulerConfig

PRESSED = (
    SchedulerConfig(max_num_seqs=4, token_budget=16, chunk_size=6, max_arrivals=4, reservation="none"),
    CacheSpec((9,), 4, 6, 8),
)
ROOMY = SchedulerConfig(max_num_seqs=4, token_budget=16, chunk_size=6, max_arrivals=4), CacheSpec((60,), 4, 6, 8)


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((salt + 5 * t) % 97 for t in range(length))


@pytest.fixture
def pressed(make_setup):
    ready = make_setup(*PRESSED)
    ready.planner.reset()
    return ready


@pytest.fixture
def roomy(make_setup):
    ready = make_setup(*ROOMY)
    ready.planner.reset()
    return ready


def serve(ready, streams, **options) -> tuple[HostLoop, list[StepPlan]]:
    loop = HostLoop(ready.planner, ready.spec, streams, **options)
    plans = list(loop.run(4000))
    check_served(loop)
    return loop, plans


def test_it_conforms_to_the_scheduler_seam():
    cache = SmallCache(CacheSpec((9, 12), 4, 6, 6))
    check_scheduler(ChunkedScheduler(SchedulerConfig(max_num_seqs=4, token_budget=9, chunk_size=5), cache), cache)


def test_prompts_of_every_length_around_chunk_and_budget_are_served(make_setup):
    config = SchedulerConfig(max_num_seqs=4, token_budget=512, chunk_size=317)
    ready = make_setup(config, CacheSpec((160,), 16, 12, 65))
    lengths = [1, 2, 316, 317, 318, 511, 512, 513, 633, 634, 635, 1024]
    _, plans = serve(ready, [Stream(prompt(n, n), n + 3) for n in lengths])
    assert max(np.diff(p.query_start).max() for p in plans) == 317
    assert ready.planner.trace_counts() == (1, 1)


def test_a_chunk_larger_than_the_budget_is_reconciled_with_it():
    assert SchedulerConfig(token_budget=2048, chunk_size=4096).chunk_tokens == 2048
    assert SchedulerConfig(token_budget=2048, chunk_size=317).chunk_tokens == 317
    assert SchedulerConfig(token_budget=64).chunk_tokens == 64


def test_step_and_arrive_are_traced_once_whether_the_host_hands_over_numpy_or_jax_arrays(roomy):
    scheduler = ChunkedScheduler(roomy.config, SmallCache(roomy.spec))
    traces = []

    def counted(function):
        return jax.jit(lambda *args: (traces.append(function.__name__), function(*args))[1], donate_argnums=(0, 1))

    step, arrive = counted(scheduler.step), counted(scheduler.arrive)
    state, held = scheduler.init(), scheduler.cache.init()
    arrivals = pack_arrivals([(0, 0, Stream(prompt(5), 9))], roomy.spec.max_len, 4)
    for kind in (np.asarray, jnp.asarray):
        state, held = arrive(state, held, jax.tree.map(kind, arrivals))
        state, held, _ = step(state, held, jax.tree.map(kind, empty_result(6)))
    assert traces == ["arrive", "step"]


def test_a_plan_of_nothing_is_valid_and_survives_the_wire(roomy):
    plan = roomy.planner.step(empty_result(6))
    check_plan(plan, roomy.spec)
    assert (plan.num_rows, plan.num_tokens, plan.num_running, plan.num_waiting, plan.preempted) == (0, 0, 0, 0, -1)
    again = from_bytes(StepPlan, to_bytes(plan))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(plan), strict=True))


def test_a_long_prompt_never_holds_up_a_decode_row(roomy):
    streams = [
        Stream(prompt(2), 30),
        Stream(prompt(3), 30),
        Stream(prompt(28), 30, arrives_at=4),
        Stream(prompt(27), 30, arrives_at=4),
    ]
    loop = HostLoop(roomy.planner, roomy.spec, streams)
    for plan in loop.run(200):
        if 4 <= loop.num_steps <= 10:
            decoding = {s for s, stream in loop.stream_of.items() if stream < 2}
            assert decoding <= set(plan.sequence[: plan.num_single].tolist())
    check_served(loop)


def test_first_come_first_served_nobody_starts_before_an_earlier_one(pressed):
    streams = [Stream(prompt(20, i), 24 if i % 2 else 30) for i in range(5)]
    started: list[int] = []
    loop = HostLoop(pressed.planner, pressed.spec, streams)
    for plan in loop.run(1000):
        started += [i for s in plan.sequence[: plan.num_rows].tolist() if (i := loop.stream_of[s]) not in started]
    assert started == sorted(started)


def test_a_small_sequence_does_not_pass_a_large_one_at_the_head_of_the_line(pressed):
    streams = [Stream(prompt(20), 24), Stream(prompt(24), 30), Stream(prompt(1), 3)]
    loop = HostLoop(pressed.planner, pressed.spec, streams)
    first = loop.step()
    assert first.sequence[: first.num_rows].tolist() == [0]
    assert first.num_waiting == 2


def test_a_preempted_sequence_makes_a_token_before_it_is_preempted_again(pressed):
    streams = [Stream(prompt(4, i), 30 + i % 3) for i in range(6)]
    loop = HostLoop(pressed.planner, pressed.spec, streams)
    had: dict[int, int] = {}
    for plan in loop.run(4000):
        if plan.preempted >= 0:
            index = int(plan.preempted)
            stream, total = loop.stream_of[index], int(pressed.planner.state.guard_len[index])
            assert total > had.get(stream, 0), f"stream {stream} was preempted again at {total} tokens"
            had[stream] = total
    check_served(loop)
    assert had, "the pool was meant to be too small"


def test_the_first_in_policy_order_is_never_preempted(pressed):
    streams = [Stream(prompt(2, i), 32) for i in range(4)]
    loop = HostLoop(pressed.planner, pressed.spec, streams)
    preempted = []
    for plan in loop.run(4000):
        alive = sorted(loop.stream_of.values())
        if plan.preempted >= 0:
            preempted.append(loop.stream_of[int(plan.preempted)])
            assert preempted[-1] != alive[0]
    assert preempted


def test_what_a_preemption_costs_is_told(pressed):
    streams = [Stream(prompt(9, i), 32) for i in range(4)]
    loop = HostLoop(pressed.planner, pressed.spec, streams)
    before, told = None, []
    for plan in loop.run(4000):
        if plan.preempted >= 0:
            told.append(int(plan.lost_len))
            assert told[-1] == int(before[int(plan.preempted)]) > 0
        else:
            assert plan.lost_len == 0
        before = np.array(pressed.planner.state.computed_len)
    assert told


def test_a_preempted_row_takes_in_the_tokens_it_had_in_flight(pressed):
    _, plans = serve(pressed, [Stream(prompt(2, i), 32) for i in range(4)], lag=2)
    assert any(p.preempted >= 0 for p in plans)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("aborts_at", range(0, 24, 3))
def test_an_abort_at_any_moment_gives_every_block_back_in_that_step(pressed, aborts_at, lag):
    streams = [Stream(prompt(11, i), 30, aborts_at=aborts_at) for i in range(4)]
    loop, plans = serve(pressed, streams, lag=lag)
    assert plans[-1].events.num_free.tolist() == [8]
    assert loop.num_steps == aborts_at + 1


def test_a_finished_index_can_be_used_by_the_next_arrival_while_its_old_row_is_still_in_flight(roomy):
    streams = [Stream(prompt(3, i), 12, stops_at=5, arrives_at=2 * i) for i in range(12)]
    serve(roomy, streams, lag=2)


def test_nothing_is_left_free_for_the_first_sequence_but_the_watermark_for_those_that_join(make_setup):
    config = SchedulerConfig(max_num_seqs=4, token_budget=32, watermark_blocks=2)
    ready = make_setup(config, CacheSpec((9,), 4, 6, 8))
    ready.planner.reset()
    loop = HostLoop(ready.planner, ready.spec, [Stream(prompt(30), 32), Stream(prompt(1), 3)])
    assert [int(p.num_running) for p in (loop.step(), loop.step())] == [1, 1]
    ready.planner.reset()
    # 8 blocks: two each and a watermark of two let three run; a fourth would find the watermark only.
    loop = HostLoop(ready.planner, ready.spec, [Stream(prompt(6, i), 9) for i in range(4)])
    assert loop.step().num_running == 3


def test_rows_never_outnumber_max_num_seqs_and_arrivals_are_admitted_up_to_their_bound(make_setup):
    config = SchedulerConfig(max_num_seqs=3, token_budget=32, max_arrivals=2)
    ready = make_setup(config, CacheSpec((60,), 4, 8, 8))
    ready.planner.reset()
    loop = HostLoop(ready.planner, ready.spec, [Stream(prompt(3, i), 9) for i in range(6)], max_arrivals=8)
    assert [int(loop.step().num_running) for _ in range(4)] == [2, 3, 3, 3]


class FoundOnce(SmallCache):
    """Says of every sequence, the first time it is asked, that its first block was found; later that nothing was."""

    def admit(self, cache, sequence, tokens, lengths, namespace, tenant, want, reserve):
        cache, answer = super().admit(cache, sequence, tokens, lengths, namespace, tenant, want, reserve)
        # Its block 1 was never handed out when the first sequence asks.
        is_first = cache.owner[0, 1] < 0
        return cache, Admitted(jnp.where(is_first & (lengths > 4), 4, 0).astype(jnp.int32), answer.status)


@pytest.mark.parametrize(("use_prefix", "found"), [(True, 4), (False, 0)])
def test_found_tokens_are_not_computed_again_and_use_prefix_false_finds_none(use_prefix, found):
    cache = FoundOnce(CacheSpec((60,), 4, 6, 8))
    planner = JittedPlanner(ChunkedScheduler(SchedulerConfig(max_num_seqs=4, token_budget=16), cache), cache)
    planner.arrive(pack_arrivals([(2, 0, Stream(prompt(10), 12, use_prefix=use_prefix))], 32, 1))
    plan = planner.step(empty_result(6))
    check_plan(plan, cache.spec)
    assert (plan.num_tokens, plan.cached_len[0], plan.context_len[0]) == (10 - found, found, 10)
    assert plan.token_ids[: plan.num_tokens].tolist() == list(prompt(10)[found:])


def test_several_accepted_tokens_join_a_sequence_at_once(roomy):
    cache = SmallCache(roomy.spec)
    planner = JittedPlanner(ChunkedScheduler(roomy.config, cache), cache)
    planner.arrive(pack_arrivals([(1, 0, Stream(prompt(3), 20))], 32, 1))
    planner.step(empty_result(6, 3))
    result = empty_result(6, 3)
    result.accepted[1], result.token_ids[1] = 2, [7, 8, 9]
    planner.step(result)
    assert planner.state.tokens[1, :6].tolist() == [*prompt(3), 7, 8, 0]
    assert int(planner.state.known_len[1]) == 5


def test_results_for_indices_that_are_free_or_have_nothing_in_flight_are_ignored(roomy):
    roomy.planner.arrive(pack_arrivals([(1, 0, Stream(prompt(3), 20))], 32, 4))
    ones = np.ones(6, np.int32)
    roomy.planner.step(empty_result(6)._replace(accepted=ones, token_ids=ones[:, None]))
    assert int(roomy.planner.state.known_len[1]) == 3
    assert int(roomy.planner.state.in_flight[1]) == 1


def test_the_token_store_is_never_copied_by_a_step():
    config, spec = SchedulerConfig(max_num_seqs=8, token_budget=32), CacheSpec((100,), 8, 11, 13)
    cache = SmallCache(spec)
    scheduler = ChunkedScheduler(config, cache)
    step = jax.jit(scheduler.step, donate_argnums=(0, 1), compiler_options={"xla_cpu_copy_insertion_use_region_analysis": True})
    text = step.lower(scheduler.init(), cache.init(), empty_result(11)).compile().as_text()
    assert "s32[11,104]" in text
    assert not [line for line in text.splitlines() if "s32[11,104]" in line.split("=")[-1][:20] and " copy(" in line]


def test_a_scheduler_may_be_mapped_over_states():
    cache = SmallCache(ROOMY[1])
    scheduler = ChunkedScheduler(ROOMY[0], cache)
    arrivals = pack_arrivals([(0, 0, Stream(prompt(5), 9))], 32, 1)
    twice = jax.tree.map(lambda x: np.stack([x, x]), (scheduler.init(), cache.init(), arrivals, empty_result(6)))

    @jax.jit
    @jax.vmap
    def arrive_and_step(state, held, arrivals, result):
        return scheduler.step(*scheduler.arrive(state, held, arrivals), result)

    state, _, plan = arrive_and_step(*twice)
    assert plan.num_tokens.tolist() == [5, 5]
    assert state.status[:, 0].tolist() == [RUNNING, RUNNING]


def test_streams_of_every_kind_end_in_states_that_were_counted(pressed):
    loop = HostLoop(pressed.planner, pressed.spec, random_streams(np.random.default_rng(3), pressed.spec, 20))
    for plan in loop.run(4000):
        status = np.asarray(pressed.planner.state.status)
        assert (plan.num_running, plan.num_waiting) == ((status == RUNNING).sum(), (status == WAITING).sum())
        assert plan.num_running + plan.num_waiting == len(loop.stream_of)
    check_served(loop)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 0},
        {"token_budget": 0},
        {"chunk_size": -1},
        {"max_arrivals": 0},
        {"watermark_blocks": -1},
        {"policy": "lifo"},
        {"chunk_policy": "some"},
        {"reservation": "all"},
        {"tenant_weights": (1, 0)},
        {"tenant_weights": ()},
        {"step_sizes": (64, 32)},
        {"slo_prior_us": (1, 2, -3)},
        {"max_overtakes": 0},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SchedulerConfig(**options)


def test_more_rows_than_the_cache_has_sequences_are_refused():
    with pytest.raises(ConfigError, match="max_num_seqs is at most"):
        ChunkedScheduler(SchedulerConfig(max_num_seqs=7), SmallCache(CacheSpec((9,), 4, 6, 8)))
