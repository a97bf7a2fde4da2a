"""The books a scheduler keeps and the plan laid out from them keep what every plan promises."""

import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core import layout
from octavo_core.plan import Arrivals, CacheEvents, StepResult
from octavo_core.specs import CacheSpec
from octavo_core.testing.device import check_plan

SPEC = CacheSpec(num_blocks=(40,), block_size=4, max_sequences=6, max_blocks=8)
EVENTS = CacheEvents(
    *(np.full((1, n), -1, np.int32) for n in (5, 3)), np.bool_(False), np.zeros(1, np.int32), np.zeros(1, np.int32)
)


def arrivals(prompts, order):
    """Prompts for sequences 0, 1, …; the last entry is unused."""
    n = len(prompts) + 1
    zeros = np.zeros(n, np.int32)
    tokens = np.zeros((n, SPEC.max_len), np.int32)
    lengths = np.array([*map(len, prompts), 0], np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    sequence = np.array([*range(len(prompts)), -1], np.int32)
    order = np.array([*order, 0], np.int32)
    return Arrivals(
        sequence, tokens, lengths, lengths + 3, np.zeros((n, 2), np.uint32), zeros, zeros, zeros, order, np.ones(n, bool)
    )


def results(accepted, finished=()):
    """An id for each of some sequences, and the end of others."""
    n = SPEC.max_sequences
    counts, ids, done = np.zeros(n, np.int32), np.zeros((n, 1), np.int32), np.zeros(n, bool)
    for sequence, token in accepted.items():
        counts[sequence], ids[sequence, 0] = 1, token
    done[list(finished)] = True
    zero = np.zeros((), np.int32)
    return StepResult(counts, ids, done, np.zeros(n, bool), np.zeros((), np.float32), zero, zero)


@pytest.fixture
def books():
    """Three sequences of 5, 1 and 9 tokens, of which the last came first."""
    return layout.enter(layout.empty_books(SPEC), arrivals([[1, 2, 3, 4, 5], [6], list(range(10, 19))], [2, 1, 0]))


def table():
    """Blocks of each sequence, none shared."""
    return (1 + np.arange(6 * 8).reshape(1, 6, 8) % 39).astype(np.int32)


def lay_out(books, length, samples):
    copies = np.full((1, 6, 2), -1, np.int32)
    length = jnp.array([*length, 0, 0, 0], jnp.int32)
    return layout.lay_out(
        books,
        length,
        jnp.asarray(samples),
        jnp.asarray(table()),
        jnp.asarray(copies),
        EVENTS,
        block_size=4,
        max_rows=4,
        max_tokens=16,
    )


def test_newcomers_wait_with_what_they_brought(books):
    assert books.status.tolist() == [layout.WAITING] * 3 + [layout.FREE] * 3
    assert books.known.tolist() == [5, 1, 9, 0, 0, 0]
    assert books.limit.tolist() == [8, 4, 12, 0, 0, 0]
    assert books.tokens[2, :9].tolist() == list(range(10, 19))
    assert layout.blocks_of(books.known, SPEC)[:, 0].tolist() == [2, 1, 3, 0, 0, 0]


def test_results_add_ids_and_free_those_that_ended(books):
    after = layout.accept(books, results({1: 77}, finished=[2]))
    assert after.known.tolist()[:3] == [5, 2, 9]
    assert after.tokens[1, :2].tolist() == [6, 77]
    assert after.status.tolist()[:3] == [layout.WAITING, layout.WAITING, layout.FREE]


def test_a_plan_has_rows_of_one_token_first_and_each_token_in_its_slot(books):
    length = jnp.array([5, 1, 4, 0, 0, 0], jnp.int32)
    after, samples = layout.advance(books, length)
    assert samples.tolist() == [True, True, False, False, False, False]
    assert after.total.tolist()[:3] == [6, 2, 9]
    plan = lay_out(books, [5, 1, 4], samples)
    check_plan(plan, SPEC)
    assert plan.sequence.tolist() == [1, 2, 0, -1]
    assert plan.query_start.tolist() == [0, 1, 5, 10, 10]
    assert (int(plan.num_rows), int(plan.num_single), int(plan.num_tokens)) == (3, 1, 10)
    assert plan.token_ids.tolist()[:10] == [6, 10, 11, 12, 13, 1, 2, 3, 4, 5]
    assert plan.sample_rows.tolist() == [0, -1, 9, -1]
    assert plan.slot_mapping[0, 1:5].tolist() == (table()[0, 2, 0] * 4 + np.arange(4)).tolist()
    assert plan.slot_mapping[0, 10:].tolist() == [-1] * 6


def test_an_id_that_is_not_known_yet_is_the_devices(books):
    computed, samples = layout.advance(books, jnp.array([5, 0, 0, 0, 0, 0], jnp.int32))
    plan = lay_out(computed, [1, 0, 0], samples)
    check_plan(plan, SPEC)
    assert plan.token_ids.tolist()[0] == -1
    assert plan.positions.tolist()[0] == 5
    assert plan.context_len.tolist() == [6, 0, 0, 0]


def test_a_plan_of_nobody_is_legal(books):
    plan = lay_out(books, [0, 0, 0], np.zeros(6, bool))
    check_plan(plan, SPEC)
    assert int(plan.num_rows) == 0
    assert int(plan.num_waiting) == 3
