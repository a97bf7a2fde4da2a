"""Time a full hit in a full pool.

Knows no cache but by `PrefixBaseline`. Tokens are lists of Python ints, made anew for the prompt that is looked up: the ints of a
request are not those of the cached prompt, and comparing equal objects would be quicker than comparing equal numbers.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from octavo_tools.prefix_baselines import chains
from octavo_tools.prefix_baselines.radix import RadixTree, shared_by_loop

VOCAB = 49_152


class PrefixBaseline(Protocol):
    """What is compared: prefixes in, block ids out."""

    block_size: int

    def match(self, tokens: Sequence[int]) -> Sequence[int] | np.ndarray:
        """Ids of the longest held prefix, one for each block."""

    def insert(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """File a prompt's full blocks; answers how many leading ones were held already."""

    def evict(self, count: int) -> list[int]:
        """Free at least `count` ids if that many may go."""


def baselines(block_size: int) -> dict[str, Callable[[], PrefixBaseline]]:
    """Every baseline by the name benches print."""
    hashers: dict[str, chains.BlockHasher] = {
        "sha256": chains.hash_blocks_sha256,
        "sha256_pickle": chains.hash_blocks_sha256_pickle,
        "builtin": chains.hash_blocks_builtin,
        "xxh3": chains.hash_blocks_xxh3,
        "numpy": chains.hash_blocks_numpy,
    }
    made: dict[str, Callable[[], PrefixBaseline]] = {
        name: functools.partial(chains.HashChain, block_size, hasher) for name, hasher in hashers.items()
    }
    made["radix_page_1"] = functools.partial(RadixTree, 1)
    made["radix_page_1_loop"] = functools.partial(RadixTree, 1, shared_by_loop)
    made["radix_page_block"] = functools.partial(RadixTree, block_size)
    return made


def fill(baseline: PrefixBaseline, prompts: np.ndarray) -> None:
    """Insert every row of `prompts` with ids counted up from 0."""
    pages = prompts.shape[1] // baseline.block_size
    for row, tokens in enumerate(prompts):
        baseline.insert(tokens.tolist(), range(row * pages, (row + 1) * pages))


def random_prompts(num_blocks: int, prompt_blocks: int, block_size: int, seed: int = 0) -> np.ndarray:
    """Prompts of `prompt_blocks` blocks that fill `num_blocks`, one a row."""
    shape = (num_blocks // prompt_blocks, prompt_blocks * block_size)
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def time_match(baseline: PrefixBaseline, tokens: Sequence[int], *, repeats: int = 50, warm_up: int = 5) -> float:
    """Median time of `baseline.match(tokens)` in microseconds.

    Raises:
        ValueError: It is no full hit, so that the time would say nothing.
    """
    wanted = len(tokens) // baseline.block_size
    if (found := len(baseline.match(tokens))) != wanted:
        raise ValueError(f"wanted a full hit of {wanted} ids, got {found}: insert the prompt first")
    times_s = []
    for _ in range(warm_up + repeats):
        start = time.perf_counter()
        baseline.match(tokens)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[warm_up:]) * 1e6


def time_all(
    *,
    num_blocks: int = 65_536,
    prompt_blocks: int = 1_024,
    block_size: int = 32,
    repeats: int = 50,
    match_blocks: int | None = None,
) -> dict[str, float]:
    """Median microseconds of a full hit of `match_blocks` (by default a whole prompt) for every baseline, each with its own full pool."""
    prompts = random_prompts(num_blocks, prompt_blocks, block_size)
    looked_up = prompts[len(prompts) // 2, : (match_blocks or prompt_blocks) * block_size]
    medians = {}
    for name, make in baselines(block_size).items():
        cache = make()
        fill(cache, prompts)
        medians[name] = time_match(cache, looked_up.tolist(), repeats=repeats)
    return medians
