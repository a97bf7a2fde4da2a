"""`RowSampler` against the seam's conformance suite, and what is its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.testing import sampler as suite
from octavo_kernels import RowSampler, score_tokens

pytestmark = pytest.mark.slow

SIZES = {"an odd vocabulary": 301, "more lanes than are looked at": 71 * 128}


@functools.cache
def driver_of(vocab_size: int) -> suite.SamplerDriver:
    sampler = RowSampler(max_logprobs=5, max_bias=8, max_stop=4, max_arrivals=2)
    return suite.SamplerDriver(sampler, vocab_size=vocab_size, num_rows=32)


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def driver(request: pytest.FixtureRequest) -> suite.SamplerDriver:
    return driver_of(request.param)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_the_sampler_keeps_the_promises_of_its_seam(driver, check) -> None:
    check(driver)
    assert driver.trace_counts() == (1, 1)


def test_counts_stop_rising_instead_of_wrapping(driver) -> None:
    driver.begin(3, presence_penalty=0.001)
    driver.state = driver.state._replace(output_count=driver.state.output_count.at[3, 7].set(2**15 - 2))
    scores = np.zeros((1, driver.vocab_size), np.float32)
    scores[0, 7] = 50
    for position in range(3):
        driver.sample(scores, [3], position)
    assert int(driver.state.output_count[3, 7]) == 2**15 - 1


def test_sequences_without_a_penalty_are_not_counted(driver) -> None:
    driver.begin(0)
    before = np.asarray(driver.state.output_count)
    driver.sample(driver.noise(), [0])
    assert np.array_equal(before, driver.state.output_count)


def test_arrivals_of_nobody_change_nothing(driver) -> None:
    driver.begin(0, [1, 2], temperature=0.5, frequency_penalty=1.0)
    after = driver.sampler.begin(driver.state, driver.sampler.empty_arrivals(16))
    for old, new in zip(jax.tree.leaves(driver.state), jax.tree.leaves(after), strict=True):
        assert np.array_equal(old, new)


@pytest.mark.parametrize("size", ["max_logprobs", "max_bias", "max_stop", "max_arrivals"])
def test_a_negative_size_is_refused_by_name(size: str) -> None:
    with pytest.raises(ConfigError, match=size):
        RowSampler(**{size: -1})


def test_more_alternatives_than_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="more than the vocabulary's 10"):
        RowSampler(max_logprobs=20).init(4, 10)


@pytest.mark.parametrize("num_top", [0, 1, 7])
def test_scored_tokens_agree_with_numpy(num_top: int) -> None:
    logits = np.random.default_rng(0).normal(size=(6, 500)).astype(np.float32) * 4
    logits[1, 3] = logits[1, 9] = 30.0
    targets = np.array([0, 9, 499, 5, -1, 7], np.int32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    logprob, rank, ids, top = score_tokens(jnp.asarray(logits), jnp.asarray(targets), num_top)
    live = targets >= 0
    want = exact[np.arange(6), targets]
    assert np.allclose(logprob[live], want[live], atol=1e-4)
    assert (np.asarray(rank)[live] == 1 + (exact > want[:, None]).sum(-1)[live]).all()
    assert (ids == np.argsort(-exact, axis=-1, kind="stable")[:, :num_top]).all()
    assert np.allclose(top, -np.sort(-exact, axis=-1)[:, :num_top], atol=1e-4)
    assert np.isfinite(logprob).all()
