"""What the workspace consists of: packages, their metadata, their files. Reads only; imports no package of Octavo."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Package:
    """One workspace member: `packages/<name>` with distribution `octavo-<name>` and import name `octavo_<name>`."""

    folder: Path

    @cached_property
    def project(self) -> dict[str, Any]:
        """The `[project]` table of its pyproject.toml."""
        table: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]
        return table

    @property
    def name(self) -> str:
        """Name of the distribution."""
        return str(self.project["name"])

    @property
    def module(self) -> str:
        """Name to import."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """Static version."""
        return str(self.project["version"])

    @property
    def source(self) -> Path:
        """Folder of the importable package."""
        return self.folder / "src" / self.module

    @property
    def tests(self) -> Path:
        """Folder of its own tests."""
        return self.folder / "tests"

    @property
    def requirements(self) -> list[str]:
        """Every requirement line, those of extras included."""
        extras: dict[str, list[str]] = self.project.get("optional-dependencies", {})
        return [*self.project.get("dependencies", []), *(line for lines in extras.values() for line in lines)]

    @property
    def siblings(self) -> set[str]:
        """Distributions of this workspace it requires, directly."""
        return {m[0] for line in self.requirements if (m := re.match(r"octavo-[a-z0-9-]+", line))}


def packages(root: Path = ROOT) -> list[Package]:
    """Every member of the workspace, or of a copy of it, by name."""
    return [Package(path.parent) for path in sorted(root.glob("packages/*/pyproject.toml"))]


def tracked_files() -> list[Path]:
    """Files git tracks and that still exist.

    Raises:
        RuntimeError: Outside a git checkout.
    """
    run = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"wanted a git checkout at {ROOT}: {run.stderr.strip()}")
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def python_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Every .py file below the folders, in order."""
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))
