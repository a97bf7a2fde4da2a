"""What tiers below the device cost and give: `python -m octavo_engine.bench offload`.

*Overhead*: prompts that share nothing, on one engine with its tiers connected and cut off in turn; pairs, interleaved, each the wall time of a
batch. *Speedup*: conversations that share long prefixes and together need four times the device's pool, asked again and again, in turn
with tiers and without.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any, Final

import numpy as np

from octavo_core.bench import Report
from octavo_core.wire import SamplingParams
from octavo_engine._src.offline import LLM
from octavo_engine.config import EngineConfig

GOALS: Final = {"overhead_no_reuse_pct": 1.0, "ttft_speedup": 3.0}
BLOCK: Final = 32
PREFIX: Final = 1_024
ONE: Final = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def _batch_s(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return time.perf_counter() - start


def _overhead(report: Report, llm: LLM, pairs: int, rng: Any) -> None:
    """Median of pairs (with, without), and the interval in which half of them lie. Idle copying ends before a batch begins."""
    offload, ratios = llm.core.offload, []
    for i in range(pairs + 1):
        seconds = {}
        for tiers in (True, False) if i % 2 else (False, True):
            prompts = [rng.integers(1_000, 40_000, 128).tolist() for _ in range(4)]
            llm.core.planner.reset()
            llm.core.offload = offload if tiers else None
            if offload is not None:
                offload.clear()
                offload.store.wait_idle(30.0)
            seconds[tiers] = _batch_s(llm, prompts, 8)
        if i:
            ratios.append(100 * (seconds[True] / seconds[False] - 1))
    llm.core.offload = offload
    low, _, high = statistics.quantiles(ratios, n=4)
    report.add(
        "overhead_no_reuse_pct", statistics.median(ratios), "ratio", len(ratios), f"half of the pairs in {low:.2f} to {high:.2f}"
    )


def _ttft_s(llm: LLM, prompts: list[list[int]]) -> list[float]:
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        llm.generate(prompt, ONE)
        times.append(time.perf_counter() - start)
    return times


def _speedup(report: Report, llm: LLM, rounds: int, rng: Any) -> None:
    """Prefixes four times the pool, with different ends each round, in rounds with tiers and without; the first fills the tiers."""
    usable = llm.core.planner.spec.num_blocks[0] - 1
    count = -(-4 * usable * BLOCK // PREFIX)
    prefixes = [rng.integers(1_000, 40_000, PREFIX).tolist() for _ in range(count)]
    ends = itertools.count(1_000)
    offload, times = llm.core.offload, {True: list[float](), False: list[float]()}
    for i, tiers in enumerate([True, *(False, True) * rounds]):
        llm.core.offload = offload if tiers else None
        llm.core.planner.reset()
        if offload is not None:
            offload.clear()
        taken = _ttft_s(llm, [[*prefix, next(ends)] for prefix in prefixes])
        times[tiers] += taken if i else []
    with_s, without_s = (statistics.median(times[tiers]) for tiers in (True, False))
    report.add("ttft_with_tiers", with_s * 1e6, "us", len(times[True]), f"{count} prefixes of {PREFIX} tokens, four times the pool")
    report.add("ttft_without_tiers", without_s * 1e6, "us", len(times[False]))
    report.add("ttft_speedup", without_s / with_s, "x", len(times[True]), "medians")


def run(report: Report, *, quick: bool) -> None:
    """Both, on the default model with a pool of 97 blocks."""
    config = EngineConfig(max_num_seqs=8, num_gpu_blocks_override=97, max_model_len=2_048, kv_offload="host=2GiB")
    llm = LLM.from_config(config)
    try:
        rng = np.random.default_rng(0)
        _overhead(report, llm, 4 if quick else 20, rng)
        _speedup(report, llm, 1 if quick else 3, rng)
    finally:
        llm.close()
