"""Outcomes as something to look at: charts as data, a CSV, and one HTML page that needs nothing from anywhere.

Knows figures and text. Charts are drawn here as SVG and by `sim_plot` as PNG, from the same data.
"""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo_core.errors import ConfigError
from octavo_scheduler._src.sim_metrics import Limits, Outcome, pareto

COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 560, 320, 64, 46, 30, 16


@dataclasses.dataclass(frozen=True)
class Series:
    """Points of a chart, joined or not; `names` are shown when one is pointed at."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    is_line: bool = True
    names: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """What is drawn; axes begin at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]


def label_text(label: Mapping[str, Any]) -> str:
    """`token_budget 512, policy lpm`."""
    return (
        ", ".join(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in label.items())
        or "as set"
    )


def charts(outcomes: Sequence[Outcome], limits: Limits) -> list[Chart]:
    """Latency distributions, goodput against load where loads differ, and the Pareto front where settings do."""
    shown = outcomes[: len(COLOURS)]
    found = [
        _distribution("Time to first token", "TTFT, s", [(label_text(o.label), o.ttft_s) for o in shown]),
        _distribution("Time per further token", "TPOT, ms", [(label_text(o.label), o.tpot_s * 1e3) for o in shown]),
    ]
    if len({o.label.get("load") for o in outcomes}) > 1:
        found.append(_against_load(outcomes, limits))
    if len(outcomes) > 1:
        found.append(_front(outcomes))
    return found


def _distribution(title: str, x_label: str, values: Sequence[tuple[str, np.ndarray]]) -> Chart:
    share = np.linspace(0, 1, 101)
    series = [Series(name, np.quantile(v, share).tolist(), (share * 100).tolist()) for name, v in values if len(v)]
    return Chart(title, x_label, "% of requests within", series)


def _against_load(outcomes: Sequence[Outcome], limits: Limits) -> Chart:
    lines: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        rest = {name: value for name, value in outcome.label.items() if name != "load"}
        offered = len(outcome.trace) / max(float(outcome.trace.arrival_s[-1]), 1e-9)
        lines.setdefault(label_text(rest), []).append((offered, outcome.summary(limits)["goodput_per_s"]))
    series = [Series(name, [x for x, _ in sorted(points)], [y for _, y in sorted(points)]) for name, points in lines.items()]
    within = f"TTFT {limits.ttft_s:g} s, TPOT {limits.tpot_s * 1e3:g} ms"
    return Chart(f"Goodput against load ({within})", "requests offered a second", "requests within limits a second", series)


def _front(outcomes: Sequence[Outcome]) -> Chart:
    figures = [o.summary() for o in outcomes]
    x, y = [f["tpot_s_p99"] * 1e3 for f in figures], [f["output_tokens_per_s"] for f in figures]
    best, names = pareto(x, y), [label_text(o.label) for o in outcomes]
    every = Series("every setting", x, y, is_line=False, names=names)
    front = Series("not beaten", [x[i] for i in best], [y[i] for i in best], names=[names[i] for i in best])
    return Chart("Pareto front", "TPOT p99, ms", "output tokens a second", [every, front])


def write_csv(path: str | Path, outcomes: Sequence[Outcome], limits: Limits) -> None:
    """A row for each outcome: its label, then its figures.

    Raises:
        ConfigError: The file cannot be written.
    """
    rows = [{**{f"set_{name}": value for name, value in o.label.items()}, **o.summary(limits)} for o in outcomes]
    try:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [])
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"--csv {path} cannot be written: {error.strerror}") from None


def write_html(path: str | Path, title: str, notes: Sequence[str], outcomes: Sequence[Outcome], limits: Limits) -> None:
    """One page with a table that sorts and every chart, complete in itself.

    Raises:
        ConfigError: The file cannot be written.
    """
    drawn = "".join(f"<figure>{svg(chart)}</figure>" for chart in charts(outcomes, limits))
    paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    page = _PAGE.format(title=html.escape(title), notes=paragraphs, table=_table(outcomes, limits), charts=drawn)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from None


def _table(outcomes: Sequence[Outcome], limits: Limits) -> str:
    figures = [o.summary(limits) for o in outcomes]
    names = list(outcomes[0].label) if outcomes else []
    head = "".join(f"<th>{html.escape(name)}</th>" for name in [*names, *(figures[0] if figures else [])])
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in [*o.label.values(), *f.values()]) + "</tr>"
        for o, f in zip(outcomes, figures, strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def svg(chart: Chart) -> str:
    """A chart as an SVG element."""
    points = [(x, y) for s in chart.series for x, y in zip(s.x, s.y, strict=True)]
    x_ticks, y_ticks = (_ticks(max((p[axis] for p in points), default=1.0)) for axis in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + x / x_ticks[-1] * width, _HEIGHT - _BOTTOM - y / y_ticks[-1] * height

    parts = [
        f'<text x="{_WIDTH / 2}" y="18" class="title">{html.escape(chart.title)}</text>',
        _axes(chart, x_ticks, y_ticks, place),
    ]
    for number, series in enumerate(chart.series):
        parts.append(_drawn(series, COLOURS[number % len(COLOURS)], place))
    parts.append(_legend(chart.series))
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 16 * len(chart.series)}" role="img">{"".join(parts)}</svg>'


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    most = most if most > 0 and math.isfinite(most) else 1.0
    step = 10.0 ** math.floor(math.log10(most / 4))
    step = next(step * m for m in (1, 2, 5, 10) if step * m * 5 >= most)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _axes(chart: Chart, x_ticks: Sequence[float], y_ticks: Sequence[float], place: Any) -> str:
    right, bottom = place(x_ticks[-1], 0.0)
    parts = []
    for tick in x_ticks:
        x, _ = place(tick, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" class="tick">{tick:g}</text>')
    for tick in y_ticks:
        _, y = place(0.0, tick)
        parts.append(f'<line x1="{_LEFT}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="y tick">{tick:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 10}" class="label">{html.escape(chart.x_label)}</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" class="label">{html.escape(chart.y_label)}</text>')
    return "".join(parts)


def _drawn(series: Series, colour: str, place: Any) -> str:
    at = [place(x, y) for x, y in zip(series.x, series.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if series.is_line else ""
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity=".6"><title>{html.escape(name)}</title></circle>'
        for (x, y), name in zip(at, series.names, strict=False)
    )
    return line + dots


def _legend(series: Sequence[Series]) -> str:
    return "".join(
        f'<rect x="{_LEFT}" y="{_HEIGHT + 16 * i - 2}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>'
        f'<text x="{_LEFT + 16}" y="{_HEIGHT + 16 * i + 7}" class="key">{html.escape(s.name)}</text>'
        for i, s in enumerate(series)
    )


def write_json(path: str | Path, outcomes: Sequence[Outcome], limits: Limits) -> None:
    """The same figures as the table, for tools.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps([{"set": dict(o.label), **o.summary(limits)} for o in outcomes], indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }}
div.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }}
th {{ cursor: pointer; }}
figure {{ display: inline-block; width: min(36rem, 100%); margin: 1rem 1rem 0 0; }}
text {{ font: 12px system-ui, sans-serif; fill: currentColor; }}
.title {{ font-weight: 600; font-size: 14px; text-anchor: middle; }}
.tick, .label {{ text-anchor: middle; }}
.y.tick {{ text-anchor: end; }}
.grid {{ stroke: #8884; }}
</style></head><body>
<h1>{title}</h1>{notes}
<div class="scroll">{table}</div>
{charts}
<script>
for (const [column, head] of document.querySelectorAll("th").entries()) head.onclick = () => {{
  const body = document.querySelector("tbody"), rows = [...body.rows], down = head.dataset.down !== "1";
  const key = row => {{ const text = row.cells[column].textContent; return isNaN(text) ? text : Number(text); }};
  rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (down ? 1 : -1));
  head.dataset.down = down ? "1" : "";
  body.append(...rows);
}};
</script></body></html>
"""
