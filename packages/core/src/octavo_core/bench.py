"""What every package's bench shares: timing, the table for people, the JSON for tools, the machine it ran on.

`python -m octavo_<package>.bench [--json FILE] [--quick]` prints a table and writes a flat list of `{name, value, unit, n}`; names are
stable. Knows no package and no jax.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: Stable: dashboards and comparisons hang on it.
        value: In `unit`; a median where there were several.
        unit: `us`, `x`, `B`, `1/s`, …
        n: Measurements behind the value; 1 for a count or a quotient.
        note: For the table only.
    """

    name: str
    value: float
    unit: str
    n: int = 1
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call, in microseconds."""

    median_us: float
    p99_us: float
    least_us: float
    n: int

    @property
    def note(self) -> str:
        """The rest of the story, for a table."""
        return f"min {self.least_us:.1f}, p99 {self.p99_us:.1f}"


def time_call(call: Callable[[], object], *, budget_s: float = 1.0, least: int = 20, warm: int = 5) -> Timing:
    """Time a call again and again, without the garbage collector.

    Args:
        call: Returns when its work is done.
        budget_s: Stop after so long.
        least: Measure at least so often.
        warm: Calls before the first that counts.
    """
    for _ in range(warm):
        call()
    times: list[int] = []
    end = time.perf_counter() + budget_s
    gc.disable()
    try:
        while len(times) < least or time.perf_counter() < end:
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    finally:
        gc.enable()
    return summarise(times)


def summarise(times_ns: Sequence[int]) -> Timing:
    """Median, p99 and minimum of times in nanoseconds."""
    ordered = sorted(times_ns)
    n = len(ordered)
    return Timing(ordered[n // 2] / 1e3, ordered[min(n - 1, n * 99 // 100)] / 1e3, ordered[0] / 1e3, n)


class Report:
    """Figures as they are measured: each is printed at once, all are written at the end.

    Args:
        title: Of the table.
        goals: Bound of a figure's value by name; a note says on which side it lies. Units `us`, `B` and `ratio` want less, others more.
    """

    def __init__(self, title: str, goals: Mapping[str, int | float] | None = None) -> None:
        self.figures: list[Figure] = []
        self._goals = goals or {}
        print(f"{title}\n{describe_machine()}\n")
        print(f"{'name':<34}{'value':>12} {'unit':<6}{'n':>7}  {'goal':<10} note")

    def add(self, name: str, value: int | float, unit: str, n: int = 1, note: str = "") -> None:
        """Take in and print a figure."""
        self.figures.append(Figure(name, float(value), unit, n, note))
        goal = self._goals.get(name)
        met = "" if goal is None else _goal(value, goal, wants_less=unit in ("us", "B", "ratio"))
        print(f"{name:<34}{value:>12.1f} {unit:<6}{n:>7}  {met:<10} {note}", flush=True)

    def time(self, name: str, call: Callable[[], object], *, budget_s: float, note: str = "") -> Timing:
        """Time a call and take in its median."""
        return self.take(name, time_call(call, budget_s=budget_s), note)

    def take(self, name: str, timing: Timing, note: str = "") -> Timing:
        """Take in the median of a timing."""
        self.add(name, timing.median_us, "us", timing.n, "; ".join(filter(None, (timing.note, note))))
        return timing

    def write(self, path: Path | None) -> None:
        """Write the figures as JSON, if a path is given."""
        if path is not None:
            rows = [{"name": f.name, "value": f.value, "unit": f.unit, "n": f.n} for f in self.figures]
            path.write_text(json.dumps(rows, indent=1) + "\n")


def _goal(value: int | float, goal: int | float, *, wants_less: bool) -> str:
    """The goal as the table shows it, with a mark where it is missed."""
    sign, met = ("<=", value <= goal) if wants_less else (">=", value >= goal)
    return f"{sign} {goal:g}{'' if met else ' !'}"


def describe_machine() -> str:
    """Processor, cores, what its vector units can do, versions and load: what figures depend on."""
    flags, model = set[str](), platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        flags, model = set(fields.get("flags", "").split()), fields.get("model name", model)
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags]
    try:
        jax_version = metadata.version("jax")
    except metadata.PackageNotFoundError:
        jax_version = "absent"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    python = platform.python_version()
    return (
        f"{model}, {cores} cores ({', '.join(units) or 'no vector units known'}); Python {python}, JAX {jax_version}; load {load}"
    )


def parse_arguments(what: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments every bench takes: `json` (a path or None) and `quick`."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of {name, value, unit, n}")
    parser.add_argument("--quick", action="store_true", help="shorter, for a check that the bench runs")
    return parser.parse_args(argv)
