"""How fast the composed parts are: `python -m octavo_engine.bench [NAME] [--json FILE] [--quick]`.

One module `octavo_engine._src.bench_<name>` for each bench, with `run(report, quick)`. Without a name all of them run.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence

from octavo_core.bench import Report, parse_arguments
from octavo_engine import _src


def names() -> list[str]:
    """The benches there are."""
    return sorted(m.name.removeprefix("bench_") for m in pkgutil.iter_modules(_src.__path__) if m.name.startswith("bench_"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run one bench, or all."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = [words.pop(0)] if words and not words[0].startswith("-") else names()
    unknown = [name for name in chosen if name not in names()]
    if unknown:
        sys.exit(f"no bench is called '{unknown[0]}'; there are: {', '.join(names())}")
    arguments = parse_arguments(f"Speed of the engine's parts: {', '.join(names())}.", words)
    modules = [importlib.import_module(f"octavo_engine._src.bench_{name}") for name in chosen]
    goals = {name: goal for module in modules for name, goal in module.GOALS.items()}
    report = Report(f"octavo_engine: {', '.join(chosen)}", goals)
    for module in modules:
        module.run(report, quick=arguments.quick)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
