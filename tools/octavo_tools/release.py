"""One package's release: checks first, then version, changelog, archives, commit and tag. Never pushes, never publishes.

Everything that keeps a release from being made is told at once. A dry run makes the whole release in a copy of the repository.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from octavo_tools import api, changelog, compatibility
from octavo_tools.environments import SKIPPED, CommandFailed, RegistryUnreachable, uv
from octavo_tools.workspace import ROOT, Package, packages

_STATED = re.compile(r'^((?:__version__|VERSION)\b.* = ")([^"]+)(")', re.MULTILINE)


class Refused(Exception):
    """The release cannot be made; each line says why and what to do."""


class Release(NamedTuple):
    """What is released and what was before it.

    Attributes:
        root: The repository.
        members: Every package in it.
        previous: Version of the package's last tag; None: it has none.
    """

    root: Path
    package: Package
    members: tuple[Package, ...]
    version: Version
    previous: Version | None
    date: str

    @property
    def tag(self) -> str:
        """Its tag."""
        return tag_of(self.package, self.version)


def tag_of(package: Package, version: Version) -> str:
    """`kvcache-v0.3.1`."""
    return f"{package.folder.name}-v{version}"


def main(argv: Sequence[str] | None = None) -> int:
    """Release a package, or with `--dry-run` a copy of it; 1 when refused, 75 when a registry kept it from being built."""
    parser = argparse.ArgumentParser(prog="tools/release", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", help=f"one of {', '.join(p.folder.name for p in packages())}")
    parser.add_argument("version", help="the version it gets")
    parser.add_argument(
        "--dry-run", action="store_true", help="do it all in a copy of what is committed, and leave this tree alone"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="day in the changelog (default: today)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the archives go (default: dist)")
    args = parser.parse_args(argv)
    try:
        if args.dry_run:
            with copy_of(ROOT) as root:
                make(prepare(root, args.package, args.version, args.date), root / "dist")
            print("dry run: this checkout is as it was")
        else:
            done = prepare(ROOT, args.package, args.version, args.date)
            archives = make(done, args.out)
            print(f"next: git push --atomic origin HEAD {done.tag}, then uv publish with the archives above")
            if any("-linux_" in path.name for path in archives):
                print(
                    "but not the wheel: it is for machines like this one, and indexes take none such; installers build the source archive"
                )
        return 0
    except (Refused, CommandFailed) as error:
        print(f"refused:\n{error}" if isinstance(error, Refused) else f"FAIL: {error}")
        return 1
    except RegistryUnreachable as error:
        print(f"SKIP: a registry cannot be reached, nothing was released: {error}")
        return SKIPPED


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A clone of what is committed, with its tags and its author; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="octavo-release-") as folder:
        copy = Path(folder, "copy")
        git(root, "clone", "--quiet", "--shared", str(root), str(copy))
        for key, default in (("user.name", "Octavo contributors"), ("user.email", "octavo@localhost")):
            known = subprocess.run(["git", "-C", str(root), "config", key], capture_output=True, text=True).stdout.strip()
            git(copy, "config", key, known or default)
        yield copy


def git(root: Path, *args: str) -> str:
    """What a git command printed.

    Raises:
        CommandFailed: It ended with an error.
    """
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True)
    if done.returncode:
        raise CommandFailed(f"git {' '.join(args)}\n{done.stderr.strip()}")
    return done.stdout.strip()


def prepare(root: Path, name: str, version: str, date: str) -> Release:
    """Everything that can be checked before anything changes.

    Raises:
        Refused: With a line for each thing that stands against it.
    """
    members = tuple(packages(root))
    short = name.removeprefix("octavo-")
    package = next((p for p in members if p.folder.name == short), None)
    if package is None:
        raise Refused(f"no package is called '{name}': wanted one of {', '.join(p.folder.name for p in members)}")
    try:
        parsed, _ = Version(version), datetime.date.fromisoformat(date)
    except (InvalidVersion, ValueError) as error:
        raise Refused(f"wanted a version such as 0.2.0 and a date such as 2026-01-31: {error}") from None
    release = Release(root, package, members, parsed, last_release(root, package), date)
    difference = api_difference(release)
    found = [*_wrong_tree(release), *_wrong_order(release), *_wrong_changelog(release), *_wrong_ranges(release)]
    found += [*_wrong_needs(release), *_wrong_api(release, difference)]
    _tell(release, difference)
    if found:
        raise Refused("\n".join(found))
    return release


def _tell(release: Release, difference: api.Difference) -> None:
    lines = difference.lines() or ["are the same"]
    after = f"after {release.previous}, public names:" if release.previous else "is the first release"
    print(f"{release.package.name} {release.version} {after}", *(lines if release.previous else []), sep="\n  ")


def last_release(root: Path, package: Package) -> Version | None:
    """Highest version among the package's tags."""
    start = tag_of(package, Version("0")).removesuffix("0")
    names = git(root, "tag", "--list", start + "*").split()
    return max((Version(name.removeprefix(start)) for name in names), default=None)


def api_difference(release: Release) -> api.Difference:
    """Public names now against those of the last tag; none before the first."""
    package = release.package
    if release.previous is None:
        return api.Difference((), (), (), ())
    inside = package.source.parent.relative_to(release.root)
    with tempfile.TemporaryDirectory(prefix="octavo-tag-") as folder:
        archive = Path(folder, "tag.zip")
        git(release.root, "archive", "--format=zip", f"--output={archive}", tag_of(package, release.previous), "--", str(inside))
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        return api.compare(package.module, Path(folder) / inside, package.source.parent)


def _wrong_tree(release: Release) -> Iterator[str]:
    changed = git(release.root, "diff", "--name-only", "HEAD").splitlines()
    if changed:
        yield f"{len(changed)} tracked files have changes that are not committed, the first is {changed[0]}: commit them first"


def _wrong_order(release: Release) -> Iterator[str]:
    package, version = release.package, release.version
    if version.local or version.is_devrelease:
        yield f"{version} is no version to release: wanted one such as 0.2.0 or 0.2.0rc1"
    if release.previous is not None and version <= release.previous:
        yield f"{package.name} {release.previous} is released already: wanted a version above it, got {version}"
    elif version < Version(package.version):
        yield f"pyproject.toml of {package.name} says {package.version}: wanted that version or one above it, got {version}"


def _wrong_changelog(release: Release) -> Iterator[str]:
    path = release.package.folder / "CHANGELOG.md"
    section = changelog.unreleased(path.read_text())
    if section is None:
        yield f"{path.relative_to(release.root)} has no heading '{changelog.UNRELEASED}': write there what changed"
    elif not changelog.has_entries(section):
        yield f"{path.relative_to(release.root)} lists nothing under '{section.heading}': write there what changed"


def _wrong_ranges(release: Release) -> Iterator[str]:
    """Packages of the tree that would not take this version."""
    name, version = release.package.name, release.version
    for other in release.members:
        for line in other.requirements:
            need = Requirement(line)
            if need.name == name and not need.specifier.contains(version, prereleases=True):
                file = (other.folder / "pyproject.toml").relative_to(release.root)
                yield f"{other.name} takes {name}{need.specifier}, which leaves out {version}: let it take {_wider(need, version)} in {file}"


def _wider(need: Requirement, version: Version) -> str:
    """A range with the same floor that ends before the next version that may break."""
    floor = next((str(part) for part in need.specifier if part.operator == ">="), f">={version}")
    end = f"<0.{version.minor + 1}" if version.major == 0 else f"<{version.major + 1}"
    return f"{need.name}{floor},{end}"


def _wrong_needs(release: Release) -> Iterator[str]:
    """Requirements that nobody outside the tree could meet: siblings that are not released in the range."""
    known = {member.name: member for member in release.members}
    for line in dict.fromkeys(release.package.requirements):
        need = Requirement(line)
        if need.name not in known or need.name == release.package.name:
            continue
        start = tag_of(known[need.name], Version("0")).removesuffix("0")
        versions = [Version(tag.removeprefix(start)) for tag in git(release.root, "tag", "--list", start + "*").split()]
        if not any(need.specifier.contains(version, prereleases=True) for version in versions):
            yield f"{release.package.name} requires '{line}', of which no release is tagged: release {need.name} first"


def _wrong_api(release: Release, difference: api.Difference) -> Iterator[str]:
    if release.previous is None or may_break(release.previous, release.version):
        return
    part = "minor" if release.previous.major == 0 else "major"
    for line in difference.breaking:
        yield f"{line}; {release.version} after {release.previous} may not break this: raise the {part} version, or take the change back"


def may_break(previous: Version, version: Version) -> bool:
    """Below 1.0 a minor version may break, from then on a major one."""
    places = 2 if previous.major == 0 else 1
    return version.release[:places] > previous.release[:places]


def make(release: Release, out: Path) -> list[Path]:
    """Write, build, commit, tag; what was written is taken back when something fails. Answers the archives.

    Raises:
        CommandFailed: An archive cannot be built or is not what it should be.
        RegistryUnreachable: What building needs cannot be had.
    """
    edits = new_texts(release)
    before = {path: path.read_bytes() for path in edits}
    try:
        for path, text in edits.items():
            path.write_text(text)
        check_lock(release.root)
        archives = build(release, out)
        files = [str(path.relative_to(release.root)) for path in edits]
        git(release.root, "commit", "--quiet", "--message", f"release: {release.package.name} {release.version}", "--", *files)
    except BaseException:
        for path, content in before.items():
            path.write_bytes(content)
        raise
    section = changelog.unreleased(before[release.package.folder / "CHANGELOG.md"].decode())
    message = f"{release.package.name} {release.version}\n\n{section.body if section else ''}"
    git(release.root, "tag", "--annotate", "--cleanup=verbatim", "--message", message, release.tag)
    print(*(f"changed {file}" for file in files), *(f"built   {path}" for path in archives), f"tagged  {release.tag}", sep="\n")
    return archives


def new_texts(release: Release) -> Mapping[Path, str]:
    """Every file a release changes and what it will hold."""
    package, version, root = release.package, str(release.version), release.root
    texts = {}
    for path in (package.folder / "pyproject.toml", root / "uv.lock"):
        texts[path] = _with_version(path.read_text(), package.name, version)
    for path in (package.source / "__init__.py", package.source / "_src" / "version.py"):
        if path.is_file() and _STATED.search(text := path.read_text()):
            texts[path] = _STATED.sub(rf"\g<1>{version}\g<3>", text)
    path = package.folder / "CHANGELOG.md"
    texts[path] = changelog.released(path.read_text(), version, release.date)
    texts[compatibility.page_of(root)] = compatibility.current(root, {package.name: version})[1]
    return {path: text for path, text in texts.items() if text != path.read_text()}


def _with_version(text: str, name: str, version: str) -> str:
    """The version in the table that begins with this name, of a pyproject.toml or a uv.lock."""
    pattern = re.compile(rf'(^name = "{re.escape(name)}"\nversion = ")[^"]+(")', re.MULTILINE)
    changed, count = pattern.subn(rf"\g<1>{version}\g<2>", text)
    if count != 1:
        raise Refused(f"wanted 'name = \"{name}\"' followed by its version once, found it {count} times")
    return changed


def check_lock(root: Path) -> None:
    """`uv.lock` fits what was written; passed over where that cannot be told without a registry."""
    try:
        uv("lock", "--check", "--quiet", "--project", str(root))
    except RegistryUnreachable as error:
        print(f"uv.lock could not be checked: {error}")


def build(release: Release, out: Path) -> list[Path]:
    """Source archive and wheel, made as a user's installer would, and looked into."""
    name = release.package.name
    with tempfile.TemporaryDirectory(prefix="octavo-build-") as folder:
        uv(
            "build",
            "--quiet",
            "--project",
            str(release.root),
            "--package",
            name,
            "--no-sources",
            "--out-dir",
            folder,
            str(release.root),
        )
        made = sorted(path for path in Path(folder).iterdir() if path.suffix in (".gz", ".whl"))
        stem = f"{release.package.module}-{release.version}"
        if [path.name.startswith(stem) for path in made] != [True, True]:
            raise CommandFailed(f"wanted a source archive and a wheel of {stem}, uv built {[path.name for path in made]}")
        _look_into(next(path for path in made if path.suffix == ".whl"), release)
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(path, out / path.name)) for path in made]


def _look_into(wheel: Path, release: Release) -> None:
    module = release.package.module
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        metadata = packed.read(f"{module}-{release.version}.dist-info/METADATA").decode()
    if f"\nVersion: {release.version}\n" not in metadata or f"{module}/py.typed" not in names:
        raise CommandFailed(f"{wheel.name} does not hold {module} {release.version} with py.typed")
