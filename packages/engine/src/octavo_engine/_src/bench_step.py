"""The steady step and arrivals, scheduler and radix cache under one jit, as an engine calls them.

Steady decode: every row makes a token a step, one row in 32 takes a new block and files the one it filled, nine tenths of the pool are
leased. Beside it, where the repository's tools are installed, the same steps of a scheduler in plain Python, which has no prefix cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from typing import Any, Final

import jax
import numpy as np

from octavo_core.bench import Report, summarise
from octavo_core.specs import CacheSpec
from octavo_engine._src.planner import Planner
from octavo_kvcache import RadixCache
from octavo_scheduler import ChunkedScheduler, SchedulerConfig

BLOCK_SIZE: Final = 32
MAX_LEN: Final = 4_096
GOALS: Final = {"step_256": 100, "step_1024": 200, "step_256_p99": 300, "arrive_8": 300}


def config_of(rows: int, *, budget: int = 2_048, max_arrivals: int = 8, reservation: str = "optimistic") -> SchedulerConfig:
    """Default policies for so many rows."""
    return SchedulerConfig(max_num_seqs=rows, token_budget=max(budget, rows), max_arrivals=max_arrivals, reservation=reservation)


def filling(rows: int) -> SchedulerConfig:
    """Prompts whole, many at a time."""
    return config_of(rows, budget=rows + 64 * MAX_LEN, max_arrivals=64, reservation="none")


def planner_of(config: SchedulerConfig, blocks: int) -> Planner:
    """A compiled planner."""
    cache = RadixCache(CacheSpec((blocks + 1,), BLOCK_SIZE, config.max_num_seqs, MAX_LEN // BLOCK_SIZE))
    scheduler = ChunkedScheduler(config, cache)
    planner = Planner(scheduler, cache, max_arrivals=config.max_arrivals, max_rows=config.max_num_seqs)
    planner.compile()
    return planner


def fill(planner: Any, like: Planner, rows: int, blocks: int) -> None:
    """Let rows arrive and compute their prompts, so that nine tenths of the pool are in use.

    Args:
        planner: With a budget that takes prompts whole.
        like: Whose shapes its arguments have.
        rows, blocks: So many.
    """
    rng = np.random.default_rng(0)
    length = blocks * 7 // 8 // rows * BLOCK_SIZE
    result = like.empty_result()
    for first in range(0, rows, like.max_arrivals):
        arrivals = like.empty_arrivals()
        for i in range(like.max_arrivals):
            size = length + (first + i) % BLOCK_SIZE
            arrivals.sequence[i], arrivals.order[i] = first + i, first + i  # type: ignore[index]
            arrivals.tokens[i, :size] = rng.integers(0, 49_152, size)  # type: ignore[index]
            arrivals.prompt_len[i], arrivals.limit_len[i] = size, MAX_LEN  # type: ignore[index]
        planner.arrive(arrivals)
        plan = planner.step(result)
        result = like.empty_result()
        for sequence in plan.sequence[plan.sample_rows >= 0]:
            result.accepted[sequence], result.token_ids[sequence, 0] = 1, 7  # type: ignore[index]


def filed(planner: Planner) -> tuple[Any, Any]:
    """The planner's state with every full block findable: a step files some blocks only, and prompts came faster."""
    state, cache = planner.state
    upto = np.minimum(state.computed_len, state.known_len)
    commit = jax.jit(lambda cache, tokens: planner.cache.commit(cache, tokens, upto)[0])
    none = jax.numpy.zeros(upto.shape, bool)
    release = jax.jit(lambda cache: planner.cache.release(cache, none))
    more = True
    while more:
        cache, events = release(commit(cache, state.tokens))
        more = bool((np.asarray(events.stored) >= 0).any())
    return state, jax.tree.map(np.asarray, cache)


def plain_planner(filler: Planner, rows: int, blocks: int) -> Any:
    """A scheduler in plain Python with the same rows; None where it is not installed."""
    if importlib.util.find_spec("octavo_tools") is None:
        return None
    plain: Any = importlib.import_module("octavo_tools.plain_scheduler").PlainPlanner(filling(rows), filler.spec)
    fill(plain, filler, rows, blocks)
    plain.config = config_of(rows)
    return plain


def time_steps(planner: Any, like: Planner, rows: int, count: int) -> list[int]:
    """Times of steps in which every row makes a token, in nanoseconds; the first ones do not count."""
    times, result = [], like.empty_result()
    result.accepted[:rows], result.token_ids[:rows] = 1, 7  # type: ignore[index]
    for _ in range(count):
        start = time.perf_counter_ns()
        plan = planner.step(result)
        times.append(time.perf_counter_ns() - start)
    if int(plan.num_rows) != rows or int(plan.num_waiting) or int(plan.events.num_evictable[0]):
        raise RuntimeError(f"the bench wanted {rows} rows to decode and nothing cached beside them, got {plan}")
    return times[count // 10 :]


def run(report: Report, *, quick: bool) -> None:
    """Time steps at 256 and 1,024 rows, then arrivals."""
    os.environ.setdefault("NPROC", "1")  # read when XLA starts its threads, at the first operation
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for rows, blocks in ((256, 16_384), (1_024, 65_536)):
        planner, times = planner_of(config_of(rows), blocks), list[int]()
        filler = planner_of(filling(rows), blocks)
        fill(filler, filler, rows, blocks)
        full = filed(filler)
        for _ in range(1 if quick else 8):  # the free blocks last for so many steps
            planner.restore(full)
            times += time_steps(planner, planner, rows, 100)
        timing = report.take(f"step_{rows}", summarise(times))
        plain = plain_planner(filler, rows, blocks)
        if plain is not None:
            report.take(f"step_{rows}_plain", summarise(time_steps(plain, planner, rows, 100)))
        if rows == 256:
            report.add("step_256_p99", timing.p99_us, "us", timing.n)
    _time_arrivals(report, 20 if quick else 100)


def _time_arrivals(report: Report, count: int) -> None:
    """Eight prompts of 2,048 tokens that are cached but for their last block, matched and leased; aborted again, untimed."""
    planner = planner_of(config_of(72), 16_384)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, 49_152, (8, 2_048))
    times = []
    for turn in range(count):
        arrivals = planner.empty_arrivals()
        for i, prompt in enumerate(prompts):
            arrivals.sequence[i], arrivals.order[i] = i, 8 * turn + i  # type: ignore[index]
            arrivals.tokens[i, :2_048] = prompt  # type: ignore[index]
            arrivals.prompt_len[i], arrivals.limit_len[i] = 2_048, 2_100  # type: ignore[index]
        start = time.perf_counter_ns()
        planner.arrive(arrivals)
        planner.wait()  # now and then a call answers before its work is done
        times.append(time.perf_counter_ns() - start)
        for _ in range(8 if turn == 0 else 1):
            plan = planner.step(planner.empty_result())
        if turn and int(plan.cached_len[:8].min()) < 2_048 - BLOCK_SIZE:
            raise RuntimeError("the bench's prompts are not found")
        ends = planner.empty_result()
        ends.finished[:8] = True  # type: ignore[index]
        planner.step(ends)
    report.take("arrive_8", summarise(times[2:]))
