"""The import graph between packages, drawn from source by grimp, for docs/architecture.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import grimp

from octavo_tools.workspace import ROOT, packages

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- import graph: uv run tools/import-graph -->\n", "<!-- end of import graph -->"


def mermaid() -> str:
    """Which package imports which, as a Mermaid diagram. Direct imports only."""
    modules = [package.module for package in packages()]
    graph = grimp.build_graph(modules[0], *modules[1:], exclude_type_checking_imports=True, cache_dir=None)
    imports = {(importer, imported) for importer in graph.modules for imported in graph.find_modules_directly_imported_by(importer)}
    pairs = sorted({(left.partition(".")[0], right.partition(".")[0]) for left, right in imports})
    return "\n".join(["```mermaid", "graph TD", *(f"    {left} --> {right}" for left, right in pairs if left != right), "```", ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Write the graph into the page, or with `--check` say whether it is current."""
    parser = argparse.ArgumentParser(prog="tools/import-graph", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    args = parser.parse_args(argv)
    page = PAGE.read_text()
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    current = head + BEGIN + mermaid() + END + tail
    if args.check and current != page:
        print(f"{PAGE.relative_to(ROOT)} shows an old import graph: run uv run tools/import-graph")
        return 1
    if not args.check:
        PAGE.write_text(current)
    return 0
