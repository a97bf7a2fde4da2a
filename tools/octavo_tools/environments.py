"""Throw-away Python environments outside the checkout, with packages as a user would install them.

Knows uv and the registry's moods: a command is tried three times, then from uv's cache alone, and so are all that follow. What
cannot be had then is `RegistryUnreachable`, which callers report as a skip: an outage says nothing about the tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from octavo_tools.workspace import ROOT, Package

SKIPPED = 75
"""Exit status of a program that could not run for want of a registry or a Python (EX_TEMPFAIL)."""

UNREACHABLE = re.compile(
    r"error sending request|dns error|failed to (fetch|lookup|download)|could not connect|connection (refused|reset)"
    r"|operation timed out|network connectivity is disabled|network was disabled|server error|too many requests",
    re.IGNORECASE,
)
PAUSES_S = (2.0, 10.0)
UV = os.environ.get("UV", "uv")


class RegistryUnreachable(Exception):
    """A registry did not answer and uv's cache does not have what is needed."""


class CommandFailed(Exception):
    """A command ended with an error that is the tree's fault."""


def outside_variables(**changes: str) -> dict[str, str]:
    """This process's environment without what ties it to the workspace's virtual environment."""
    tied = {"VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME"}
    return {name: value for name, value in os.environ.items() if name not in tied} | changes


def uv(*args: str, **variables: str) -> str:
    """Run a uv command that may need a registry, in the checkout; answers what it printed.

    Raises:
        RegistryUnreachable: Neither a registry nor the cache could serve it.
        CommandFailed: Anything else went wrong.
    """
    for pause_s in (*PAUSES_S, 0.0):
        done = subprocess.run([UV, *args], cwd=ROOT, env=outside_variables(**variables), capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout
        if not UNREACHABLE.search(done.stderr):
            raise CommandFailed(f"uv {' '.join(args)}\n{done.stderr.strip()}")
        if os.environ.get("UV_OFFLINE"):
            raise RegistryUnreachable(next(line.strip() for line in done.stderr.splitlines() if UNREACHABLE.search(line)))
        time.sleep(pause_s)
    os.environ["UV_OFFLINE"] = "1"
    return uv(*args, **variables)


def build_wheels(members: Iterable[Package], folder: Path) -> dict[str, Path]:
    """Build each package without workspace sources, as a release would, where `folder` has no wheels; the wheel of each distribution."""

    def build(package: Package) -> str:
        return uv("build", "--package", package.name, "--no-sources", "--wheel", "--out-dir", str(folder))

    if not list(folder.glob("*.whl")):
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(build, members))
    return {path.name.split("-")[0].replace("_", "-"): path.absolute() for path in sorted(folder.glob("*.whl"))}


def locked_versions(folder: Path) -> Path:
    """A constraints file with the versions of uv.lock, so that every environment has what the workspace was tested with."""
    path = folder / "constraints.txt"
    options = ["--frozen", "--all-packages", "--all-groups", "--no-emit-workspace", "--no-hashes", "--no-annotate", "--no-header"]
    path.write_text(uv("export", *options, "--format", "requirements.txt"))
    return path


@contextmanager
def environment(requirements: Sequence[str], constraints: Path) -> Iterator[Path]:
    """A fresh environment with these requirements, gone afterwards; answers its folder of programs."""
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        uv("venv", "--quiet", "--python", sys.executable, folder + "/venv")
        programs = Path(folder, "venv", "bin")
        uv("pip", "install", "--quiet", "--python", str(programs / "python"), "--constraints", str(constraints), *requirements)
        yield programs


def run_outside(argv: Sequence[str | Path], *, folder: Path, **variables: str) -> str:
    """Run a program with `folder` as working directory, tied to no workspace; answers what it printed.

    Raises:
        CommandFailed: It ended with an error.
    """
    done = subprocess.run([str(a) for a in argv], cwd=folder, env=outside_variables(**variables), capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"{' '.join(str(a) for a in argv)}\n{done.stdout}{done.stderr}".strip())
    return done.stdout
