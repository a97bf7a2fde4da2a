"""Progress on stderr: a bar for a person at a terminal, one plain line for a log.

Knows rich; knows nothing of what is being done.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[int], None]


def note(message: str) -> None:
    """One plain line on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(description: str, total: int, *, unit: str = "") -> Iterator[Advance]:
    """Show progress while the block runs; call the value with how much was done since the last call.

    On a terminal a rich bar that goes away when done; elsewhere one line at the start.

    Args:
        description: What is being done, as in `loading weights`.
        total: In the unit of the advances.
        unit: `B` shows bytes; anything else is a word after the count.
    """
    if not sys.stderr.isatty():
        note(description)
        yield lambda amount: None
        return
    from rich import progress as bars
    from rich.console import Console

    counter = (
        bars.DownloadColumn() if unit == "B" else bars.TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}".rstrip())
    )
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), counter, bars.TimeRemainingColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)


def download_bar() -> type[Any]:
    """The bar class for the hub client: its own on a terminal, a silent one elsewhere."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if sys.stderr.isatty():
        return tqdm

    class Silent(tqdm):  # type: ignore[misc]
        """Counts without drawing."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    return Silent
