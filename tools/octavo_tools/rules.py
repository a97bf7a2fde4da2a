"""House rules a linter does not know. Each function answers the list of what is wrong, one line per finding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from octavo_tools.workspace import ROOT, Package, packages, python_files, tracked_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_CLASS_LINES = 200
EXEMPTION = "Size: "
"""A docstring line that begins so says why its module, class or function is longer than the rule."""

MACHINE_PATH = re.compile(r"(?<![\w.$}-])/(?:work|root|tmp/bash_jobs)(?:/|\b(?!\w))")
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"`[^`]*`")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".cfg", ".sh", ".html", ".js", ".css", ".cc", ".h", ".proto", ""}


def wrong_files() -> list[str]:
    """Every package has a README, a changelog, `py.typed` and tests."""
    wanted = ("README.md", "CHANGELOG.md", "pyproject.toml")
    missing = []
    for package in packages():
        paths = [package.folder / name for name in wanted] + [package.source / "py.typed"]
        missing += [f"{_short(path)} is missing" for path in paths if not path.is_file()]
        if not any(package.tests.glob("test_*.py")):
            missing.append(f"{_short(package.tests)} has no test")
    return missing


def wrong_versions() -> list[str]:
    """`__version__`, pyproject, changelog and the ranges of siblings agree."""
    versions = {package.name: Version(package.version) for package in packages()}
    return [line for package in packages() for line in [*_own_version(package), *_ranges(package, versions)]]


def _own_version(package: Package) -> Iterator[str]:
    homes = [path for path in (package.source / "__init__.py", package.source / "_src" / "version.py") if path.is_file()]
    stated = [
        hit for path in homes for hit in re.findall(r'^(?:__version__|VERSION)\b.* = "([^"]+)"', path.read_text(), re.MULTILINE)
    ]
    if stated != [package.version]:
        yield f"{_short(package.source)}/__init__.py: wanted __version__ {package.version} once, as in pyproject.toml, got {stated}"
    if f"[{package.version}]" not in (package.folder / "CHANGELOG.md").read_text():
        yield f"{_short(package.folder)}/CHANGELOG.md: no heading for [{package.version}]"


def _ranges(package: Package, versions: dict[str, Version]) -> Iterator[str]:
    for line in package.requirements:
        need = Requirement(line)
        if not need.name.startswith("octavo-"):
            continue
        operators = {part.operator for part in need.specifier}
        if need.name not in versions:
            yield f"{package.name} requires {need.name}, which is not in the workspace"
        elif not need.specifier.contains(versions[need.name], prereleases=True):
            yield f"{package.name} requires '{line}', the workspace has {versions[need.name]}"
        elif not operators or "==" in operators:
            yield f"{package.name} requires '{line}': wanted a range such as >=0.1,<0.2"


def wrong_words() -> list[str]:
    """No path of one machine and no leftover note in a tracked text file."""
    found = []
    for path in tracked_files():
        if path.suffix not in TEXT_SUFFIXES or path.name == "LICENSE":
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            for pattern in (MACHINE_PATH, LEFTOVER):
                if (hit := pattern.search(line)) and path != Path(__file__).resolve():
                    found.append(f"{_short(path)}:{number}: '{hit[0]}' does not belong in the tree")
    return found


def wrong_links() -> list[str]:
    """Every relative link of a tracked page leads to a file of the tree, and its anchor to a heading."""
    return [line for path in tracked_files() if path.suffix == ".md" for line in dead_links(path)]


def dead_links(path: Path) -> Iterator[str]:
    """Links of one page that lead nowhere, as `page:line: finding`."""
    is_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        for target, anchor in [] if is_code else LINK.findall(CODE.sub("", line)):
            if re.match(r"[a-z]+:", target):
                continue
            wanted = (path.parent / target).resolve() if target else path
            if not wanted.exists():
                yield f"{_short(path)}:{number}: '{target}' is not there"
            elif anchor and wanted.suffix == ".md" and anchor not in set(anchors(wanted.read_text())):
                yield f"{_short(path)}:{number}: {_short(wanted)} has no heading '#{anchor}'"


def anchors(text: str) -> Iterator[str]:
    """What headings are linked by."""
    for line in text.splitlines():
        if line.startswith("#"):
            words = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            yield words.replace(" ", "-")


def wrong_sizes() -> list[str]:
    """Files, functions and classes stay short enough to be read at once, or their docstring says why not (`Size: …`)."""
    sources = [package.source for package in packages()] + [ROOT / "tools"]
    tests = [package.tests for package in packages()] + [ROOT / "tests"]
    wrong = []
    for path in python_files([*sources, *tests]):
        text = path.read_text()
        wrong += [f"{_short(path)}:{finding}" for finding in sizes_in(text, functions=not _is_test(path))]
    return wrong


def sizes_in(text: str, *, functions: bool = True) -> Iterator[str]:
    """What is too long in one module, as `line: finding`. Docstrings do not count toward functions and classes."""
    tree = ast.parse(text)
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES and not _is_exempt(tree):
        yield f"1: {lines} lines, wanted at most {MAX_FILE_LINES}"
    for node in ast.walk(tree) if functions else ():
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        limit = MAX_CLASS_LINES if isinstance(node, ast.ClassDef) else MAX_FUNCTION_LINES
        length = _lines_without_docstring(node)
        if length > limit and not _is_exempt(node):
            yield f"{node.lineno}: {node.name} has {length} lines, wanted at most {limit}"


def _lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return total
    doc = node.body[0]
    return total - ((doc.end_lineno or doc.lineno) - doc.lineno + 1)


def _is_exempt(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(line.strip().startswith(EXEMPTION) for line in (ast.get_docstring(node) or "").splitlines())


def _is_test(path: Path) -> bool:
    return "tests" in path.relative_to(ROOT).parts


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT))
