"""The house rules notice what they say they notice."""

import subprocess
import sys
from pathlib import Path

import pytest

from octavo_tools import rules
from octavo_tools.check import Outcome, run_all
from octavo_tools.environments import UNREACHABLE
from octavo_tools.workspace import ROOT, packages


def function(lines: int, docstring: str = "") -> str:
    body = [f'    """{docstring}"""'] if docstring else []
    return "\n".join(["def long():", *body, *["    x = 1"] * (lines - 1)])


def test_a_long_function_is_found_unless_its_docstring_says_why() -> None:
    assert [*rules.sizes_in(function(50))] == []
    assert [*rules.sizes_in(function(51))] == ["1: long has 51 lines, wanted at most 50"]
    assert [*rules.sizes_in(function(51, "Do it.\n\n    Size: one table.\n    "))] == []
    assert [*rules.sizes_in(function(50, "A docstring does not count."))] == []
    assert [*rules.sizes_in(function(51), functions=False)] == []


def test_a_long_module_is_found_unless_its_docstring_says_why() -> None:
    body = "x = 1\n" * 400
    assert [*rules.sizes_in(body)] == []
    assert [*rules.sizes_in(body + "x = 1\n")] == ["1: 401 lines, wanted at most 400"]
    assert [*rules.sizes_in('"""All of it.\n\nSize: one state machine.\n"""\n' + body)] == []


def test_a_long_class_is_found() -> None:
    assert [*rules.sizes_in("class C:\n" + "    x = 1\n" * 200)] == ["1: C has 201 lines, wanted at most 200"]


@pytest.mark.parametrize("folder", ["work", "root"])
def test_a_path_of_one_machine_is_found(folder: str) -> None:
    assert rules.MACHINE_PATH.search(f"open('/{folder}/x')")
    assert rules.MACHINE_PATH.search(f"cd /{folder}")
    assert not rules.MACHINE_PATH.search(f"src/{folder}/x and /{folder}er and a/{folder}")


def test_words_of_an_outage_are_told_from_words_of_a_conflict() -> None:
    assert UNREACHABLE.search("error: Failed to fetch: `https://pypi.org/simple/jax/`")
    assert UNREACHABLE.search("Packages were unavailable because the network was disabled")
    assert not UNREACHABLE.search("Because octavo-kvcache depends on octavo-core>=0.2, your requirements are unsatisfiable")


def test_a_failed_check_fails_the_run_and_a_skipped_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Outcome:
        raise ValueError("no")

    assert run_all({"fine": lambda: Outcome("ok"), "later": lambda: Outcome("SKIP", "offline")}) == 0
    assert run_all({"fine": lambda: Outcome("ok"), "broken": broken}) == 1
    assert "ValueError: no" in capsys.readouterr().out


def test_an_unknown_check_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "check", "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no check is called nonsense" in done.stderr


def test_every_package_of_the_workspace_is_known() -> None:
    assert {p.folder for p in packages()} == {Path(p.parent) for p in (ROOT / "packages").glob("*/pyproject.toml")}
