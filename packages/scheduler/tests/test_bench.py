"""The bench runs, and reports under its stable names."""

import json

import pytest

from octavo_scheduler import bench


@pytest.mark.slow
def test_a_quick_bench_reports_every_figure(tmp_path, capsys):
    bench.main(["--quick", "--json", str(tmp_path / "b.json")])
    figures = {row["name"]: row["value"] for row in json.loads((tmp_path / "b.json").read_text())}
    assert {"simulate_small_cache", "simulate_counts_alone", "simulate_counts"} <= figures.keys()
    assert all(value > 0 for value in figures.values())
    assert "goal" in capsys.readouterr().out
