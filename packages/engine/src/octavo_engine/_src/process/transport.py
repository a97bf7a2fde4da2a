"""One direction between two processes of this machine: whole frames, in order, none lost unseen. Touches shared memory or sockets.

The seam is a `Sender` and a `Receiver`. `send` answers False where the receiver has no room (or is not there yet): nothing is ever
overwritten, and nobody waits. Two implementations: iceoryx2's publish/subscribe with its overflow switched off, and datagram sockets
where iceoryx2 cannot be imported. Waking a sleeper is `bell`'s work: what was sent before it rings has arrived.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Protocol, runtime_checkable

from octavo_core.errors import ConfigError
from octavo_engine._src.process.folders import user_folder

SLOT_BYTES: Final = 16 * 1024
"""Largest frame; longer messages travel in parts."""
NUM_SLOTS: Final = 64
"""Frames that may wait for the receiver."""
SHARED_MEMORY: Final = "/dev/shm"
END_BYTES: Final = 2 * NUM_SLOTS * SLOT_BYTES
"""Of shared memory, free before a sender is made: what it takes, and as much to spare."""
START_BYTES: Final = 8 * END_BYTES
"""Free before a server relies on it: two frontends, and their successors before the dead are cleaned away."""
KINDS: Final = ("auto", "iceoryx2", "sockets")


@runtime_checkable
class Sender(Protocol):
    """Where frames go in."""

    def send(self, frame: bytes) -> bool:
        """Hand over a frame of at most `SLOT_BYTES`; False: there is no room for it now."""

    def close(self) -> None:
        """Give the memory back; what is on its way may be lost."""


@runtime_checkable
class Receiver(Protocol):
    """Where they come out."""

    def receive(self) -> bytes | None:
        """The next frame, if there is one."""

    def close(self) -> None:
        """Give the memory back."""


@runtime_checkable
class Transport(Protocol):
    """Makes both ends of a named direction. The receiver is made by the side that hears of the name second."""

    name: str

    def sender(self, service: str) -> Sender:
        """The one sending end."""

    def receiver(self, service: str) -> Receiver:
        """The one receiving end."""

    def clean(self) -> None:
        """Give back what processes left that died."""

    def close(self) -> None:
        """Close what is common to the ends."""


def choose(wanted: str) -> tuple[str, str]:
    """The transport to use and why.

    Raises:
        ConfigError: What was asked for cannot be had.
    """
    if wanted == "sockets":
        return wanted, "--ipc"
    try:
        _iceoryx2()
        room = free_bytes()
        problem = "" if room >= START_BYTES else f"{SHARED_MEMORY} has {room >> 10} KiB free, {START_BYTES >> 10} are wanted"
    except ImportError as error:
        problem = f"iceoryx2 cannot be imported: {error}"
    except OSError as error:
        problem = f"{SHARED_MEMORY}: {error.strerror}"
    if not problem:
        return "iceoryx2", "--ipc" if wanted == "iceoryx2" else "lock-free shared memory"
    if wanted == "iceoryx2":
        raise ConfigError(f"--ipc iceoryx2: {problem}; use --ipc sockets")
    return "sockets", problem


def free_bytes() -> int:
    """Room for shared memory."""
    found = os.statvfs(SHARED_MEMORY)
    return found.f_bavail * found.f_frsize


def open_transport(kind: str, folder: Path) -> Transport:
    """A transport of a kind that `choose` answered; `folder` belongs to this server alone."""
    return Iceoryx() if kind == "iceoryx2" else Sockets(folder)


def _iceoryx2() -> ModuleType:
    import iceoryx2

    return iceoryx2


class Iceoryx:
    """Publish/subscribe in shared memory, one publisher and one subscriber a service."""

    name = "iceoryx2"

    def __init__(self) -> None:
        iox = self._iox = _iceoryx2()
        iox.set_log_level(iox.LogLevel.Error)
        root = user_folder()  # one per user, so that a later start finds what a dead one left
        config = iox.config.default()
        config.global_cfg.root_path = iox.Path.new(f"{root}/")
        config.global_cfg.prefix = iox.FileName.new(f"octavo{os.getuid()}_")
        builder = iox.NodeBuilder.new().config(config).signal_handling_mode(iox.SignalHandlingMode.Disabled)
        self._node = builder.create(iox.ServiceType.Ipc)

    def clean(self) -> None:
        """See the seam."""
        with contextlib.suppress(Exception):  # somebody else may clean at the same time; what is left is left to the next start
            self._node.try_cleanup_dead_nodes()

    def sender(self, service: str) -> Sender:
        """See the seam.

        Raises:
            OSError: There is no shared memory left. All of a sender's is taken here: what is written to later must be there then.
        """
        if free_bytes() < END_BYTES:
            raise OSError(errno.ENOSPC, f"{SHARED_MEMORY} is full")
        publishers = self._service(service).publisher_builder().initial_max_slice_len(SLOT_BYTES).max_loaned_samples(1)
        publisher = publishers.backpressure_strategy(self._iox.BackpressureStrategy.DiscardData).create()
        _take(f"*_{publisher.id.value}.data")
        return _IceoryxSender(publisher)

    def receiver(self, service: str) -> Receiver:
        """See the seam."""
        return _IceoryxReceiver(self._service(service).subscriber_builder().buffer_size(NUM_SLOTS).create())

    def _service(self, name: str) -> Any:
        service = self._node.service_builder(self._iox.ServiceName.new(name)).publish_subscribe(self._iox.Slice[ctypes.c_uint8])
        service = service.enable_safe_overflow(False).history_size(0).subscriber_max_borrowed_samples(1).max_nodes(4)
        return service.subscriber_max_buffer_size(NUM_SLOTS).max_publishers(1).max_subscribers(1).open_or_create()

    def close(self) -> None:
        """See the seam."""
        self._node = None


def _take(pattern: str) -> None:
    """Fill the holes of files in shared memory: a page that cannot be had later would be the end of the process (SIGBUS)."""
    for path in Path(SHARED_MEMORY).glob(pattern):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


class _IceoryxSender:
    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def send(self, frame: bytes) -> bool:
        sample = self._publisher.loan_slice_uninit(len(frame))
        ctypes.memmove(sample.payload_ptr, frame, len(frame))
        return sample.assume_init().send() > 0

    def close(self) -> None:
        self._publisher.delete()


class _IceoryxReceiver:
    def __init__(self, subscriber: Any) -> None:
        self._subscriber = subscriber

    def receive(self) -> bytes | None:
        sample = self._subscriber.receive()
        if sample is None:
            return None
        frame = ctypes.string_at(sample.payload_ptr, sample.header.number_of_elements)
        sample.delete()
        return frame

    def close(self) -> None:
        self._subscriber.delete()


class Sockets:
    """Datagrams of the local domain: whole, in order, there before the bell that is rung after them, and refused when there is no room."""

    name = "sockets"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sender(self, service: str) -> Sender:
        """See the seam."""
        return _SocketSender(self._path(service))

    def receiver(self, service: str) -> Receiver:
        """See the seam."""
        return _SocketReceiver(self._path(service))

    def _path(self, service: str) -> str:
        return str(self._folder / f"{service.replace('/', '-')}.data")

    def clean(self) -> None:
        """See the seam: names in the server's folder go with it."""

    def close(self) -> None:
        """See the seam."""


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        made.setsockopt(socket.SOL_SOCKET, option, NUM_SLOTS * SLOT_BYTES)
    return made


class _SocketSender:
    def __init__(self, path: str) -> None:
        self._socket, self._path = _datagram_socket(), path

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.sendto(frame, self._path)
        except OSError:  # full, or nobody there
            return False
        return True

    def close(self) -> None:
        self._socket.close()


class _SocketReceiver:
    def __init__(self, path: str) -> None:
        self._socket, self._path = _datagram_socket(), path
        self._socket.bind(path)

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(SLOT_BYTES)
        except BlockingIOError:
            return None

    def close(self) -> None:
        self._socket.close()
        Path(self._path).unlink(missing_ok=True)
