"""The flight recorder: the last steps of a core in a file that outlives it, however it ends. Touches the disk (a memory map).

The core writes, the supervisor reads once the core is dead: a core that was killed, stopped or is stuck cannot be asked. Each slot
is a length and a JSON line of the step log; a slot cut off by the end of its writer is left out. Beside it lie the newest keyframes,
from which the steps can be planned again.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from pathlib import Path
from typing import Final

import msgspec

from octavo_core.records import Keyframe, StepRecord

NUM_SLOTS: Final = 1000
SLOT_BYTES: Final = 2048
NUM_KEYFRAMES: Final = 4
_LENGTH: Final = struct.Struct("<I")
_MOST: Final = SLOT_BYTES - _LENGTH.size


class FlightRecorder:
    """The writing side.

    Args:
        path: A file of the server's own; made anew.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._num_keyframes = path, 0
        path.write_bytes(bytes(NUM_SLOTS * SLOT_BYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._encoder = msgspec.json.Encoder()
        self._next = 0

    def step(self, record: StepRecord) -> None:
        """Take in a step; the oldest of `NUM_SLOTS` is forgotten."""
        line = self._encoder.encode(record)
        if len(line) > _MOST:  # many came at once
            line = self._encoder.encode(msgspec.structs.replace(record, calls=msgspec.UNSET, found=msgspec.UNSET))[:_MOST]
        at = self._next % NUM_SLOTS * SLOT_BYTES
        self._next += 1
        self._map[at : at + _LENGTH.size] = bytes(_LENGTH.size)
        self._map[at + _LENGTH.size : at + _LENGTH.size + len(line)] = line
        self._map[at : at + _LENGTH.size] = _LENGTH.pack(len(line))

    def keyframe(self, keyframe: Keyframe) -> None:
        """Take in how the scheduler stands; the oldest of `NUM_KEYFRAMES` is forgotten."""
        target = _keyframe_file(self._path, self._num_keyframes % NUM_KEYFRAMES)
        self._num_keyframes += 1
        with contextlib.suppress(OSError):  # no room: an earlier one will do
            target.write_bytes(msgspec.msgpack.encode(keyframe))

    def close(self) -> None:
        """Unmap the file; it stays."""
        self._map.close()


def read(path: Path) -> list[StepRecord]:
    """The steps in a recorder's file with the keyframes beside it, oldest first; none where there is no such file."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    records = []
    for at in range(0, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        (length,) = _LENGTH.unpack_from(data, at)
        if 0 < length <= _MOST:
            try:
                records.append(msgspec.json.decode(data[at + _LENGTH.size : at + _LENGTH.size + length], type=StepRecord))
            except msgspec.MsgspecError:
                continue
    keyframes = _keyframes(path)
    return sorted((_with_keyframe(record, keyframes) for record in records), key=lambda record: record.step)


def _with_keyframe(record: StepRecord, keyframes: dict[int, Keyframe]) -> StepRecord:
    calls = [] if record.calls is msgspec.UNSET else record.calls
    found = next((keyframes[call.number] for call in calls if call.number in keyframes), None)
    return record if found is None else msgspec.structs.replace(record, keyframe=found)


def _keyframes(path: Path) -> dict[int, Keyframe]:
    """By the call they precede."""
    found = {}
    for i in range(NUM_KEYFRAMES):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # not there yet, or half written
            keyframe = msgspec.msgpack.decode(_keyframe_file(path, i).read_bytes(), type=Keyframe)
            found[keyframe.call] = keyframe
    return found


def _keyframe_file(path: Path, index: int) -> Path:
    return path.with_name(f"{path.name}.key-{index}")


def dump(source: Path, target: Path) -> int:
    """Write the steps of a recorder's file as a step log, which `--step-log` readers understand; how many there were."""
    records = read(source)
    if records:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return len(records)


def remove(path: Path) -> None:
    """Take away a recorder's files."""
    for one in (path, *(_keyframe_file(path, i) for i in range(NUM_KEYFRAMES))):
        one.unlink(missing_ok=True)
