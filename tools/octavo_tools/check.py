"""Every static check of the workspace, two at a time, one line each.

Knows which checks there are and how to print them; the rules themselves are in `octavo_tools.rules`, `.importlinter` and
`pyproject.toml`. Runs no test.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from octavo_tools import rules
from octavo_tools.environments import UNREACHABLE
from octavo_tools.workspace import ROOT, packages


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one check: `ok`, `FAIL` or `SKIP`, and what to show when it is not `ok`."""

    verdict: str
    detail: str = ""


Check = Callable[[], Outcome]


def command(*argv: str) -> Check:
    """A check that passes when the command does."""

    def run() -> Outcome:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
        return Outcome("FAIL" if done.returncode else "ok", (done.stdout + done.stderr).strip())

    return run


def rule(find: Callable[[], list[str]]) -> Check:
    """A check that passes when the rule finds nothing."""

    def run() -> Outcome:
        found = find()
        return Outcome("FAIL" if found else "ok", "\n".join(found))

    return run


def lock_is_current() -> Outcome:
    """`uv.lock` fits every pyproject.toml; skipped when that cannot be told without a registry."""
    outcome = command("uv", "lock", "--check")()
    if outcome.verdict == "FAIL" and UNREACHABLE.search(outcome.detail):
        return Outcome("SKIP", "the registry cannot be reached")
    return outcome


def checks(*, fix: bool) -> dict[str, Check]:
    """Every check by name, the slowest first. With `fix`, what a program can mend is mended."""
    sources = [str(package.source.parent.relative_to(ROOT)) for package in packages()]
    python = [sys.executable, "-m"]
    return {
        "types": command(*python, "mypy", *sources, "tools/octavo_tools"),
        "imports": command("lint-imports", "--no-logo"),
        "graph": command(sys.executable, "tools/import-graph", *([] if fix else ["--check"])),
        "ranges": command(sys.executable, "tools/compatibility", *([] if fix else ["--check"])),
        "format": command("ruff", "format", "--output-format=concise", ".", *([] if fix else ["--check"])),
        "lint": command("ruff", "check", "--output-format=concise", ".", *(["--fix"] if fix else [])),
        "lock": lock_is_current,
        "files": rule(rules.wrong_files),
        "versions": rule(rules.wrong_versions),
        "words": rule(rules.wrong_words),
        "links": rule(rules.wrong_links),
        "sizes": rule(rules.wrong_sizes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks named on the command line, or all."""
    parser = argparse.ArgumentParser(prog="tools/check", description="Static checks of the workspace.")
    parser.add_argument(
        "names", nargs="*", metavar="CHECK", help=f"one or more of {', '.join(checks(fix=False))}; all when none is named"
    )
    parser.add_argument("--fix", action="store_true", help="mend what a program can mend")
    args = parser.parse_args(argv)
    known = checks(fix=args.fix)
    if unknown := set(args.names) - set(known):
        parser.error(f"no check is called {', '.join(sorted(unknown))}")
    return run_all({name: check for name, check in known.items() if not args.names or name in args.names})


def run_all(chosen: dict[str, Check]) -> int:
    """Run checks two at a time, print a line for each as it ends; 1 when one failed."""
    failed = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        jobs = {pool.submit(_timed, check): name for name, check in chosen.items()}
        for job in as_completed(jobs):
            outcome, seconds = job.result()
            print(f"{outcome.verdict:<5}{jobs[job]:<10}{seconds:6.1f} s", flush=True)
            if outcome.verdict != "ok":
                print(outcome.detail, flush=True)
            failed += [jobs[job]] if outcome.verdict == "FAIL" else []
    print(f"failed: {', '.join(sorted(failed))}" if failed else "all checks pass")
    return 1 if failed else 0


def _timed(check: Check) -> tuple[Outcome, float]:
    start = time.perf_counter()
    try:
        outcome = check()
    except Exception as error:  # A check that cannot run is a failed check, beside the others' results.
        outcome = Outcome("FAIL", f"{type(error).__name__}: {error}")
    return outcome, time.perf_counter() - start
