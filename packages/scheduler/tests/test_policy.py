"""The formulas of a step as properties: who computes how much, and who gives way."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_scheduler import FREE, RUNNING, WAITING, SchedulerConfig, SchedulerState, choose_victim, query_lens

SEQUENCES = 8
LENGTHS = st.lists(st.integers(0, 40), min_size=SEQUENCES, max_size=SEQUENCES)
CONFIGS = [
    SchedulerConfig(token_budget=1),
    SchedulerConfig(token_budget=6, chunk_size=4),
    SchedulerConfig(token_budget=32, chunk_size=317),
    SchedulerConfig(token_budget=64, chunk_size=7),
]


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


@given(state=states())
def test_the_victim_is_the_last_in_policy_order_that_has_progressed_since_it_was_last_preempted(state):
    rank = np.empty(SEQUENCES, np.int32)
    rank[state.by_rank] = np.arange(SEQUENCES)
    victim = int(jax.jit(choose_victim)(state, rank))
    total = state.known_len + state.in_flight
    candidates = [s for s in state.by_rank if state.status[s] == RUNNING and total[s] < state.limit_len[s]]
    progressed = [s for s in candidates if total[s] > state.guard_len[s]]
    assert victim == ((progressed or candidates)[-1] if len(candidates) > 1 else -1)


def test_the_only_open_sequence_never_gives_way():
    ones = jnp.ones(2, jnp.int32)
    fields = dict.fromkeys(SchedulerState._fields, ones)
    state = SchedulerState(**fields)._replace(status=jnp.array([RUNNING, WAITING]), limit_len=9 * ones)
    assert int(choose_victim(state, jnp.arange(2, dtype=jnp.int32))) == -1
