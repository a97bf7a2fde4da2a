"""The workspace's tests on a newer Python, where uv.lock holds the newest JAX the ranges allow."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from octavo_tools.environments import SKIPPED, UV, CommandFailed, RegistryUnreachable, outside_variables, uv
from octavo_tools.workspace import ROOT


def find_python(version: str) -> Path | None:
    """An installed interpreter: one uv finds, or one pyenv keeps outside PATH."""
    found = subprocess.run([UV, "python", "find", "--no-python-downloads", version], capture_output=True, text=True, cwd=ROOT)
    if found.returncode == 0:
        return Path(found.stdout.strip())
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return next(iter(sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Run pytest on another Python in an environment of its own; 75 when there is none or it cannot be filled."""
    parser = argparse.ArgumentParser(prog="tools/second-python", description=__doc__)
    parser.add_argument("--version", default="3.13", help="Python to look for (default: %(default)s)")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args(argv)
    python = find_python(args.version)
    if python is None:
        print(f"SKIP: no Python {args.version} is installed")
        return SKIPPED
    with tempfile.TemporaryDirectory(prefix="octavo-python-") as folder:
        try:
            uv("sync", "--quiet", "--frozen", "--python", str(python), UV_PROJECT_ENVIRONMENT=folder)
        except RegistryUnreachable as error:
            print(f"SKIP: a registry cannot be reached: {error}")
            return SKIPPED
        except CommandFailed as error:
            print(f"FAIL: {error}")
            return 1
        programs = Path(folder, "bin")
        show = "import platform, jax; print('Python', platform.python_version(), 'JAX', jax.__version__, flush=True)"
        path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
        variables = outside_variables(PATH=path, VIRTUAL_ENV=folder)
        subprocess.run([programs / "python", "-c", show], cwd=ROOT, env=variables, check=True)
        return subprocess.run([programs / "pytest", *args.pytest], cwd=ROOT, env=variables).returncode
