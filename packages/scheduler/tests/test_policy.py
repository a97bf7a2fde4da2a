"""The formulas of a step as properties: who computes how much, and who gives way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.testing.scheduler import empty_result
from octavo_scheduler import FREE, RUNNING, WAITING, SchedulerConfig, SchedulerState, choose_victim, query_lens
from octavo_scheduler._src import chunks
from octavo_scheduler._src.policy import promised_blocks, wanted_blocks
from octavo_scheduler._src.state import empty_state

SEQUENCES = 8
LENGTHS = st.lists(st.integers(0, 40), min_size=SEQUENCES, max_size=SEQUENCES)
CONFIGS = [
    SchedulerConfig(token_budget=1),
    SchedulerConfig(token_budget=6, chunk_size=4),
    SchedulerConfig(token_budget=32, chunk_size=317),
    SchedulerConfig(token_budget=64, chunk_size=7),
]
LIMITED = [
    SchedulerConfig(token_budget=64, max_num_partial_prefills=2),
    SchedulerConfig(token_budget=64, long_prefill_token_threshold=9, max_long_partial_prefills=1),
    SchedulerConfig(token_budget=30, max_num_partial_prefills=3, long_prefill_token_threshold=5, max_long_partial_prefills=2),
]


UNSEEN = np.array(chunks.assumed(SchedulerConfig()))


@st.composite
def states(draw):
    """Any mixture a step may meet: more than one token to go only with nothing in flight, or after a preemption."""
    status = draw(st.lists(st.sampled_from([FREE, WAITING, RUNNING, RUNNING]), min_size=SEQUENCES, max_size=SEQUENCES))
    in_flight = draw(st.lists(st.integers(0, 2), min_size=SEQUENCES, max_size=SEQUENCES))
    known, left, room = draw(LENGTHS), draw(LENGTHS), draw(LENGTHS)
    single = draw(st.lists(st.booleans(), min_size=SEQUENCES, max_size=SEQUENCES))
    total = np.array(known) + 1 + in_flight
    to_go = np.where(single, 1, np.minimum(np.array(left) + 1, total))
    fields = {name: np.zeros(SEQUENCES, np.int32) for name in SchedulerState._fields}
    fields |= {"known_len": np.array(known) + 1, "in_flight": in_flight, "status": status, "computed_len": total - to_go}
    fields |= {"limit_len": total + room, "guard_len": np.where(draw(st.booleans()), total, 0)}
    fields["by_rank"] = draw(st.permutations(range(SEQUENCES)))
    numbers = {name: np.asarray(value, np.int32) for name, value in fields.items()}
    numbers |= {"tokens": np.zeros((SEQUENCES, 64), np.int32), "namespace": np.zeros((SEQUENCES, 2), np.uint32)}
    numbers |= {name: np.int32(0) for name in ("growth", "claim", "cursor")}
    numbers |= {"costs": UNSEEN, "growth": np.int32(draw(st.integers(100, 1000)))}
    numbers |= {"priority": np.array(draw(LENGTHS), np.int32) % 3, "found_len": numbers["computed_len"] // 4}
    return SchedulerState(**numbers | {"use_prefix": np.ones(SEQUENCES, bool)})


@functools.cache
def jitted(config: SchedulerConfig):
    return jax.jit(lambda state: query_lens(state, config))


def split(state: SchedulerState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens to go, is a decode row, is a prefill row) of each sequence."""
    total = state.known_len + state.in_flight
    to_go = total - state.computed_len
    is_open = (state.status == RUNNING) & (total < state.limit_len)
    return to_go, is_open & (to_go == 1), is_open & (to_go > 1) & (state.in_flight == 0)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"budget {c.token_budget} chunk {c.chunk_size}")
@given(state=states())
def test_n_decode_rows_come_first_and_take_one_token_each_while_the_budget_lasts(config, state):
    query_len = np.asarray(jitted(config)(state))
    _, decodes, _ = split(state)
    assert query_len[decodes].sum() == min(decodes.sum(), config.token_budget)
    assert (query_len[decodes] <= 1).all()
    in_order = [query_len[s] for s in state.by_rank if decodes[s]]
    assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"budget {c.token_budget} chunk {c.chunk_size}")
@given(state=states())
def test_c_avail_is_what_decodes_leave_of_the_budget_and_chunks_fill_it_as_far_as_they_can(config, state):
    query_len = np.asarray(jitted(config)(state))
    to_go, decodes, prefills = split(state)
    c_avail = max(0, config.token_budget - decodes.sum())
    asked = np.minimum(to_go, config.chunk_tokens)[prefills].sum()
    assert query_len[prefills].sum() == min(c_avail, asked)
    assert query_len.sum() <= config.token_budget


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"budget {c.token_budget} chunk {c.chunk_size}")
@given(state=states())
def test_c_p_is_the_least_of_tokens_to_go_chunk_size_and_what_is_left_in_policy_order(config, state):
    query_len = np.asarray(jitted(config)(state))
    to_go, decodes, prefills = split(state)
    left = max(0, config.token_budget - int(decodes.sum()))
    for s in state.by_rank:
        if prefills[s]:
            assert query_len[s] == min(to_go[s], config.chunk_size or config.token_budget, left)
            left -= query_len[s]
    assert not query_len[~decodes & ~prefills].any()


@given(state=states())
def test_a_chunk_never_reaches_a_token_in_flight(state):
    query_len = np.asarray(jitted(CONFIGS[2])(state))
    many = query_len > 1
    assert (state.computed_len + query_len <= state.known_len)[many].all()


@pytest.mark.parametrize("config", LIMITED, ids=str)
@given(state=states())
def test_no_more_prompts_and_no_more_long_ones_than_allowed_and_short_ones_pass(config, state):
    query_len = np.asarray(jitted(config)(state))
    to_go, decodes, prefills = split(state)
    threshold = config.long_prefill_token_threshold or 10**6
    left, prompts, long_ones = config.token_budget - int(decodes.sum()), 0, 0
    for s in state.by_rank:
        if not prefills[s]:
            continue
        long_ones += to_go[s] > threshold
        if to_go[s] > threshold and long_ones > config.max_long_partial_prefills:
            assert query_len[s] == 0
            continue
        prompts += 1
        if config.max_num_partial_prefills and prompts > config.max_num_partial_prefills:
            assert query_len[s] == 0
            continue
        assert query_len[s] == min(to_go[s], threshold, left)
        left -= query_len[s]


@given(num_decodes=st.integers(0, 100), chunk_size=st.sampled_from([0, 300, 700, 1500, 4096]))
def test_adaptive_chunks_are_2048_then_1024_above_32_decodes_and_512_above_64(num_decodes, chunk_size):
    config = SchedulerConfig(token_budget=4096, chunk_size=chunk_size, chunk_policy="adaptive")
    want = 512 if num_decodes > 64 else 1024 if num_decodes > 32 else 2048
    assert int(chunks.chunk_limit(jnp.int32(num_decodes), config)) == min(want, chunk_size or 4096)


LEARN = jax.jit(chunks.learn)
SLO = SchedulerConfig(chunk_policy="slo")


def seen(samples, config=SLO) -> jax.Array:
    """The costs after steps of (decode rows, prompt tokens, seconds)."""
    costs = chunks.assumed(config)
    for sample in samples:
        costs = LEARN(costs, seen_step(*sample))
    return costs


def seen_step(num_decodes, num_prefill_tokens, step_s):
    counts = {"num_decodes": np.int32(num_decodes), "num_prefill_tokens": np.int32(num_prefill_tokens)}
    return empty_result(1)._replace(step_s=np.float32(step_s), **counts)


COSTS = st.tuples(st.floats(1e-3, 0.1), st.floats(1e-5, 2e-3), st.floats(1e-6, 1e-3))


@settings(deadline=None, max_examples=25)
@given(truth=COSTS, seed=st.integers(0, 99))
def test_slo_learns_what_steps_cost(truth, seed):
    rng = np.random.default_rng(seed)
    samples = [(n := int(rng.integers(0, 64)), c := int(rng.integers(0, 1024)), truth @ np.array([1, n, c])) for _ in range(60)]
    found = np.array(chunks.solve(seen(samples)))
    # Judged by what they are for: the time of a step.
    for n, c in ((0, 1000), (64, 0), (32, 500)):
        assert found @ [1, n, c] == pytest.approx(np.array(truth) @ [1, n, c], rel=0.1, abs=1e-3)


@settings(deadline=None, max_examples=50)
@given(
    costs=COSTS,
    num_decodes=st.integers(0, 64),
    target_ms=st.integers(1, 400),
    block_size=st.sampled_from([16, 32]),
    sizes=st.sampled_from([(), (32, 64, 128, 256, 512)]),
)
def test_slo_takes_the_largest_chunk_under_the_target_and_at_least_a_quarter_of_a_block(
    costs, num_decodes, target_ms, block_size, sizes
):
    config = SchedulerConfig(
        token_budget=512,
        chunk_policy="slo",
        target_itl_ms=target_ms,
        step_sizes=sizes,
        slo_prior_us=tuple(round(1e6 * c) for c in costs),
    )
    base, alpha, beta = (float(c) for c in chunks.solve(chunks.assumed(config)))
    room = int(chunks.available(jnp.int32(num_decodes), chunks.assumed(config), config, block_size))
    assert room <= 512 - num_decodes
    if not num_decodes:
        assert room == 512
        return
    least = block_size // chunks.LEAST
    if room > least and not sizes:
        assert base + alpha * num_decodes + beta * (room - 1) <= target_ms / 1e3 * 1.001
    if room < 512 - num_decodes and not sizes and beta > 1e-8:
        assert base + alpha * num_decodes + beta * (room + 2) >= target_ms / 1e3 * 0.999
    assert room >= min(least, 512 - num_decodes)
    if sizes:
        assert num_decodes + room in sizes


@pytest.mark.parametrize("num_decodes", [1, 8, 32])
@pytest.mark.parametrize("growth_ms", [0.0, 1.0, 4.0])
def test_slo_keeps_to_its_target_while_a_long_prompt_makes_every_step_dearer(num_decodes, growth_ms):
    """A token of a prompt of 6,000 costs 2 ms, and more the more context it looks at; decode steps are seen before, none between."""
    config = SchedulerConfig(chunk_policy="slo", token_budget=512, slo_prior_us=(10_000, 2_000, 2_000))
    idle_s = 24e-3 + 2.3e-3 * num_decodes
    costs, available, computed, longest = (
        seen([(num_decodes, 0, idle_s)] * 50, config),
        jax.jit(chunks.available, static_argnums=(2, 3)),
        0,
        [],
    )
    while computed < 6_000:
        chunk = int(available(jnp.int32(num_decodes), costs, config, 16))
        step_s = idle_s + chunk * 1e-3 * (2 + growth_ms * computed / 6_000)
        costs = LEARN(costs, seen_step(num_decodes, chunk, step_s))
        computed += chunk
        longest.append(step_s / idle_s)
    assert max(longest[10:]) <= 1.15 * chunks.DECODE_STEPS
    assert np.mean(longest) >= 0.9 * chunks.DECODE_STEPS  # and makes use of it
    assert np.array(chunks.solve(costs)) @ [1, num_decodes, 0] == pytest.approx(idle_s, rel=0.1)


def test_slo_lets_steps_be_longer_the_more_prompts_wait_and_no_longer_where_a_target_is_set():
    costs = chunks.assumed(SLO)

    def room(num_prompts, **options):
        config = SchedulerConfig(chunk_policy="slo", token_budget=2048, **options)
        return int(chunks.available(jnp.int32(8), costs, config, 16, jnp.int32(num_prompts)))

    rooms = [room(n) for n in (0, 1, 2, 5, 9, 100)]
    assert rooms[0] == rooms[1] < rooms[2] < rooms[3] < rooms[4] == rooms[5]
    assert rooms[4] / rooms[1] == pytest.approx(
        (chunks.DECODE_STEPS + chunks.CROWD_STEPS - 1) / (chunks.DECODE_STEPS - 1), rel=0.02
    )
    assert room(1, target_itl_ms=80) == room(100, target_itl_ms=80)


def test_slo_without_a_measurement_goes_by_what_was_assumed_and_ignores_times_that_are_none():
    config = SchedulerConfig(chunk_policy="slo", slo_prior_us=(20_000, 300, 90))
    for costs in (chunks.assumed(config), seen([(3, 5, 0.0), (3, 5, float("nan")), (3, 5, float("inf"))], config)):
        assert np.array(chunks.solve(costs)) == pytest.approx([20e-3, 300e-6, 90e-6], rel=1e-3)


def victim_of(state, config, lack=1):
    rank = np.empty(SEQUENCES, np.int32)
    rank[state.by_rank] = np.arange(SEQUENCES)
    return int(jitted_victim(config)(state, rank, np.int32(lack)))


@functools.cache
def jitted_victim(config: SchedulerConfig):
    return jax.jit(lambda state, rank, lack: choose_victim(state, rank, lack, config, 4))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@given(state=states(), lack=st.integers(1, 8))
def test_the_victim_costs_least_among_those_that_progressed_and_are_valued_least_and_free_enough(policy, state, lack):
    victim = victim_of(state, SchedulerConfig(policy=policy), lack)
    total = state.known_len + state.in_flight
    is_open = (state.status == RUNNING) & (total < state.limit_len)
    candidates = [s for s in state.by_rank if is_open[s]][1:]
    candidates = [s for s in candidates if total[s] > state.guard_len[s]] or candidates
    if policy == "priority" and candidates:
        candidates = [s for s in candidates if state.priority[s] == max(state.priority[c] for c in candidates)]
    own = state.computed_len - state.found_len
    frees = -(-own // 4)
    enough = [s for s in candidates if frees[s] >= lack]
    candidates = enough or [s for s in candidates if frees[s] == max(frees[c] for c in candidates)]
    candidates = [s for s in candidates if own[s] == min(own[c] for c in candidates)]
    assert victim == (candidates[-1] if candidates else -1)


def test_the_only_open_sequence_and_the_first_in_order_never_give_way():
    ones = np.ones(SEQUENCES, np.int32)
    base = empty_state(SEQUENCES, 64)._replace(known_len=9 * ones, limit_len=20 * ones, computed_len=8 * ones)
    alone = base._replace(status=np.where(np.arange(SEQUENCES) == 3, RUNNING, WAITING).astype(np.int32))
    assert victim_of(alone, SchedulerConfig()) == -1
    two = base._replace(status=np.where(np.arange(SEQUENCES) < 2, RUNNING, WAITING).astype(np.int32))
    assert victim_of(two, SchedulerConfig()) == 1


@functools.cache
def jitted_reserve(config: SchedulerConfig):
    return jax.jit(lambda state: (wanted_blocks(state, config, 4), promised_blocks(state, config, 4)))


@pytest.mark.parametrize("reservation", ["none", "optimistic", "guaranteed"])
@given(state=states())
def test_what_is_kept_for_a_sequence_lies_between_its_next_token_and_its_limit(reservation, state):
    config = SchedulerConfig(reservation=reservation)
    want, promised = (np.asarray(x) for x in jitted_reserve(config)(state))
    total, limit = state.known_len + state.in_flight, np.maximum(state.limit_len, 1)
    assert (want <= -(-(limit - 1) // 4)).all()
    assert (want >= -(-np.minimum(total + 1, limit - 1) // 4)).all()
    if reservation == "guaranteed":
        assert (want == -(-(limit - 1) // 4)).all()
    held = -(-state.computed_len // 4)
    is_open = (state.status == RUNNING) & (total < state.limit_len)
    assert promised == np.maximum(want - held, 0)[is_open].sum()
