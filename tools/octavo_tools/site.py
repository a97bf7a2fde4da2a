"""The documentation as a site: pages of `docs`, READMEs and generated pages, put together and built so that a dead link fails.

A page keeps the links it has in the repository; here they are turned to where their targets stand on the site. Built by MkDocs in an
environment of its own, of the dependency group `docs`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from octavo_tools.environments import SKIPPED, CommandFailed, RegistryUnreachable, outside_variables, uv
from octavo_tools.workspace import ROOT, packages

LINK: Final = re.compile(r"(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
SEAM_MODULES: Final = ("octavo_core.seams", "octavo_core.tiers")


_MERMAID: Final = "pymdownx.superfences.fence_code_format"


class Seam(NamedTuple):
    """What a seam's page says besides its docstrings."""

    implementation: str
    option: str
    suite: str
    replace: str | None


SEAMS: Final[Mapping[str, Seam]] = {
    "PrefixCache": Seam("`octavo_kvcache.RadixCache`", "`--prefix-cache`", "octavo_core.testing.cache", "prefix-cache"),
    "Scheduler": Seam("`octavo_scheduler.ChunkedScheduler`", "`--scheduler`", "octavo_core.testing.scheduler", "scheduler"),
    "AttentionBackend": Seam(
        "those of `octavo_kernels.BACKENDS`", "`--attention-backend`", "octavo_core.testing.attention", "attention"
    ),
    "Sampler": Seam("`octavo_kernels.RowSampler`", "`--sampler`", "octavo_core.testing.sampler", "sampler"),
    "Model": Seam("`octavo_models.Decoder`", "`--model-class`", "", "model"),
    "Engine": Seam(
        "`octavo_engine.AsyncEngine`, `octavo_engine.process.RemoteEngine`",
        "`octavo serve --engine`",
        "octavo_core.testing.engine",
        None,
    ),
}
"""Seams that somebody chooses by name. Others have their docstrings alone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; 1 when a link is dead or a page is wrong, 75 when a registry kept it from being built."""
    parser = argparse.ArgumentParser(prog="tools/docs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="where the site goes (default: nowhere, it is only checked)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="octavo-docs-") as name:
        folder = Path(name)
        try:
            assemble(folder / "docs")
            programs = mkdocs_environment(folder / "venv")
        except (CommandFailed, DeadLink) as error:
            print(f"FAIL: {error}")
            return 1
        except RegistryUnreachable as error:
            print(f"SKIP: a registry cannot be reached: {error}")
            return SKIPPED
        (folder / "mkdocs.yml").write_text(json.dumps(settings(folder)).replace(f'"{_MERMAID}"', f"!!python/name:{_MERMAID} ''"))
        out = (args.out or folder / "site").resolve()
        argv = [
            str(programs / "mkdocs"),
            "build",
            "--strict",
            "--quiet",
            "--config-file",
            str(folder / "mkdocs.yml"),
            "--site-dir",
            str(out),
        ]
        done = subprocess.run(argv, env=outside_variables(DISABLE_MKDOCS_2_WARNING="true"))
        if done.returncode == 0:
            print(f"{len(list(out.rglob('*.html')))} pages" + (f" in {out}" if args.out else ", every link alive"))
        return 1 if done.returncode else 0


def mkdocs_environment(folder: Path) -> Path:
    """An environment with MkDocs as uv.lock has it; answers its folder of programs."""
    uv("sync", "--quiet", "--frozen", "--only-group", "docs", UV_PROJECT_ENVIRONMENT=str(folder))
    return folder / "bin"


class DeadLink(Exception):
    """A link leads nowhere."""


def assemble(out: Path) -> None:
    """Write every page below `out`, links turned.

    Raises:
        DeadLink: A link's target is not in the repository, or not on the site.
    """
    pages = site_paths()
    dead = []
    for source, target in pages.items():
        text, wrong = turned((ROOT / source).read_text(), source, pages)
        dead += [f"{source}: [{link}] leads nowhere" for link in wrong]
        _write(out / target, text)
    if dead:
        raise DeadLink("\n".join(dead))
    for path, text in {**seam_pages(), **reference_pages(), **index_pages(pages)}.items():
        _write(out / path, text)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def site_paths() -> dict[str, str]:
    """Where each page of the repository stands on the site."""
    found = {str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs")) for path in sorted((ROOT / "docs").rglob("*.md"))}
    found |= {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    for package in packages():
        found[f"packages/{package.folder.name}/README.md"] = f"packages/{package.folder.name}.md"
        found[f"packages/{package.folder.name}/CHANGELOG.md"] = f"packages/{package.folder.name}-changelog.md"
    found |= {
        str(path.relative_to(ROOT)): f"packages/{path.parts[-3]}-{path.parts[-2]}.md"
        for path in ROOT.glob("packages/*/*_results/README.md")
    }
    return found


def turned(text: str, source: str, pages: Mapping[str, str]) -> tuple[str, list[str]]:
    """A page with its links as the site has them, and those that lead nowhere."""
    dead: list[str] = []
    here = PurePosixPath(pages[source]).parent

    def turn(match: re.Match[str]) -> str:
        target = match["target"]
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = os.path.normpath(PurePosixPath(source).parent / target)
        wanted = pages.get(path) or pages.get(f"{path}/README.md") or _INDEXES.get(path)
        if wanted is None:
            if not (ROOT / path).exists():
                dead.append(target)
            return f"{match['text']} (`{path}`)"
        return f"[{match['text']}]({os.path.relpath(wanted, here)}{match['anchor'] or ''})"

    return outside_code(text, lambda part: LINK.sub(turn, part)), dead


_INDEXES: Final = {"docs/decisions": "decisions/index.md", "docs/replace": "replace/index.md"}
"""Folders that people link to, and the page that stands for each."""


def outside_code(text: str, change: Any) -> str:
    """The text with `change` applied to what stands outside fenced code."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def title_of(path: Path) -> str:
    """A page's first heading."""
    return next((line.removeprefix("# ") for line in path.read_text().splitlines() if line.startswith("# ")), path.stem)


def index_pages(pages: Mapping[str, str]) -> dict[str, str]:
    """A list of the pages in each folder people link to."""
    made = {}
    for folder, name, words in (
        ("docs/decisions", "Decisions", "Choices and their reasons, in order."),
        ("docs/replace", "Replace a component", ""),
    ):
        inside = [source for source in sorted(pages) if source.startswith(folder + "/")]
        lines = [f"* [{title_of(ROOT / source)}]({PurePosixPath(source).name})" for source in inside]
        made[_INDEXES[folder]] = f"# {name}\n\n{words}\n\n" + "\n".join(lines) + "\n"
    return made


def seams() -> dict[str, str]:
    """Every Protocol with a place of its own in core, and its module, in the order they are written."""
    found = {}
    for module in SEAM_MODULES:
        path = ROOT / "packages" / "core" / "src" / (module.replace(".", "/") + ".py")
        for node in ast.parse(path.read_text()).body if path.is_file() else []:
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                found[node.name] = module
    return found


def seam_pages() -> dict[str, str]:
    """A page for each seam: who implements it, how another is chosen and tried, and what each method promises."""
    made = {}
    for name, module in seams().items():
        about = ""
        if (seam := SEAMS.get(name)) is not None:
            about = f"Octavo's own: {seam.implementation}. Another is chosen by {seam.option} with a dotted name"
            about += f" and tried by the suite in `{seam.suite}`. " if seam.suite else ". "
            about += f"A whole one, and how to plug it in: [replace](../replace/{seam.replace}.md)." if seam.replace else ""
        made[f"seams/{_slug(name)}.md"] = (
            f"# {name}\n\n{about}\n\n::: {module}.{name}\n    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"
        )
    rows = "\n".join(f"* [{name}]({_slug(name)}.md)" for name in seams())
    made["seams/index.md"] = f"# Seams\n\nWhere Octavo comes apart: one Protocol for each part that can be replaced.\n\n{rows}\n"
    return made


def _slug(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()


def reference_pages() -> dict[str, str]:
    """Public names of each package, from its docstrings."""
    made = {}
    for package in packages():
        modules = [package.module, *(f"{package.module}.{path.stem}" for path in sorted(package.source.glob("[a-z]*.py")))]
        made[f"reference/{package.module}.md"] = f"# {package.name}\n\n" + "\n".join(f"::: {module}\n" for module in modules)
    return made


def settings(folder: Path) -> dict[str, Any]:
    """MkDocs' configuration. JSON is YAML, but for one name that YAML turns into a function."""
    sources = [str(package.source.parent) for package in packages()]
    options = {
        "show_source": False,
        "members_order": "source",
        "show_signature_annotations": True,
        "separate_signature": True,
        "heading_level": 2,
    }
    return {
        "site_name": "Octavo",
        "site_description": "An LLM serving engine in JAX",
        "docs_dir": str(folder / "docs"),
        "use_directory_urls": False,
        "theme": {"name": "material", "features": ["navigation.sections", "navigation.top", "content.code.copy"], "font": False},
        "plugins": ["search", {"mkdocstrings": {"handlers": {"python": {"paths": sources, "options": options}}}}],
        "markdown_extensions": [
            "tables",
            "attr_list",
            {"toc": {"permalink": True}},
            {"pymdownx.superfences": {"custom_fences": [{"name": "mermaid", "class": "mermaid", "format": _MERMAID}]}},
        ],
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": dict.fromkeys(("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"),
        },
        "nav": navigation(),
    }


def navigation() -> list[Any]:
    """Every page, once."""
    pages = site_paths()
    guides = sorted(target for target in pages.values() if "/" not in target and target not in ("index.md", "contributing.md"))
    guides.sort(key=lambda target: (_FIRST.index(target) if target in _FIRST else len(_FIRST), target))
    folders: dict[str, list[str]] = {"seams": sorted(seam_pages()), "reference": sorted(reference_pages())}
    for name in ("replace", "decisions", "packages"):
        folders[name] = sorted(target for target in pages.values() if target.startswith(name + "/"))
    for folder, index in (("replace", _INDEXES["docs/replace"]), ("decisions", _INDEXES["docs/decisions"])):
        folders[folder].insert(0, index)
    folders["seams"].sort(key=lambda target: (not target.endswith("index.md"), target))
    rest = [{title: folders[name]} for name, title in _SECTIONS.items()]
    return ["index.md", {"Guides": guides}, *rest, "contributing.md"]


_FIRST: Final = ["architecture.md", "glossary.md", "numerics.md", "performance.md", "security.md"]
_SECTIONS: Final = {
    "seams": "Seams",
    "replace": "Replace",
    "packages": "Packages",
    "decisions": "Decisions",
    "reference": "Reference",
}
