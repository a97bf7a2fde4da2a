"""How the engine core is kept: settings of the supervisor, in one place for every command that starts one. Imports no jax."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo_core.config import option
from octavo_core.errors import ConfigError
from octavo_engine._src.process.transport import KINDS

_PROCESS: Final = "processes"


@dataclasses.dataclass(frozen=True)
class ProcessConfig:
    """Everything a supervisor is started with."""

    ipc: str = option("auto", "How frontends and engine core exchange tokens", group=_PROCESS, choices=KINDS)
    watchdog_timeout: float = option(
        3.5, "Seconds without a sign of life, or within one step, after which the engine core is replaced", group=_PROCESS
    )
    flight_recorder_dir: str | None = option(
        None,
        "Where the last 1000 steps of a core that died are written; 'off': nowhere; default: ~/.local/state/octavo",
        group=_PROCESS,
        metavar="DIR",
    )

    def __post_init__(self) -> None:
        if not 1 <= self.watchdog_timeout <= 86400:
            raise ConfigError(f"--watchdog-timeout is between 1 and 86400 seconds, got {self.watchdog_timeout}")
