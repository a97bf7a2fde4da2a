"""What every test of the workspace shares: type checks, profiles, compilation cache, outside material.

Runs before any test module is imported and therefore before jax is. Needs only pytest, hypothesis, jaxtyping and beartype, so
that one package's tests can run where no sibling is installed.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).parent

# Compiled programs are kept between runs. JAX reads these when it is imported, in child processes too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Every annotated shape of every package is checked, whichever package's tests import it first.
install_import_hook([f"octavo_{folder.name}" for folder in (ROOT / "packages").iterdir()], "beartype.beartype")

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, database=None)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, stateful_step_count=100, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("OCTAVO_HYPOTHESIS", "ci"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of material too large or not ours to keep in the tree; a test that asks for it is skipped where it is absent.

    `OCTAVO_SHARED` names the folder; without it, `shared` beside the checkout is used.
    """
    folder = Path(os.environ.get("OCTAVO_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip("outside material is absent (OCTAVO_SHARED names its folder)")
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count what did not run, and why it is not a failure."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "OCTAVO_SHARED" in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped for want of OCTAVO_SHARED")
