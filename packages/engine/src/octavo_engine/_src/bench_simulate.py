"""Simulated steps a second with the cache that serves: steady decode of 256 rows, 16,384 blocks."""

from __future__ import annotations

import os
from typing import Final

import jax

from octavo_core.bench import Report
from octavo_kvcache import RadixCache
from octavo_scheduler.simulate import Steady

GOALS: Final = {"simulate_steps": 40_000, "simulate_vmap": 60_000}
CONFIGURATIONS: Final = 64


def run(report: Report, *, quick: bool) -> None:
    """One configuration in a scan, then 64 side by side."""
    os.environ.setdefault("NPROC", "1")  # read when XLA starts its threads, at the first operation
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    steady = Steady(RadixCache)
    steps, repeats = (32, 1) if quick else (128, 5)
    report.add("simulate_steps", steady.steps_per_s(steps, repeats), "1/s", repeats, "scan, full state")
    if not quick:
        many = steady.steps_per_s_of_many(steps, 2, side_by_side=False, configurations=CONFIGURATIONS)
        report.add("simulate_vmap", many, "1/s", 2, f"{CONFIGURATIONS} configurations, one after another in one program")
    side = steady.steps_per_s_of_many(2, 1, side_by_side=True, configurations=4 if quick else CONFIGURATIONS)
    report.add("simulate_vmap_side_by_side", side, "1/s", 1, "the same by vmap, where every branch runs")
