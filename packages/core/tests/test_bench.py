"""What benches share: honest medians, goals that are seen to be missed, stable JSON."""

import json

import pytest

from octavo_core import bench


def test_a_timing_is_the_median_the_99th_percentile_and_the_least():
    timing = bench.summarise([n * 1000 for n in range(100, 0, -1)])
    assert (timing.median_us, timing.p99_us, timing.least_us, timing.n) == (51.0, 100.0, 1.0, 100)
    assert bench.summarise([7000]).note == "min 7.0, p99 7.0"


def test_a_call_is_warmed_and_timed_at_least_as_often_as_asked():
    calls = []
    timing = bench.time_call(lambda: calls.append(0), budget_s=0.0, least=7, warm=3)
    assert (timing.n, len(calls)) == (7, 10)


def test_the_table_says_which_goals_are_missed_on_whichever_side_they_lie(capsys):
    report = bench.Report("t", {"slow": 10, "quick": 10, "little": 2, "much": 2})
    report.add("slow", 11, "us")
    report.add("quick", 9, "us")
    report.add("little", 1.5, "x")
    report.add("much", 3, "x")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert "<= 10 !" in lines["slow"]
    assert "<= 10 " in lines["quick"] and "!" not in lines["quick"]  # noqa: PT018 (one line of a table)
    assert ">= 2 !" in lines["little"]
    assert ">= 2 " in lines["much"] and "!" not in lines["much"]  # noqa: PT018


def test_the_json_is_a_flat_list_of_name_value_unit_and_n(tmp_path):
    report = bench.Report("t")
    report.add("a_figure", 1.25, "x", note="for people")
    report.time("a_time", lambda: None, budget_s=0.0)
    report.write(tmp_path / "figures.json")
    report.write(None)
    first, second = json.loads((tmp_path / "figures.json").read_text())
    assert first == {"name": "a_figure", "value": 1.25, "unit": "x", "n": 1}
    assert (second["name"], second["unit"], second["n"] >= 20) == ("a_time", "us", True)


def test_the_machine_is_described_and_wrong_arguments_end_in_a_usage_line(capsys):
    assert "cores" in bench.describe_machine()
    assert bench.parse_arguments("what", ["--quick"]).quick
    with pytest.raises(SystemExit, match="2"):
        bench.parse_arguments("what", ["--qick"])
    assert "usage" in capsys.readouterr().err
