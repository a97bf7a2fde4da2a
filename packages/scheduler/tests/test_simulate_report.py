"""What is written of outcomes: CSV, JSON, pictures, and a page that needs nothing from anywhere."""

import csv
import html.parser
import json
import re

import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_scheduler._src import sim_plot
from octavo_scheduler._src.sim_state import DONE, REFUSED, Books, StepLine
from octavo_scheduler.simulate import Limits, Outcome, charts, make_trace, svg, write_csv, write_html, write_json

LIMITS = Limits(ttft_s=0.5, tpot_s=0.1)


def outcome(label, ttft_s, tpot_s):
    """Requests a second apart, each of 11 tokens but the last, which is refused."""
    count = len(ttft_s) + 1
    trace = make_trace("t", np.arange(count, dtype=float), [10] * count, [11] * count)
    first = np.array([*(i + t for i, t in enumerate(ttft_s)), -1e-5]) * 1e5
    last = first + np.array([*tpot_s, 0]) * 10 * 1e5
    zeros = np.zeros(count, np.int32)
    books = Books(
        status=np.array([DONE] * (count - 1) + [REFUSED], np.int32),
        started=zeros,
        first=np.round(first).astype(np.int32),
        last=np.round(last).astype(np.int32),
        gap=zeros + 1_000,
        made=np.array([11] * (count - 1) + [0], np.int32),
        cached=zeros + 2,
        preemptions=zeros,
    )
    line = {name: np.array([1], np.int32) for name in StepLine._fields} | {"end": np.array([1_000_000], np.int32)}
    return Outcome(label, trace, books, StepLine(**line))


OUTCOMES = [
    outcome({"load": 1.0, "policy": "fcfs"}, [0.1, 0.2, 0.9], [0.05, 0.2, 0.01]),
    outcome({"load": 2.0, "policy": "<b>"}, [0.1, 0.2, 0.3], [0.05, 0.06, 0.01]),
]


def test_a_summary_follows_the_definitions():
    found = OUTCOMES[0].summary(LIMITS)
    assert (found["requests"], found["refused"], found["steps"]) == (4, 1, 1)
    assert found["ttft_s_p50"] == pytest.approx(0.2)
    assert found["tpot_s_p50"] == pytest.approx(0.05)
    assert found["goodput_per_s"] == pytest.approx(0.1)  # one of four within both limits, in ten seconds
    assert found["good_share"] == pytest.approx(0.25)
    assert found["output_tokens_per_s"] == pytest.approx(3.3)
    assert found["longest_gap_s"] == pytest.approx(0.01)
    assert OUTCOMES[0].is_good(LIMITS).tolist() == [True, False, False, False]


def test_a_csv_and_a_json_hold_every_figure_under_its_name(tmp_path):
    write_csv(tmp_path / "o.csv", OUTCOMES, LIMITS)
    write_json(tmp_path / "o.json", OUTCOMES, LIMITS)
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert [row["set_policy"] for row in rows] == ["fcfs", "<b>"]
    assert float(rows[1]["goodput_per_s"]) == pytest.approx(0.3)
    read = json.loads((tmp_path / "o.json").read_text())
    assert read[0]["set"] == {"load": 1.0, "policy": "fcfs"}
    assert read[0].keys() - {"set"} == OUTCOMES[0].summary().keys()


class Balance(html.parser.HTMLParser):
    """Tags that are opened and not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_escapes_what_it_shows_and_asks_nothing_of_the_network(tmp_path):
    write_html(tmp_path / "o.html", "A & B", ["cost <1 s"], OUTCOMES, LIMITS)
    page = (tmp_path / "o.html").read_text()
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    assert balance.seen.count("svg") == 4  # TTFT, TPOT, goodput against load, Pareto front
    assert balance.seen.count("tr") == 3
    assert not re.search(r"https?:|src=|<link|@import|url\(", page)
    assert "A &amp; B" in page
    assert "cost &lt;1 s" in page
    assert "<b>" not in page


def test_what_is_drawn_lies_inside_the_picture():
    for chart in charts(OUTCOMES, LIMITS):
        numbers = re.findall(r'<polyline points="([^"]*)"', svg(chart))
        at = np.array([pair.split(",") for line in numbers for pair in line.split()], float)
        assert at.min() >= 0
        assert at[:, 0].max() <= 560
        assert at[:, 1].max() <= 320


def test_one_outcome_has_no_front_and_an_empty_one_still_a_picture():
    assert [c.title for c in charts(OUTCOMES[:1], LIMITS)] == ["Time to first token", "Time per further token"]
    assert "<svg" in svg(charts([outcome({}, [], [])], LIMITS)[0])


def test_pictures_are_files_with_names_of_their_charts(tmp_path):
    pytest.importorskip("matplotlib")
    paths = sim_plot.write_png(tmp_path / "plots", charts(OUTCOMES, LIMITS))
    assert [p.name for p in paths] == [
        "time-to-first-token.png",
        "time-per-further-token.png",
        "goodput-against-load.png",
        "pareto-front.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo-scheduler\[plots\]', or use --html"):
        sim_plot.write_png(tmp_path, [])


@pytest.mark.parametrize("write", [write_csv, write_json, lambda path, *rest: write_html(path, "t", [], *rest)])
def test_a_file_that_cannot_be_written_is_named(tmp_path, write):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        write(tmp_path / "absent" / "o", OUTCOMES, LIMITS)
