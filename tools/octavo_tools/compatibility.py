"""Which versions of the packages go together, as a page drawn from the ranges in their pyproject.toml files.

Reads metadata only. What the ranges promise is tried by `tools/wheels`, which installs the wheels beside one another.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement

from octavo_tools.workspace import ROOT, Package, packages

BEGIN, END = "<!-- ranges: uv run tools/compatibility -->\n", "<!-- end of ranges -->"
OUTSIDE = ("jax", "flax")
"""Distributions outside the workspace whose ranges decide whether two packages can be installed together."""


def page_of(root: Path = ROOT) -> Path:
    """Where the table stands."""
    return root / "docs" / "compatibility.md"


def table(members: Sequence[Package], versions: Mapping[str, str] = MappingProxyType({})) -> str:
    """A row for each package: its version, the Pythons it runs on, and the range it takes of each other one.

    A range that only an extra of the package asks for is marked with the extra's name. `versions` are those about to change.
    """
    columns = [member.name for member in members if any(member.name in other.siblings for other in members)]
    heads = ["Package", "Version", "Python", *columns, *OUTSIDE]
    rows = [
        [
            m.name,
            versions.get(m.name, m.version),
            m.project.get("requires-python", ""),
            *(_range(m, c) for c in (*columns, *OUTSIDE)),
        ]
        for m in members
    ]
    lines = ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join(lines) + "\n"


def _range(package: Package, name: str) -> str:
    """What a package accepts of a distribution; empty where it does not require it."""
    extras: dict[str, list[str]] = package.project.get("optional-dependencies", {})
    wanted = [("", line) for line in package.project.get("dependencies", [])]
    wanted += [(extra, line) for extra, lines in extras.items() for line in lines]
    found: dict[str, list[str]] = {}
    for extra, line in wanted:
        need = Requirement(line)
        if need.name == name:
            found.setdefault(",".join(sorted(map(str, need.specifier), reverse=True)), []).append(extra)
    return "; ".join(f"`{span}`" + ("" if "" in extras else f" with `{', '.join(extras)}`") for span, extras in found.items())


def current(root: Path = ROOT, versions: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """The page as it stands, and as it should with the versions that are about to change."""
    page = page_of(root).read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return page, head + BEGIN + table(packages(root), versions) + END + tail


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table into the page, or with `--check` say whether it is current."""
    parser = argparse.ArgumentParser(prog="tools/compatibility", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    args = parser.parse_args(argv)
    stands, wanted = current()
    if args.check and stands != wanted:
        print(f"{page_of().relative_to(ROOT)} shows old ranges: run uv run tools/compatibility")
        return 1
    if not args.check:
        page_of().write_text(wanted)
    return 0
