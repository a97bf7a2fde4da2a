"""How fast simulation is: `python -m octavo_scheduler.bench [--json FILE] [--quick]`.

Steady decode of 256 rows. `simulate_small_cache` runs the scheduler around `octavo_core.testing.small_cache`; around the cache that serves
it is measured by `octavo_engine.bench simulate`. `simulate_counts` only counts blocks. All on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import jax

from octavo_core.bench import Report, parse_arguments
from octavo_core.specs import CacheSpec
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler._src.sim_bench import BLOCKS, CONFIGURATIONS, ROWS, Steady
from octavo_scheduler._src.sim_cache import CountingCache

GOALS: Final = {"simulate_counts": 300_000}


def counting(spec: CacheSpec) -> CountingCache:
    """Counts of such a cache."""
    return CountingCache(spec.num_blocks[0], spec.block_size, spec.max_sequences)


def bench_simulation(report: Report, *, quick: bool) -> None:
    """Steps a second, alone and side by side."""
    steps, repeats = (32, 1) if quick else (128, 5)
    small: Any = Steady(SmallCache)
    report.add("simulate_small_cache", small.steps_per_s(steps, repeats), "1/s", repeats, "scan, full state")
    counts = Steady(counting)
    report.add("simulate_counts_alone", counts.steps_per_s(steps, repeats), "1/s", repeats, "scan, one configuration")
    for name, side_by_side in (("simulate_counts", True), ("simulate_counts_in_turn", False)):
        many = counts.steps_per_s_of_many(steps, repeats, side_by_side=side_by_side)
        report.add(
            name,
            many,
            "1/s",
            repeats,
            f"{CONFIGURATIONS} configurations, {'side by side' if side_by_side else 'one after another'}",
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything."""
    arguments = parse_arguments("Speed of the scheduler and of simulation.", argv)
    os.environ.setdefault("NPROC", "1")  # read when XLA starts its threads, at the first operation
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    report = Report(f"octavo_scheduler: {ROWS} rows, {BLOCKS:,} blocks; XLA threads: {os.environ['NPROC']}", GOALS)
    bench_simulation(report, quick=arguments.quick)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
