"""The CPU kernels compiled with sanitizers and fed random shapes: `python -m octavo_tools.kernels_sanitized [--rounds N]`.

A program of its own around the C++ headers, without Python or XLA in the process: layers and attention of random sizes with threads, every
buffer exactly as long as it must be. Address and undefined-behaviour sanitizers in one build, the thread sanitizer in another.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from octavo_kernels_cpu._src.build_library import FLAGS
from octavo_tools.workspace import ROOT

SOURCES = ROOT / "packages" / "kernels-cpu" / "src" / "octavo_kernels_cpu" / "csrc"
PROGRAM = ROOT / "packages" / "kernels-cpu" / "tests" / "fuzz.cc"
SANITIZERS = {
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and run each; 1 when a sanitizer or the program finds something."""
    parser = argparse.ArgumentParser(prog="kernels_sanitized", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="random shapes for each build (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", default="avx2", choices=sorted(FLAGS))
    args = parser.parse_args(argv)
    return 1 if any(run(name, args.isa, args.rounds, args.seed) for name in SANITIZERS) else 0


def run(name: str, isa: str, rounds: int, seed: int) -> int:
    """One build and its run."""
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "fuzz")
        flags = [flag for flag in FLAGS[isa] if not flag.startswith("-O")]
        command = [
            "g++",
            "-std=c++20",
            "-O1",
            "-g",
            "-w",
            "-pthread",
            *flags,
            *SANITIZERS[name],
            f"-I{SOURCES}",
            str(PROGRAM),
            "-o",
            program,
        ]
        if status := subprocess.run(command, check=False).returncode:
            return status
        status = subprocess.run([program, str(rounds), str(seed)], check=False).returncode
    print(f"{'ok' if status == 0 else 'FAIL'}: {rounds} random shapes with the {name} sanitizer, {isa}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
