"""Memory that an agent and its engine share, and the pipe between them. Touches memory outside Python's allocator and file descriptors."""

from __future__ import annotations

import mmap
import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from octavo_offload._src.slab import aligned


class SharedSlab:
    """Slots in memory without a name.

    Args:
        num_slots: How many.
        slot_bytes: Of each; rounded up to a page.
        fd: Of memory that is there already.
    """

    def __init__(self, num_slots: int, slot_bytes: int, fd: int | None = None) -> None:
        self.num_slots, self.slot_bytes = num_slots, aligned(slot_bytes)
        self.fd = _memory(num_slots * self.slot_bytes) if fd is None else fd
        self._map = mmap.mmap(self.fd, num_slots * self.slot_bytes)
        self.whole = memoryview(self._map)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        return self.whole[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def close(self) -> None:
        """Let it go; views that others still hold stay good."""
        os.close(self.fd)


def _memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("octavo-kv", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class Pipe:
    """Messages over a file descriptor.

    Args:
        fd: One end of a socket pair; owned from now on.
        comes: Types that may arrive.
    """

    def __init__(self, fd: int, comes: Any) -> None:
        self._connection = Connection(fd)
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(comes)

    def send(self, message: Any) -> None:
        """Send; OSError when nobody is there. One thread at a time."""
        self._connection.send_bytes(self._encoder.encode(message))

    def receive(self, timeout_s: float | None) -> Any:
        """The next message, or None when none came in time.

        Raises:
            EOFError, OSError: Nobody is there any more.
        """
        if not self._connection.poll(timeout_s):
            return None
        return self._decoder.decode(self._connection.recv_bytes())

    def close(self) -> None:
        """End it."""
        self._connection.close()
