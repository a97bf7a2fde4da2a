"""The way between a frontend and the engine core: one frame there, one back, polling or from sleep; and what a frontend does per token.

Needs no model and no jax: the other side is a small process that sends back what it gets.
"""

from __future__ import annotations

import contextlib
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from octavo_core.bench import Report, summarise
from octavo_core.frames import pack_outputs, unpack_outputs
from octavo_core.wire import EngineOutput, FrameKind
from octavo_engine._src.process.bell import Bell, Ringer
from octavo_engine._src.process.link import Incoming, Outgoing
from octavo_engine._src.process.transport import open_transport

GOALS: Final[dict[str, float | int]] = {"hop.poll": 30, "hop.wake": 200, "hop.unpack_token": 5}
PAYLOAD: Final = bytes(256)
NUM_ROWS: Final = 64
SLEEP_S: Final = 0.002
IDLE_S: Final = 0.05
"""So long that neither side finds anything in its caches."""
_CLOCK: Final = struct.Struct("<q")


class Hop(NamedTuple):
    """Until the frame was in the receiver's hands, by the machine's one clock, and until it was back."""

    there_ns: int
    there_and_back_ns: int


def run(report: Report, *, quick: bool) -> None:
    """Time the hop over both transports."""
    count = 200 if quick else 5000
    for kind in ("iceoryx2", "sockets"):
        suffix = "" if kind == "iceoryx2" else f".{kind}"
        with _echo(kind, sleeps=False) as hop:
            polled = [hop().there_and_back_ns // 2 for _ in range(count)]
            report.take(f"hop.poll{suffix}", summarise(polled), f"{kind}, {len(PAYLOAD)} bytes, half a round trip, both sides poll")
        with _echo(kind, sleeps=True) as hop:
            woken = [hop(pause_s=SLEEP_S).there_ns for _ in range(count // 10)]
            report.take(f"hop.wake{suffix}", summarise(woken), f"{kind}, one way to a receiver that slept {1000 * SLEEP_S:g} ms")
            idle = [hop(pause_s=IDLE_S).there_ns for _ in range(20 if quick else 100)]
            report.take(f"hop.wake_idle{suffix}", summarise(idle), f"{kind}, the same after {1000 * IDLE_S:g} ms")
    _per_token(report, count)


def _per_token(report: Report, count: int) -> None:
    outputs = [(i, EngineOutput(request_id=f"request-{i}", token_ids=[i])) for i in range(NUM_ROWS)]
    payload = pack_outputs(outputs)
    packed, unpacked = [], []
    for _ in range(count):
        start = time.perf_counter_ns()
        pack_outputs(outputs)
        middle = time.perf_counter_ns()
        unpack_outputs(payload, str)
        packed.append((middle - start) // NUM_ROWS)
        unpacked.append((time.perf_counter_ns() - middle) // NUM_ROWS)
    report.take("hop.pack_token", summarise(packed), f"core: one of {NUM_ROWS} rows of a step into its frame")
    report.take("hop.unpack_token", summarise(unpacked), f"frontend: one of {NUM_ROWS} rows out of it")


@contextlib.contextmanager
def _echo(kind: str, *, sleeps: bool) -> Iterator[Any]:
    """A function that sends a frame to an echoing process and answers how long it took. It is awake while the other side sleeps."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        transport = open_transport(kind, Path(folder))
        there = Outgoing(transport.sender(f"{folder}/there"))
        command = [sys.executable, "-m", __name__, kind, folder, "sleeps" if sleeps else "polls"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            back = Incoming(transport.receiver(f"{folder}/back"))
            ringer = Ringer(Path(folder) / "bell")

            def hop(pause_s: float = 0.0) -> Hop:
                end_ns = time.perf_counter_ns() + int(1e9 * pause_s)
                while time.perf_counter_ns() < end_ns:
                    pass
                start_ns = time.perf_counter_ns()
                there.post(FrameKind.ABORT, PAYLOAD)
                if sleeps:
                    ringer.ring()
                while (echoed := next(back.messages(), None)) is None:
                    there.flush()
                (arrived_ns,) = _CLOCK.unpack_from(echoed[1])
                return Hop(arrived_ns - start_ns, time.perf_counter_ns() - start_ns)

            for _ in range(20):
                hop()
            yield hop
            process.kill()
        for end in (there, back, ringer, transport):
            end.close()


def _be_the_echo(kind: str, folder: str, manner: str) -> None:
    transport = open_transport(kind, Path(folder))
    incoming, outgoing = Incoming(transport.receiver(f"{folder}/there")), Outgoing(transport.sender(f"{folder}/back"))
    bell = Bell(Path(folder) / "bell")
    print("up", flush=True)
    while True:
        if manner == "sleeps":
            select.select([bell], [], [])
            bell.silence()
        for header, payload in incoming.messages():
            outgoing.post(FrameKind(header.kind), _CLOCK.pack(time.perf_counter_ns()) + payload[_CLOCK.size :])
        outgoing.flush()


if __name__ == "__main__":
    _be_the_echo(*sys.argv[1:4])
