"""Measures paged attention alone: `python -m octavo_kernels.bench [--device] [--quick] [--only REGEX] [--json FILE]`.

`--device` first checks every case of `octavo_kernels.cases` against its oracle on the GPU, then prints, per step, the time of one layer, the
rate at which it read KV, the fraction of the copy bandwidth measured in the same run, and TFLOP/s, beside JAX's own kernels.
Without it, the portable backend is timed against the float32 reference on the CPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from octavo_kernels._src import bench_portable
from octavo_kernels._src.bench_report import Report


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, and write JSON; answers the number of cases that failed."""
    parser = argparse.ArgumentParser(prog="octavo_kernels.bench", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", action="store_true", help="check and time the Hopper kernels on a Hopper GPU")
    parser.add_argument("--quick", action="store_true", help="two cases, few repetitions")
    parser.add_argument("--only", default="", metavar="REGEX", help="names to run: check/…, decode/…, prefill/…, mixed/…")
    parser.add_argument("--sweep", action="store_true", help="time each configuration that can launch, instead of the chosen one")
    parser.add_argument("--profile", action="store_true", help="report each kernel's time on the GPU instead of the step's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a flat list of {name, value, unit, n}")
    args = parser.parse_args(argv)
    report = Report(args.json)
    run = _on_device if args.device else bench_portable.run
    run(report, only=re.compile(args.only), quick=args.quick, mode="sweep" if args.sweep else "profile" if args.profile else "time")
    if report.failures:
        print(json.dumps(report.failures, indent=1, ensure_ascii=False), file=sys.stderr)
    return len(report.failures)


def _on_device(report: Report, *, only: re.Pattern[str], quick: bool, mode: str) -> None:
    from octavo_kernels._src import bench_device  # Pallas, which other machines need not import

    bench_device.run(report, only=only, quick=quick, mode=mode)


if __name__ == "__main__":
    raise SystemExit(min(main(), 1))
