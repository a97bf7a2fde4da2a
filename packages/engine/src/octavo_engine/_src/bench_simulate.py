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
    steps, repeats = (2, 1) if quick else (8, 2)
    side = steady.steps_per_s_side_by_side(steps, repeats, CONFIGURATIONS)
    report.add("simulate_vmap", side, "1/s", repeats, f"{CONFIGURATIONS} configurations side by side, full state")
