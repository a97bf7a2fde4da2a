"""Where the time of a step goes on the GPU: mean duration of each kernel, from JAX's profiler. Knows no clock of the host."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax

PROGRAMS = 3
"""Runs of a program that are traced, after as many that are not."""


def kernel_times_us(program: Any, *inputs: Any) -> dict[str, tuple[int, float]]:
    """How often each kernel ran in a program, and its mean time in microseconds."""
    for _ in range(PROGRAMS):
        jax.block_until_ready(program(*inputs))
    with tempfile.TemporaryDirectory(prefix="octavo-profile-") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([program(*inputs) for _ in range(PROGRAMS)])
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = _durations(jax.profiler.ProfileData.from_file(str(path)))
    return {name: (len(times) // PROGRAMS, sum(times) / len(times) / 1e3) for name, times in found.items()}


def _durations(profile: Any) -> dict[str, list[float]]:
    """Nanoseconds of every event of the GPU's streams, by name."""
    found: dict[str, list[float]] = defaultdict(list)
    for plane in profile.planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                found[event.name].append(event.duration_ns)
    return found
