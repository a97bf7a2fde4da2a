"""Messages over a transport: cut into frames, numbered, joined again. What does not fit now waits here, in order.

Knows frames and their numbers; knows neither processes nor what a payload means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from octavo_core.errors import FrameError
from octavo_core.wire import HEADER_BYTES, MORE, FrameHeader, FrameKind, pack_frame, unpack_frame
from octavo_engine._src.process.awake import AwakeClock
from octavo_engine._src.process.transport import SLOT_BYTES, Receiver, Sender

PART_BYTES: Final = SLOT_BYTES - HEADER_BYTES
MAX_MESSAGE_BYTES: Final = 256 * 2**20
"""Largest message joined from parts: a bound against a peer gone mad, far above what a request or an output takes."""


class Outgoing:
    """The sending side. Never waits: what the other side has no room for is kept until `flush`."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._sequence = 0
        self._backlog: deque[bytes] = deque()
        self.backlog_bytes = 0
        self.stalled_s = 0.0
        """Seconds this process was awake since the other side last took something that it was to take."""
        self._clock = AwakeClock()

    def post(self, kind: FrameKind, payload: bytes, *, request: int = 0, step: int = 0) -> None:
        """Send a message, or keep what does not fit."""
        for start in range(0, max(len(payload), 1), PART_BYTES):
            part = payload[start : start + PART_BYTES]
            flags = MORE if start + PART_BYTES < len(payload) else 0
            self._sequence += 1
            self._hand_over(pack_frame(kind, part, sequence=self._sequence, step=step, request=request, flags=flags))

    def _hand_over(self, frame: bytes) -> None:
        if self._backlog or not self._sender.send(frame):
            self._backlog.append(frame)
            self.backlog_bytes += len(frame)

    def flush(self) -> bool:
        """Send what was kept, as far as there is room; True when any of it went."""
        went = False
        while self._backlog and self._sender.send(self._backlog[0]):
            self.backlog_bytes -= len(self._backlog.popleft())
            went = True
        before_s = self._clock.now_s
        passed_s = self._clock.tick() - before_s
        self.stalled_s = self.stalled_s + passed_s if self._backlog and not went else 0.0
        return went

    def close(self) -> None:
        """Close the transport's end."""
        self._sender.close()


class Incoming:
    """The receiving side. A number missed is an error: nothing after it can be trusted to be whole."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._sequence = 0
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def messages(self) -> Iterator[tuple[FrameHeader, bytes]]:
        """Everything that has come; the header is that of a message's last frame.

        Raises:
            FrameError: A frame is damaged, or some were lost before it.
        """
        while (frame := self._receiver.receive()) is not None:
            header, part = unpack_frame(frame)
            self._sequence += 1
            if header.sequence != self._sequence:
                raise FrameError(f"frame {self._sequence} was to come, {header.sequence} came: frames were lost")
            self._num_bytes += len(part)
            if self._num_bytes > MAX_MESSAGE_BYTES:
                raise FrameError(f"a message has at most {MAX_MESSAGE_BYTES} bytes, {self._num_bytes} came")
            if header.flags & MORE:
                self._parts.append(part)
                continue
            payload = b"".join((*self._parts, part)) if self._parts else part
            self._parts, self._num_bytes = [], 0
            yield header, payload

    def close(self) -> None:
        """Close the transport's end."""
        self._receiver.close()
