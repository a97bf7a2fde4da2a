"""Charts as PNG files, by matplotlib, which is imported when the first is drawn and is an extra of this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo_core.errors import ConfigError
from octavo_scheduler._src.sim_report import COLOURS, Chart


def write_png(folder: str | Path, charts: Sequence[Chart]) -> list[Path]:
    """Draw each chart into a file of its own; the folder is made.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--png needs matplotlib: pip install 'octavo-scheduler[plots]', or use --html, which needs nothing"
        ) from None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        return [_draw(Figure(figsize=(7, 4.5), layout="constrained"), Path(folder), chart) for chart in charts]
    except OSError as error:
        raise ConfigError(f"--png {folder} cannot be written: {error.strerror}") from None


def _draw(figure: Any, folder: Path, chart: Chart) -> Path:
    axes = figure.add_subplot()
    for number, series in enumerate(chart.series):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(series.x, series.y, "-" if series.is_line else "o", color=colour, label=series.name)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label, xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    name = "".join(c if c.isalnum() else "-" for c in chart.title.partition("(")[0].strip().lower())
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=120)
    return path
