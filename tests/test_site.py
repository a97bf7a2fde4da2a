"""The site's pages are put together from the repository with every link turned. Building them is `tools/docs`."""

from pathlib import Path

import pytest

from octavo_tools import site
from octavo_tools.workspace import ROOT, packages


def test_every_page_is_assembled_and_in_the_navigation_once(tmp_path: Path) -> None:
    site.assemble(tmp_path)
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.md")}

    def targets(entry) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [one for inner in (entry.values() if isinstance(entry, dict) else entry) for one in targets(inner)]

    assert sorted(targets(site.navigation())) == sorted(made)
    assert {"seams/prefix-cache.md", "seams/scheduler.md", "reference/octavo_core.md"} <= made


def test_links_are_turned_to_where_pages_stand() -> None:
    pages = site.site_paths()
    text = (
        "[d](docs/decisions) [c](packages/core) [m](CONTRIBUTING.md#code) [w](https://example.org) [l](LICENSE)\n```\n[x](y)\n```\n"
    )
    turned, dead = site.turned(text, "README.md", pages)
    wanted = "[d](decisions/index.md) [c](packages/core.md) [m](contributing.md#code) [w](https://example.org) l (`LICENSE`)"
    assert turned.splitlines()[0] == wanted
    assert "[x](y)" in turned
    assert dead == []
    assert site.turned("[a](gone.md)", "README.md", pages)[1] == ["gone.md"]


def test_every_seam_has_a_page_and_what_it_names_is_there() -> None:
    assert set(site.SEAMS) <= set(site.seams())
    pages = site.seam_pages()
    assert all(f"::: {module}.{name}" in pages[f"seams/{site._slug(name)}.md"] for name, module in site.seams().items())
    for seam in site.SEAMS.values():
        assert seam.replace is None or (ROOT / "docs" / "replace" / f"{seam.replace}.md").is_file()
        if seam.suite:
            assert (ROOT / "packages" / "core" / "src" / (seam.suite.replace(".", "/") + ".py")).is_file()


def test_every_package_has_its_reference() -> None:
    assert len(site.reference_pages()) == len(packages())


def test_a_dead_link_is_told_with_its_page(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(site, "site_paths", lambda: {"docs/architecture.md": "architecture.md"})
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "architecture.md").write_text("[gone](gone.md)\n")
    with pytest.raises(site.DeadLink, match=r"docs/architecture\.md: \[gone\.md\] leads nowhere"):
        site.assemble(tmp_path / "out")
