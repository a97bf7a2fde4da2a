"""The house rules notice what they say they notice."""

import subprocess
import sys
from pathlib import Path

import pytest

from octavo_tools import rules
from octavo_tools.check import Outcome, run_all
from octavo_tools.environments import UNREACHABLE
from octavo_tools.workspace import ROOT, Package, packages


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


def test_a_link_that_leads_nowhere_is_found(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# What is *in* it\n")
    page = tmp_path / "page.md"
    good = "[a](other.md) [b](other.md#what-is-in-it) [c](#here) [d](https://example.org/x) `[e](none.md)`"
    page.write_text(f"# Here\n\n{good}\n\n```\n[f](none.md)\n```\n")
    assert [*rules.dead_links(page)] == []
    page.write_text("[a](none.md)\n[b](other.md#there) [c](#gone)\n")
    assert [*rules.dead_links(page)] == [
        "page.md:1: 'none.md' is not there",
        "page.md:2: other.md has no heading '#there'",
        "page.md:2: page.md has no heading '#gone'",
    ]


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


def package_in(root: Path, name: str, *, version: str, stated: str, requires: str = "") -> Package:
    """A package as the workspace has them, with little in it."""
    folder = root / "packages" / name
    source = folder / "src" / f"octavo_{name}"
    source.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "octavo-{name}"\nversion = "{version}"\ndependencies = [{requires}]\n'
    )
    (folder / "CHANGELOG.md").write_text(f"## [{version}]\n")
    (source / "__init__.py").write_text(f'__version__ = "{stated}"\n')
    return Package(folder)


@pytest.mark.parametrize(
    ("stated", "requires", "finding"),
    [
        ("0.1.0", '"octavo-base>=0.1,<0.2"', None),
        ("0.1.1", "", "wanted __version__ 0.1.0"),
        ("0.1.0", '"octavo-base>=0.2"', "the workspace has 0.1.3"),
        ("0.1.0", '"octavo-base==0.1.3"', "wanted a range"),
        ("0.1.0", '"octavo-base"', "wanted a range"),
        ("0.1.0", '"octavo-gone>=1"', "not in the workspace"),
    ],
)
def test_versions_that_disagree_are_found(monkeypatch, tmp_path: Path, stated: str, requires: str, finding: str | None) -> None:
    base = package_in(tmp_path, "base", version="0.1.3", stated="0.1.3")
    other = package_in(tmp_path, "other", version="0.1.0", stated=stated, requires=requires)
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    monkeypatch.setattr(rules, "packages", lambda: [base, other])
    found = rules.wrong_versions()
    assert [finding in line for line in found] == ([True] if finding else [])


def test_a_package_without_its_files_is_found(monkeypatch, tmp_path: Path) -> None:
    bare = package_in(tmp_path, "bare", version="0.1.0", stated="0.1.0")
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    monkeypatch.setattr(rules, "packages", lambda: [bare])
    missing = " ".join(rules.wrong_files())
    assert all(name in missing for name in ("README.md", "py.typed", "has no test"))
