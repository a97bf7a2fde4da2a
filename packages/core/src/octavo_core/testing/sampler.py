"""Conformance of the `Sampler` seam: each promise of a sampling parameter against NumPy in float64.

Knows no sampler. `check_sampler(sampler)` runs all of it with one compiled shape and fails where `sample` compiled twice; each
check can also be run alone on a `SamplerDriver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.plan import Sampled, SamplingArrivals
from octavo_core.seams import Sampler
from octavo_core.testing.device import expect

NEUTRAL: Final[dict[str, Any]] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "bias": {},
    "stop_ids": (),
    "min_len": 0,
    "num_logprobs": -1,
}
"""Parameters that change nothing, by the names `SamplerDriver.begin` takes."""


class SamplerDriver:
    """A sampler behind two jits, its state donated, spoken to in Python values.

    Args:
        sampler: Under test.
        vocab_size: At least 40.
        num_rows: Rows of a step and sequences of the state; at least 8.
        max_bias, max_stop, max_arrivals: Widths the sampler was made for.
    """

    max_len: Final = 16

    def __init__(
        self,
        sampler: Sampler[Any],
        *,
        vocab_size: int = 300,
        num_rows: int = 16,
        max_bias: int = 8,
        max_stop: int = 4,
        max_arrivals: int = 2,
    ) -> None:
        self.sampler, self.vocab_size, self.num_rows = sampler, vocab_size, num_rows
        self._widths = max_bias, max_stop
        self._max_arrivals = max_arrivals
        self._begin = jax.jit(sampler.begin, donate_argnums=0)
        self._sample = jax.jit(sampler.sample, donate_argnums=0)
        self.state = sampler.init(num_rows, vocab_size)

    def begin(self, sequence: int, prompt: Sequence[int] = (), **params: Any) -> None:
        """A new sequence; `params` as in `NEUTRAL`, `bias` a mapping of id to value."""
        values = NEUTRAL | params
        max_bias, max_stop = self._widths
        ids, stops = list(values["bias"]), list(values["stop_ids"])
        rows = {name: values[name] for name in SamplingArrivals._fields if name in values}
        rows |= {
            "sequence": sequence,
            "tokens": [*prompt, *[self.vocab_size - 1] * (self.max_len - len(prompt))],
            "prompt_len": len(prompt),
            "seed": [values["seed"] & 0xFFFFFFFF, values["seed"] >> 32],
            "bias_ids": ids + [-1] * (max_bias - len(ids)),
            "bias_values": [*values["bias"].values(), *[0.0] * (max_bias - len(ids))],
            "stop_ids": stops + [-1] * (max_stop - len(stops)),
        }
        arrivals = SamplingArrivals(**{name: self._entry(name, value) for name, value in rows.items()})
        self.state = self._begin(self.state, arrivals)

    def _entry(self, name: str, value: Any) -> jax.Array:
        """The value in the first of the arrivals, the others unused."""
        whole = {"sequence", "tokens", "prompt_len", "top_k", "bias_ids", "stop_ids", "min_len", "num_logprobs"}
        dtype = np.uint32 if name == "seed" else np.int32 if name in whole else np.float32
        one = np.asarray(value, dtype)
        rest = np.full((self._max_arrivals - 1, *one.shape), -1 if name == "sequence" else 0, dtype)
        return jnp.asarray(np.concatenate([one[None], rest]))

    def sample(self, scores: np.ndarray, sequence: Sequence[int], position: int | Sequence[int] = 0) -> Sampled:
        """One step. Entry `i` of each argument is row `i`; sequence −1 and rows beyond pad. One row of scores serves all."""
        n = self.num_rows
        logits = np.zeros((n, self.vocab_size), np.float32)
        logits[: len(sequence)] = scores
        rows = np.full(n, -1, np.int32)
        rows[: len(sequence)] = sequence
        at = np.zeros(n, np.int32)
        at[: len(sequence)] = position
        self.state, out = self._sample(self.state, jnp.asarray(logits), jnp.asarray(rows), jnp.asarray(at))
        out = Sampled(*(np.asarray(field) for field in out))
        expect(((out.token_ids >= 0) & (out.token_ids < self.vocab_size)).all(), f"an id outside the vocabulary: {out.token_ids}")
        return Sampled(*(field[: len(sequence)] for field in out))

    def trace_counts(self) -> tuple[int, int]:
        """How often `begin` and `sample` were compiled."""
        begin: Any = self._begin
        sample: Any = self._sample
        return begin._cache_size(), sample._cache_size()

    def noise(self, seed: int = 0, num_rows: int = 1) -> np.ndarray:
        """Scores as a model might give them."""
        return np.random.default_rng(seed).normal(size=(num_rows, self.vocab_size)).astype(np.float32) * 3


def check_sampler(sampler: Sampler[Any], **sizes: int) -> None:
    """Run the whole suite; `sizes` as in `SamplerDriver`.

    Raises:
        AssertionError: Saying which promise was broken.
    """
    driver = SamplerDriver(sampler, **sizes)
    for check in CHECKS:
        check(driver)
    expect(driver.trace_counts() == (1, 1), f"begin and sample were compiled {driver.trace_counts()} times for one shape")


def check_greedy(driver: SamplerDriver) -> None:
    """Temperature 0 takes the greatest score, the lowest id among equals; so do top_k=1, a tiny top_p and min_p=1."""
    random = {"temperature": 1.5}
    degenerate: tuple[dict[str, Any], ...] = ({}, random | {"top_k": 1}, random | {"top_p": 1e-6}, random | {"min_p": 1.0})
    coarse = np.round(driver.noise(1, len(degenerate)) / 3)
    for sequence, params in enumerate(degenerate):
        driver.begin(sequence, **params)
    for scores in (driver.noise(2, len(degenerate)), coarse, np.zeros_like(coarse)):
        got = driver.sample(scores, range(len(degenerate)), 3).token_ids
        expect((got == scores.argmax(-1)).all(), f"greedy rows gave {got}, the greatest scores are at {scores.argmax(-1)}")


DISTRIBUTIONS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.07},
    {"temperature": 1.2, "top_k": 12, "top_p": 0.7, "min_p": 0.02},
)


def check_distribution(driver: SamplerDriver) -> None:
    """Draws follow the distribution that temperature, top_k, top_p and min_p leave, in this order (chi-square, level 1e-6)."""
    order = np.random.default_rng(3).permutation(driver.vocab_size)
    scores = (-0.3 * np.argsort(order)).astype(np.float32)
    everyone = range(driver.num_rows)
    for number, params in enumerate(DISTRIBUTIONS):
        for sequence in everyone:
            driver.begin(sequence, seed=(number << 40) + sequence, **params)
        draws = [driver.sample(scores, everyone, position).token_ids for position in range(3200 // driver.num_rows)]
        _expect_drawn_from(np.concatenate(draws), expected_probabilities(scores, **params), str(params))


def expected_probabilities(
    scores: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """The distribution of one row, by sorting."""
    logits = scores.astype(np.float64) / temperature
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order] - logits.max())
    weights[top_k or len(weights) :] = 0
    share = np.cumsum(weights) / weights.sum()
    weights[1 + int((share < top_p).sum()) :] = 0
    weights[weights < min_p] = 0
    result = np.zeros(len(scores))
    result[order] = weights / weights.sum()
    return result


def _expect_drawn_from(draws: np.ndarray, probabilities: np.ndarray, what: str) -> None:
    expected = probabilities * len(draws)
    observed = np.bincount(draws, minlength=len(expected))
    expect(
        not observed[expected == 0].any(),
        f"{what}: drew tokens that should be excluded: {np.flatnonzero(observed * (expected == 0))}",
    )
    rare = expected < 5
    expected, observed = (np.append(x[~rare], x[rare].sum()) for x in (expected, observed))
    expected, observed = expected[expected > 0], observed[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    free = max(len(expected) - 1, 1)
    # Wilson and Hilferty's approximation of the chi-square quantile at 1 − 1e-6.
    limit = free * (1 - 2 / (9 * free) + 4.75 * np.sqrt(2 / (9 * free))) ** 3
    expect(statistic < limit, f"{what}: chi-square {statistic:.1f} with {free} degrees of freedom, limit {limit:.1f}")


def check_independence(driver: SamplerDriver) -> None:
    """A sequence's tokens depend on its scores, seed and positions alone: not on neighbours, row, slot, or calls before."""
    params = {"temperature": 1.0, "top_p": 0.95, "seed": 2**63 + 17}
    scores = driver.noise(4)
    driver.begin(0, **params)
    alone = [int(driver.sample(scores, [0], at).token_ids[0]) for at in range(12)]
    expect(len(set(alone)) > 1, f"twelve positions gave one token: {alone}")
    last = driver.num_rows - 1
    driver.begin(last, **params)
    for other in range(1, 5):
        driver.begin(other, temperature=2.0 * (other % 2), top_k=3 * other, frequency_penalty=1.0, bias={other: 2.0}, seed=other)
    crowd = [int(driver.sample(scores, [1, -1, 2, 3, last, 4], [7, 0, 1, 9, at, 2]).token_ids[4]) for at in reversed(range(12))]
    expect(crowd[::-1] == alone, f"alone {alone}, in another slot, row and order among neighbours {crowd[::-1]}")
    driver.begin(0, **params | {"seed": 18})
    other_seed = [int(driver.sample(scores, [0], at).token_ids[0]) for at in range(12)]
    expect(other_seed != alone, "another seed gives the same tokens")
    driver.begin(0, **params | {"seed": 17})
    expect([int(driver.sample(scores, [0], at).token_ids[0]) for at in range(12)] != alone, "the upper half of the seed is ignored")


PENALTIES: Final[tuple[dict[str, float], ...]] = (
    {"frequency_penalty": 0.4},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.5},
    {},
)


def check_penalties(driver: SamplerDriver) -> None:
    """Greedy rows with penalties follow the formula step by step, and a slot taken again remembers nothing."""
    scores = driver.noise(5) / 3
    prompt = np.argsort(-scores[0])[1:5].tolist()
    everyone = range(len(PENALTIES))
    for _ in range(2):
        output: list[list[int]] = [[] for _ in PENALTIES]
        for sequence, params in enumerate(PENALTIES):
            driver.begin(sequence, prompt, **params)
        for step in range(12):
            want = [
                int(penalised(scores[0], prompt, said, **params).argmax()) for said, params in zip(output, PENALTIES, strict=True)
            ]
            got = driver.sample(scores, everyone, len(prompt) + step).token_ids.tolist()
            expect(got == want, f"step {step} of penalties {PENALTIES}: {got}, wanted {want}")
            for said, token in zip(output, got, strict=True):
                said.append(token)


def penalised(
    scores: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> np.ndarray:
    """Scores after penalties."""
    scores = scores.astype(np.float64)
    counts = np.bincount(np.asarray(output, int), minlength=len(scores))
    seen = counts > 0
    seen[np.asarray(prompt, int)] = True
    scores = np.where(seen, np.where(scores > 0, scores / repetition_penalty, scores * repetition_penalty), scores)
    return scores - frequency_penalty * counts - presence_penalty * (counts > 0)


def check_bias_and_bans(driver: SamplerDriver) -> None:
    """`bias` moves scores; stop ids are not sampled below `min_len`, and may be from it on."""
    scores = driver.noise(6)
    best, second = np.argsort(-scores[0])[:2].tolist()
    driver.begin(0, bias={7: 100.0, 9: 85.0})
    driver.begin(1, bias={best: -100.0, 0: 0.5})
    driver.begin(2, stop_ids=(best,), min_len=6)
    driver.begin(3, temperature=1.0, bias={7: 100.0}, seed=3)
    driver.begin(4)
    early, late = driver.sample(scores, range(5), 5).token_ids.tolist(), driver.sample(scores, range(5), 6).token_ids.tolist()
    expect(
        early == [7, second, second, 7, best], f"bias and bans below min_len gave {early}; wanted {[7, second, second, 7, best]}"
    )
    expect(late == [7, second, best, 7, best], f"from min_len on {late}; wanted {[7, second, best, 7, best]}")
    lifted = driver.noise(6).copy()
    lifted[0, best] -= 100
    driver.begin(5, bias={best: 100.0})
    expect(int(driver.sample(lifted, [5]).token_ids[0]) == best, "a bias does not add to the score")


def check_scores(driver: SamplerDriver) -> None:
    """Scores are log-probabilities of the raw scores, whatever bias, penalty or temperature chose the token."""
    scores = driver.noise(7)
    exact = scores[0].astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    k = driver.sample(scores, []).top_ids.shape[1]
    driver.begin(0, num_logprobs=k)
    driver.begin(1, num_logprobs=0, temperature=3.0, bias={11: 100.0}, frequency_penalty=2.0)
    out = driver.sample(scores, [0, 1])
    rank = [1 + int((exact > exact[token]).sum()) for token in out.token_ids]
    expect(out.token_ids[1] == 11, "a bias of 100 does not force its token")
    expect(
        np.allclose(out.logprob, exact[out.token_ids], atol=1e-4), f"log-probabilities {out.logprob}, wanted {exact[out.token_ids]}"
    )
    expect(out.rank.tolist() == rank, f"ranks {out.rank}, wanted {rank}")
    top = np.argsort(-exact, kind="stable")[:k]
    expect((out.top_ids[0] == top).all(), f"likeliest ids {out.top_ids[0]}, wanted {top}")
    expect(np.allclose(out.top_logprobs[0], exact[top], atol=1e-4), "log-probabilities of the likeliest tokens are off")


def check_broken_scores(driver: SamplerDriver) -> None:
    """Scores that are no numbers give some id of the vocabulary, in every mode, and leave the neighbours alone."""
    rows = driver.noise(8, 8)
    rows[0], rows[1], rows[2] = np.nan, -np.inf, np.inf
    rows[3, ::2], rows[4, 5], rows[5, ::3] = np.nan, np.inf, -np.inf
    kinds: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01})
    for params in kinds:
        for sequence in range(8):
            driver.begin(sequence, num_logprobs=0, presence_penalty=0.1, bias={3: 1.0}, **params)
        out = driver.sample(rows, range(8))
        expect(out.token_ids[4] == 5, "a score of +inf does not win")
        expect(out.token_ids[3] % 2 == 1 and out.token_ids[5] % 3 != 0, "a token whose score is NaN or −inf was chosen")
        expect(np.isfinite(out.logprob).all(), f"log-probabilities are not finite: {out.logprob}")
    driver.begin(0, stop_ids=(5,), min_len=9)
    only = np.full((1, driver.vocab_size), -np.inf)
    only[0, 5] = 1
    driver.sample(only, [0])


CHECKS: Final[tuple[Callable[[SamplerDriver], None], ...]] = (
    check_greedy,
    check_distribution,
    check_independence,
    check_penalties,
    check_bias_and_bans,
    check_scores,
    check_broken_scores,
)
