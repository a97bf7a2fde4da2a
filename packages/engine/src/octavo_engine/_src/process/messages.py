"""What is said over the control sockets (ZeroMQ, msgpack): reports of the core, the supervisor's word on it, attaching.

Who speaks to whom: core → supervisor `Report` (PUSH/PULL); supervisor → frontends `State` (PUB/SUB); frontend → core `Attach` and
`Detach`, answered by `Attached` and `Detached` (DEALER/ROUTER).
"""

from __future__ import annotations

import enum
from typing import Any, TypeVar

import msgspec

from octavo_core.wire import EngineStats, ModelCard

T = TypeVar("T")
Table = list[tuple[str, str, str]]


class Phase(enum.StrEnum):
    """Of an engine core. `FAILED`: it could not start. `STOPPED`: it will not come back."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class CoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a core process is started with, on its standard input. `core`: dotted name of what builds it from the config."""

    core: str
    config: dict[str, Any]
    folder: str
    generation: int
    ipc: str
    flight: str


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The core on itself, several times a second. `age_s`: seconds it was awake since its step loop last came round."""

    generation: int
    phase: Phase
    age_s: float = 0.0
    error: str | None = None
    kind: str | None = None
    card: ModelCard | None = None
    table: Table = []


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The supervisor on the core, several times a second. `watchdog_s`: how long a step may take and the core say nothing."""

    generation: int
    phase: Phase
    ipc: str
    watchdog_s: float
    reason: str | None = None
    card: ModelCard | None = None
    table: Table = []


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A frontend wants to be served; `name` names its two services and its bell."""

    name: str


class Detach(msgspec.Struct, frozen=True, tag=True):
    """It goes; what it asked for and has not got is aborted."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """It is served, over the receiver it may open now."""

    stats: EngineStats


class Detached(msgspec.Struct, frozen=True, tag=True):
    """It is not served (any more): it must attach anew under another name."""

    reason: str


def encode(message: msgspec.Struct) -> bytes:
    """Any of these."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T] | Any) -> T:
    """The inverse.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    result: T = msgspec.msgpack.decode(data, type=kind)
    return result


def decode_json(data: bytes, kind: type[T]) -> T:
    """A message that was written as JSON."""
    return msgspec.json.decode(data, type=kind)


def core_endpoint(folder: str, generation: int) -> str:
    """Where a core hears frontends."""
    return f"ipc://{folder}/core-{generation}"


def state_endpoint(folder: str) -> str:
    """Where the supervisor is heard."""
    return f"ipc://{folder}/state"


def report_endpoint(folder: str) -> str:
    """Where the supervisor hears the core."""
    return f"ipc://{folder}/report"
