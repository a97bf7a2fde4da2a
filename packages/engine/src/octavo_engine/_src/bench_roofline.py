"""The layers of a step of the default model beside what this machine's memory and arithmetic allow.

Memory: a stream over 256 MiB with every core. Arithmetic: a float32 product of 256 × 4096 × 4096 through XLA. The floor of a step is the longer
of its bytes over the one and its operations over the other; weights that fit the last-level cache, and int8 arithmetic, may go below it.
"""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.bench import Report
from octavo_engine._src.compose import Built, build
from octavo_engine._src.device import tree_bytes
from octavo_engine.config import EngineConfig

STREAM_BYTES: Final = 256 * 2**20
PRODUCT: Final = (256, 4096, 4096)
ROWS: Final = (1, 8, 32)
CONTEXTS: Final = (256, 1024)
BUDGET: Final = 256
GOALS: Final[dict[str, float]] = {}


def stream_bytes_per_s(repeats: int) -> float:
    """Read bandwidth with a thread on every core."""
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(STREAM_BYTES // 8), cores)
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        best = min(_time(lambda: list(pool.map(np.sum, parts))) for _ in range(repeats))
    return STREAM_BYTES / best


def product_flops_per_s(repeats: int) -> float:
    """Rate of a large float32 product."""
    rows, inner, outer = PRODUCT
    a, b = jnp.ones((rows, inner), jnp.float32), jnp.ones((outer, inner), jnp.float32)
    run = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ()))))
    jax.block_until_ready(run(a, b))
    best = min(_time(lambda: jax.block_until_ready(run(a, b))) for _ in range(repeats))
    return 2 * rows * inner * outer / best


def layer_flops(config: Any, tokens: int, context: int) -> float:
    """Operations of all layers for so many tokens, each of which sees `context`."""
    wide = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    inner = config.num_heads * config.head_dim
    weights = config.hidden_size * (wide + inner + 3 * config.intermediate_size)
    return float(2 * tokens * config.num_layers * (weights + 2 * context * inner))


def layer_bytes(built: Built, rows: int, context: int) -> float:
    """Bytes that all layers read for rows that see `context`."""
    programs = built.core.runner.programs
    spec = built.core.planner.spec
    stored = tree_bytes(built.core.runner.kv) / (spec.num_blocks[0] * spec.block_size)
    return tree_bytes([segment.params for segment in programs.segments]) + rows * context * stored


def run(report: Report, *, quick: bool) -> None:
    """Measure the machine, then decode steps and prefill chunks."""
    repeats = 3 if quick else 10
    bandwidth, rate = stream_bytes_per_s(repeats), product_flops_per_s(repeats)
    report.add("stream", bandwidth / 1e9, "GB/s", repeats)
    report.add("product_float32", rate / 1e9, "GFLOP/s", repeats)
    built = build(EngineConfig(max_num_batched_tokens=BUDGET, max_num_seqs=max(ROWS), kv_cache_memory_bytes=2**30))
    for name, what, why in built.table:
        if name in ("layers", "quantization", "attention", "KV pool"):
            print(f"{name}: {what} ({why})")
    runner, config = built.core.runner, built.checkpoint.config
    for rows in ROWS:
        for context in CONTEXTS:
            times = [runner.time_decode(rows, context) for _ in range(repeats)]
            floor = max(layer_bytes(built, rows, context) / bandwidth, layer_flops(config, rows, context) / rate)
            _tell(report, f"decode_{rows}_at_{context}", times, floor)
    for tokens in (64, BUDGET):
        times = [runner.time_step(tokens) for _ in range(repeats)]
        floor = max(layer_bytes(built, 1, tokens) / bandwidth, layer_flops(config, tokens, tokens // 2) / rate)
        _tell(report, f"prefill_{tokens}", times, floor)
    built.close()


def _tell(report: Report, name: str, times: list[float], floor_s: float) -> None:
    median = statistics.median(times)
    report.add(name, median * 1e3, "ms", len(times))
    report.add(f"{name}_floor", floor_s * 1e3, "ms")
    report.add(f"{name}_of_floor", floor_s / median, "x")


def _time(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
