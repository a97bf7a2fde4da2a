"""What a long prompt does to those who decode: eight streams, then a prompt of 6,000 tokens, with chunks and without.

Printed: the longest gap of any stream beside its median while the prompt is computed, the prompt's TTFT beside that of a run whose steps
take all of it at once, and the median gap beside that of a run without the prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from typing import Any, Final

import numpy as np

from octavo_core.bench import Report
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine._src.async_engine import AsyncEngine
from octavo_engine.config import EngineConfig

GOALS: Final = {"itl_max_over_median": 3, "prompt_ttft_over_unchunked": 1.5, "itl_median_over_alone": 1.1}
STREAMS: Final = 8
PROMPT: Final = 6_000


async def _stream(engine: Any, name: str, prompt: list[int], tokens: int, times: list[float]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = EngineRequest(request_id=name, prompt_ids=prompt, sampling=sampling)
    async for output in engine.generate(request):
        times += [time.perf_counter()] * len(output.token_ids)


async def _scenario(engine: Any, tokens: int, *, prompt: int) -> tuple[list[list[float]], float]:
    """Times of each stream's tokens, and the long prompt's TTFT."""
    rng = np.random.default_rng(time.time_ns())
    times: list[list[float]] = [[] for _ in range(STREAMS)]
    tasks = [
        asyncio.ensure_future(_stream(engine, f"s{i}-{time.time_ns()}", rng.integers(1_000, 9_000, 64).tolist(), tokens, t))
        for i, t in enumerate(times)
    ]
    first: list[float] = []
    while min(map(len, times)) < tokens // 8:
        await asyncio.sleep(0.01)
    start = time.perf_counter()
    if prompt:
        await _stream(engine, f"p-{time.time_ns()}", rng.integers(1_000, 9_000, prompt).tolist(), 1, first)
    await asyncio.gather(*tasks)
    return times, (first[0] - start) if first else 0.0


def _gaps(times: list[list[float]]) -> list[list[float]]:
    return [np.diff(t[1:]).tolist() for t in times]


def run(report: Report, *, quick: bool) -> None:
    """Run the three scenarios on the default model."""
    tokens, prompt = (60, 600) if quick else (600, PROMPT)
    common: dict[str, Any] = {"max_num_seqs": 16, "enable_prefix_caching": False}
    engine = AsyncEngine.start(EngineConfig(**common))
    try:
        alone, _ = asyncio.run(_scenario(engine, tokens, prompt=0))
        mixed, ttft_s = asyncio.run(_scenario(engine, tokens, prompt=prompt))
    finally:
        engine.close()
    engine = AsyncEngine.start(EngineConfig(**common, chunk_policy="fixed", max_num_batched_tokens=8_192))
    try:
        _, whole_s = asyncio.run(_scenario(engine, tokens, prompt=prompt))
    finally:
        engine.close()
    gaps, before = _gaps(mixed), statistics.median(itertools.chain(*_gaps(alone)))
    median = statistics.median(itertools.chain(*gaps))
    worst = max(max(g) / statistics.median(g) for g in gaps)
    report.add("itl_median", median * 1e6, "us", sum(map(len, gaps)), f"alone {before * 1e6:.0f}")
    report.add("itl_max", max(map(max, gaps)) * 1e6, "us", sum(map(len, gaps)))
    report.add("prompt_ttft", ttft_s * 1e6, "us", 1, f"unchunked {whole_s * 1e6:.0f}")
    report.add("itl_max_over_median", worst, "ratio", note="worst stream; at most 3 wanted")
    report.add("prompt_ttft_over_unchunked", ttft_s / whole_s, "ratio", note="at most 1.5 wanted")
    report.add("itl_median_over_alone", median / before, "ratio", note="at most 1.1 wanted")
