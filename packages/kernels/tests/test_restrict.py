"""top_k, top_p and min_p against a sorting oracle, through the quick way and through bisection."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels._src.bisect import bisect_cut
from octavo_kernels._src.cut import everything, keep
from octavo_kernels._src.restrict import find_cut, nearest
from octavo_kernels._src.vocab import to_lanes

pytestmark = pytest.mark.slow

ROWS = 4
SIZES = (5, 1000, 20_000)


def distances(scores: np.ndarray) -> jax.Array:
    return to_lanes(jnp.asarray(scores.max(-1, keepdims=True) - scores, jnp.float32), jnp.inf)


def oracle(distance: np.ndarray, k: int, p: float, m: float) -> tuple[set[int], float]:
    """Ids kept of one row by sorting, and how far the share of a prefix is from `p` where the choice is closest."""
    order = np.lexsort((np.arange(len(distance)), distance))
    weight = np.exp(-distance[order].astype(np.float64))
    n = len(order) if k <= 0 else min(k, len(order))
    if m >= 1:
        n = 1
    share = np.cumsum(weight[:n]) / weight[:n].sum()
    slack = np.abs(share - p).min() if p < 1 else 1.0
    if p < 1:
        n = min(n, 1 + int((share < p).sum()))
    kept = order[:n]
    if m > 0:
        kept = kept[distance[kept] <= -np.log(np.float32(min(m, 1.0)))]
    return set(kept.tolist()), float(slack)


def kept_sets(mask: jax.Array, vocab: int) -> list[set[int]]:
    flat = np.asarray(mask).reshape(mask.shape[0], -1)[:, :vocab]
    return [set(np.flatnonzero(row).tolist()) for row in flat]


@partial(jax.jit, static_argnums=1)
def _find(distance, vocab, k, p, m):
    return keep(distance, find_cut(distance, vocab, k, p, m))


@partial(jax.jit, static_argnums=1)
def _bisect(distance, vocab, k, p):
    return keep(distance, bisect_cut(distance, vocab, k, p))


def by_find(distance: jax.Array, vocab: int, k: np.ndarray, p: np.ndarray, m: np.ndarray) -> list[set[int]]:
    return kept_sets(_find(distance, vocab, k, p, m), vocab)


def by_bisection(distance: jax.Array, vocab: int, k: np.ndarray, p: np.ndarray) -> list[set[int]]:
    return kept_sets(_bisect(distance, vocab, np.where((k <= 0) | (k > vocab), vocab, k).astype(np.int32), p), vocab)


RULES = {
    "top_k": ([0, 1, 7, 10_000], [1.0, 1.0, 1.0, 1.0]),
    "top_p": ([0, 0, 0, -1], [0.5, 0.9, 0.999, 1e-6]),
    "both": ([3, 40, 500, 1], [0.5, 0.9, 0.95, 0.3]),
}


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_what_is_kept_is_what_sorting_keeps(vocab: int, rule: str, spread: float) -> None:
    scores = np.random.default_rng(vocab).normal(size=(ROWS, vocab)).astype(np.float32) * np.float32(spread)
    k, p = np.array(RULES[rule][0], np.int32), np.array(RULES[rule][1], np.float32)
    distance = distances(scores)
    flat = np.asarray(distance).reshape(ROWS, -1)[:, :vocab]
    for kept in (by_find(distance, vocab, k, p, np.zeros(ROWS, np.float32)), by_bisection(distance, vocab, k, p)):
        for row in range(ROWS):
            want, slack = oracle(flat[row], int(k[row]), float(p[row]), 0.0)
            # A float32 sum of `vocab` terms is known to about 1e-6; a nearer choice may fall on either side.
            assert kept[row] == want or (slack < 2e-6 and len(kept[row] ^ want) <= 1 + 2e-6 * vocab)


@pytest.mark.parametrize("vocab", SIZES)
def test_equal_scores_are_kept_from_the_lowest_id_on(vocab: int) -> None:
    scores = np.random.default_rng(1).integers(0, 3, size=(ROWS, vocab)).astype(np.float32)
    k = np.array([1, 2, vocab // 2, vocab - 1], np.int32)
    ones = np.ones(ROWS, np.float32)
    distance = distances(scores)
    flat = np.asarray(distance).reshape(ROWS, -1)[:, :vocab]
    want = [oracle(flat[row], max(int(k[row]), 1), 1.0, 0.0)[0] for row in range(ROWS)]
    k = np.maximum(k, 1)
    assert by_find(distance, vocab, k, ones, 0 * ones) == want
    assert by_bisection(distance, vocab, k, ones) == want


@pytest.mark.parametrize("vocab", SIZES)
def test_degenerate_rules_leave_the_greedy_token_alone(vocab: int) -> None:
    scores = np.random.default_rng(2).integers(0, 3, size=(ROWS, vocab)).astype(np.float32)
    scores[1] = 0.0
    best = [{int(i)} for i in scores.argmax(-1)]
    none, ones = np.zeros(ROWS, np.int32), np.ones(ROWS, np.float32)
    distance = distances(scores)
    assert by_find(distance, vocab, none + 1, ones, 0 * ones) == best
    assert by_find(distance, vocab, none, 1e-6 * ones, 0 * ones) == best
    assert by_find(distance, vocab, none, 0 * ones, 0 * ones) == best
    assert by_find(distance, vocab, none, ones, ones) == best


@pytest.mark.parametrize("vocab", SIZES)
def test_min_p_keeps_what_is_likely_enough_relative_to_the_best(vocab: int) -> None:
    scores = np.random.default_rng(3).normal(size=(ROWS, vocab)).astype(np.float32) * 2
    m = np.array([0.0, 0.02, 0.5, 0.999], np.float32)
    none, ones = np.zeros(ROWS, np.int32), np.ones(ROWS, np.float32)
    distance = distances(scores)
    flat = np.asarray(distance).reshape(ROWS, -1)[:, :vocab]
    assert by_find(distance, vocab, none, ones, m) == [oracle(flat[row], 0, 1.0, float(m[row]))[0] for row in range(ROWS)]


def test_a_banned_token_never_fills_up_a_large_top_k() -> None:
    scores = np.full((ROWS, 20_000), -np.inf, np.float32)
    scores[:, [3, 700, 19_999]] = [1.0, 2.0, 2.0]
    k, ones = np.array([1, 2, 50, 20_000], np.int32), np.ones(ROWS, np.float32)
    kept = by_find(distances(scores), 20_000, k, ones, 0 * ones)
    assert kept[:3] == [{700}, {700, 19_999}, {3, 700, 19_999}]
    assert {3, 700, 19_999} <= kept[3]


def test_a_row_of_two_heavy_lanes_is_settled_without_bisection() -> None:
    found = nearest(distances(np.random.default_rng(4).normal(size=(ROWS, 20_000)).astype(np.float32) * 3))
    assert (found.num >= 60).all()
    assert not found.complete.any()


def test_no_rule_keeps_everything() -> None:
    distance = distances(np.zeros((ROWS, 300), np.float32))
    assert keep(distance, everything(ROWS)).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 30.0, 1e-30]), min_size=200, max_size=200),
    st.integers(1, 200),
    st.floats(0, 1),
)
def test_bisection_and_the_quick_way_agree_on_ties(values: list[float], k: int, p: float) -> None:
    scores = np.tile(np.array(values, np.float32), (ROWS, 1))
    ks, ps = np.full(ROWS, k, np.int32), np.array([1.0, p, 1.0, p], np.float32)
    ks[3] = 0
    distance = distances(scores)
    flat = np.asarray(distance).reshape(ROWS, -1)[:, :200]
    zeros = np.zeros(ROWS, np.float32)
    quick, slow = by_find(distance, 200, ks, ps, zeros), by_bisection(distance, 200, ks, ps)
    for row in range(ROWS):
        want, slack = oracle(flat[row], int(ks[row]), float(ps[row]), 0.0)
        for kept in (quick[row], slow[row]):
            assert kept == want or (slack < 2e-6 and abs(len(kept) - len(want)) <= 1)
