"""`tools/release` on a clone of this repository: every step is real but the push that it never makes."""

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_tools import api, changelog, compatibility, release
from octavo_tools.environments import CommandFailed, RegistryUnreachable
from octavo_tools.workspace import ROOT, packages

DAY = "2026-01-31"


def git(root: Path, *args: str) -> str:
    return subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone in which octavo-core's own version was released."""
    with release.copy_of(ROOT) as root:
        write(root / "packages/core/CHANGELOG.md", lambda text: text if changelog.unreleased(text) else with_entry(text))
        commit(root)
        for tag in git(root, "tag", "--list", "core-v*").split():
            git(root, "tag", "--delete", tag)
        version = next(p.version for p in packages(root) if p.name == "octavo-core")
        try:
            release.make(release.prepare(root, "octavo-core", version, DAY), root / "dist")
        except RegistryUnreachable as error:
            pytest.skip(f"what builds archives cannot be had: {error}")
        yield root


@pytest.fixture
def root(released: Path, tmp_path: Path) -> Path:
    """A clone of that, with something to release."""
    with release.copy_of(released) as copy:
        copy = Path(copy).rename(tmp_path / "copy")
    write(copy / "packages/core/CHANGELOG.md", with_entry)
    commit(copy)
    return copy


def with_entry(text: str) -> str:
    if changelog.UNRELEASED not in text:
        text = text.replace("## [", f"{changelog.UNRELEASED}\n\n## [", 1)
    return text.replace(changelog.UNRELEASED, f"{changelog.UNRELEASED}\n\n### Fixed\n\n- Something.", 1)


def write(path: Path, change) -> None:
    path.write_text(change(path.read_text()))


def commit(root: Path) -> None:
    git(root, "commit", "--quiet", "--all", "--allow-empty", "--message", "a change")


def core(root: Path) -> str:
    return next(p.version for p in packages(root) if p.name == "octavo-core")


def patch_of(root: Path) -> str:
    first, second, third = core(root).split(".")
    return f"{first}.{second}.{int(third) + 1}"


def minor_of(root: Path) -> str:
    first, second, _ = core(root).split(".")
    return f"{first}.{int(second) + 1}.0"


def refused(root: Path, version: str, package: str = "core") -> str:
    """What a release is refused for; the repository must be as it was."""
    before = git(root, "rev-parse", "HEAD"), git(root, "status", "--porcelain"), git(root, "tag")
    with pytest.raises(release.Refused) as told:
        release.prepare(root, package, version, DAY)
    assert (git(root, "rev-parse", "HEAD"), git(root, "status", "--porcelain"), git(root, "tag")) == before
    return str(told.value)


def test_a_release_is_a_commit_a_tag_and_two_archives(released: Path) -> None:
    version = core(released)
    assert git(released, "tag", "--points-at", "HEAD") == f"core-v{version}"
    assert f"octavo-core {version}" in git(released, "tag", "--list", "--format=%(contents)", f"core-v{version}")
    assert git(released, "status", "--porcelain") == ""
    assert f"## [Unreleased]\n\n## [{version}] - {DAY}\n" in (released / "packages/core/CHANGELOG.md").read_text()
    sdist, wheel = sorted((released / "dist").iterdir(), key=lambda path: path.suffix)
    with tarfile.open(sdist) as packed:
        assert f"octavo_core-{version}/CHANGELOG.md" in packed.getnames()
    with zipfile.ZipFile(wheel) as packed:
        assert "octavo_core/seams.py" in packed.namelist()


def test_a_later_release_moves_every_stated_version(root: Path) -> None:
    version = patch_of(root)
    release.make(release.prepare(root, "core", version, DAY), root / "dist")
    assert f'__version__ = "{version}"' in (root / "packages/core/src/octavo_core/__init__.py").read_text()
    assert core(root) == version
    assert f'name = "octavo-core"\nversion = "{version}"' in (root / "uv.lock").read_text()
    assert f"| octavo-core | {version} |" in (root / "docs/compatibility.md").read_text()
    text = (root / "packages/core/CHANGELOG.md").read_text()
    assert re.search(rf"## \[Unreleased\]\n\n## \[{version}\] - {DAY}\n\n### Fixed\n\n- Something\.", text)
    assert git(root, "tag", "--points-at", "HEAD") == f"core-v{version}"
    assert git(root, "status", "--porcelain") == ""


def test_a_release_its_dependents_do_not_take_is_refused(root: Path) -> None:
    version = minor_of(root)
    told = refused(root, version)
    for name in ("octavo-engine", "octavo-kvcache", "octavo-server"):
        assert f"{name} takes octavo-core" in told
    assert f"which leaves out {version}: let it take octavo-core>=" in told
    for package in packages(root):
        pattern = re.compile(r"(octavo-core(?:\[\w+\])?>=[\d.]+,<)0\.\d+")
        write(package.folder / "pyproject.toml", lambda text, pattern=pattern: pattern.sub(r"\g<1>0.99", text))
    commit(root)
    assert release.prepare(root, "core", version, DAY).tag == f"core-v{version}"


def test_a_package_waits_for_what_it_requires(root: Path) -> None:
    assert "of which no release is tagged: release octavo-kvcache first" in refused(root, "0.1.0", "engine")


def test_a_patch_may_not_take_a_name_away_nor_touch_a_seam(root: Path) -> None:
    write(root / "packages/core/src/octavo_core/keys.py", lambda text: text.replace("def namespace_of(", "def namespace(", 1))
    write(
        root / "packages/core/src/octavo_core/seams.py", lambda text: text.replace("def now_s(self)", "def now_s(self, zone: str)")
    )
    commit(root)
    told = refused(root, patch_of(root))
    assert "octavo_core.keys.namespace_of: removed; " in told
    assert "octavo_core.seams.Clock.now_s(zone): parameter was added as required; " in told
    assert "raise the minor version" in told


def test_a_patch_may_add(root: Path) -> None:
    write(root / "packages/core/src/octavo_core/keys.py", lambda text: text + "\n\ndef more() -> None:\n    pass\n")
    commit(root)
    ready = release.prepare(root, "core", patch_of(root), DAY)
    assert release.api_difference(ready).added == ("octavo_core.keys.more",)


def test_what_is_not_committed_is_not_released(root: Path) -> None:
    write(root / "packages/core/README.md", lambda text: text + "\n")
    assert "packages/core/README.md: commit them first" in refused(root, patch_of(root))


def test_nothing_to_say_or_a_version_too_low_is_refused(released: Path) -> None:
    assert "lists nothing under '## [Unreleased]'" in refused(released, patch_of(released))
    assert "is released already" in refused(released, core(released))
    assert "wanted a version such as 0.2.0" in refused(released, "next")
    assert "no package is called 'cor'" in refused(released, "1.0.0", "cor")


def test_a_build_that_fails_leaves_nothing_behind(root: Path) -> None:
    write(root / "packages/core/pyproject.toml", lambda text: text.replace('readme = "README.md"', 'readme = "NONE.md"'))
    commit(root)
    ready = release.prepare(root, "core", patch_of(root), DAY)
    before = git(root, "rev-parse", "HEAD"), git(root, "tag")
    with pytest.raises(CommandFailed, match="uv build"):
        release.make(ready, root / "dist")
    assert git(root, "status", "--porcelain", "--untracked-files=no") == ""
    assert (git(root, "rev-parse", "HEAD"), git(root, "tag")) == before


def test_a_dry_run_does_it_all_and_leaves_the_tree_alone(root: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(release, "ROOT", root)
    before = git(root, "rev-parse", "HEAD"), git(root, "tag")
    version = patch_of(root)
    assert release.main(["core", version, "--dry-run", "--date", DAY]) == 0
    told = capsys.readouterr().out
    assert f"tagged  core-v{version}" in told
    assert f"octavo_core-{version}-py3-none-any.whl" in told
    assert (git(root, "rev-parse", "HEAD"), git(root, "tag")) == before
    assert not (root / "dist").exists()
    assert release.main(["core", core(root), "--dry-run"]) == 1
    assert "refused:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("previous", "version", "may"),
    [
        ("0.1.0", "0.1.1", False),
        ("0.1.9", "0.2.0", True),
        ("0.9.0", "1.0.0", True),
        ("1.2.0", "1.3.0", False),
        ("1.2.0", "2.0.0", True),
    ],
)
def test_when_a_version_may_break(previous: str, version: str, may: bool) -> None:
    assert release.may_break(release.Version(previous), release.Version(version)) is may


def test_a_changelog_without_an_unreleased_part_is_told() -> None:
    assert changelog.unreleased("# Changelog\n\n## [1.0.0] - 2026-01-01\n\n- All.\n") is None
    text = "# Changelog\n\n## [0.1.0] - unreleased\n\n- All.\n\n## [0.0.1] - 2025-01-01\n\n- Less.\n"
    assert changelog.released(text, "0.1.0", DAY) == (
        f"# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - {DAY}\n\n- All.\n\n## [0.0.1] - 2025-01-01\n\n- Less.\n"
    )
    with pytest.raises(ValueError, match="Unreleased"):
        changelog.released("# Changelog\n", "0.1.0", DAY)


def sources(folder: Path, text: str) -> Path:
    package = folder / "part"
    (package / "_src").mkdir(parents=True)
    (package / "_src" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from part._src.all import Thing, act\n\n__all__ = ['Thing', 'act']\n")
    (package / "_src" / "all.py").write_text(text)
    return folder


def test_names_exported_from_inside_are_compared_and_private_ones_are_not(tmp_path: Path) -> None:
    old = sources(
        tmp_path / "old",
        "class Thing:\n    def go(self, x): ...\n    def _go(self): ...\ndef act(x: int, y: int = 0) -> int: ...\n",
    )
    new = sources(tmp_path / "new", "class Thing:\n    def go(self, x, z): ...\ndef act(x: int) -> str: ...\ndef hidden(): ...\n")
    found = api.compare("part", old, new)
    assert (found.added, found.removed) == ((), ())
    assert [line.partition(":")[0] for line in found.changed] == ["part.Thing.go", "part.act"]
    assert [line.partition(":")[0] for line in found.breaking] == ["part._src.all.Thing.go(z)", "part._src.all.act(y)"]
    assert not api.compare("part", old, old)


def test_the_page_of_ranges_is_current_and_notices_a_new_one(tmp_path: Path) -> None:
    stands, wanted = compatibility.current()
    assert stands == wanted
    changed = compatibility.current(ROOT, {"octavo-core": "7.8.9"})[1]
    assert "| octavo-core | 7.8.9 |" in changed
    assert changed != stands
