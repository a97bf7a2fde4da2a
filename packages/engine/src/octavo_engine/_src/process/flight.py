"""The flight recorder: the last steps of a core in a file that outlives it, however it ends. Touches the disk (a memory map).

The core writes, the supervisor reads once the core is dead: a core that was killed, stopped or is stuck cannot be asked. Each slot
is a length and a JSON line of the step log; a slot cut off by the end of its writer is left out.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec

from octavo_core.records import StepRecord

NUM_SLOTS: Final = 1000
SLOT_BYTES: Final = 768
_LENGTH: Final = struct.Struct("<I")


class FlightRecorder:
    """The writing side.

    Args:
        path: A file of the server's own; made anew.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(NUM_SLOTS * SLOT_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._encoder = msgspec.json.Encoder()
        self._next = 0

    def step(self, record: StepRecord) -> None:
        """Take in a step; the oldest of `NUM_SLOTS` is forgotten."""
        line = self._encoder.encode(record)[: SLOT_BYTES - _LENGTH.size]
        at = self._next % NUM_SLOTS * SLOT_BYTES
        self._next += 1
        self._map[at : at + _LENGTH.size] = bytes(_LENGTH.size)
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(line)] = line
        self._map[at : at + _LENGTH.size] = _LENGTH.pack(len(line))

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()


def read(path: Path) -> list[StepRecord]:
    """The steps in a recorder's file, oldest first; none where there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = []
    for at in range(0, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        (length,) = _LENGTH.unpack_from(data, at)
        if 0 < length <= SLOT_BYTES - _LENGTH.size:
            try:
                records.append(msgspec.json.decode(data[at + _LENGTH.size : at + _LENGTH.size + length], type=StepRecord))
            except msgspec.MsgspecError:
                continue
    return sorted(records, key=lambda record: record.step)


def dump(source: Path, target: Path) -> int:
    """Write the steps of a recorder's file as a step log, which `--step-log` readers understand; how many there were."""
    records = read(source)
    if records:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return len(records)
