"""An engine as the server gets it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from octavo_core.wire import ModelCard


@runtime_checkable
class StartedEngine(Protocol):
    """An engine as `serve` gets it from its `start`: implements `octavo_core.seams.Engine`, and besides knows these.

    `generate`, `abort` and `stats` are called on the server's event loop, `close` from a thread when the server has stopped.
    """

    card: ModelCard

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen, its value, why."""

    def close(self) -> None:
        """Stop the step loop and free what it holds."""
