"""One-sided reads by Mooncake's transfer engine. Touches the network; the engine knows no keys and encrypts nothing.

It travels by RDMA where it finds a device of that kind (`MC_FORCE_TCP` forbids it), else by TCP. Each block is a batch of its own: of a
batch of several, one block that failed would be told while others are still being written. Its own waits spin, so states are asked for.

An engine caches what it was told of a peer by the peer's address. A store that starts again may get the address of the old one: every join
has an engine of its own, which lives until its last transfer has ended.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo_offload._src.remote.errors import PeerError
from octavo_offload._src.remote.onesided import DONE, PENDING, Remote, Where, brief
from octavo_offload._src.remote.shared import SharedSlab
from octavo_offload._src.slab import address

TRANSPORT: Final = "mooncake"
INSTALL: Final = "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1"
_PACKAGE: Final = "mooncake"
_ARRIVED, _FAILED = 1, -1


class NoMooncake(OSError):
    """The engine is not installed, does not load or does not start; the message says which."""


def is_here() -> bool:
    """Whether the library is installed; it is not loaded for that."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return any(next(Path(folder).glob("engine*.so"), None) for folder in folders or ())


def load() -> Any:
    """The library.

    Raises:
        NoMooncake: It is not to be had.
    """
    if not is_here():
        raise NoMooncake(f"Mooncake's transfer engine is not installed ({INSTALL})")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module(f"{_PACKAGE}.engine")
    except Exception as error:
        raise NoMooncake(f"Mooncake's transfer engine does not load: {brief(error)}; it wants libibverbs1 and libnuma1") from None


def _engine(host: str) -> tuple[Any, str]:
    """A running engine that others know as `host`, and how it travels."""
    engine = load().TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):  # the protocol is its allocator's; it finds its own
        raise NoMooncake(f"Mooncake's transfer engine does not start at {host}; its log says why")
    return engine, _way(engine.get_local_topology(), os.environ.get("MC_FORCE_TCP"))


def _way(topology: str, is_tcp_forced: str | None) -> str:
    """How an engine travels: by RDMA where its topology has devices."""
    groups = [group for pair in json.loads(topology or "{}").values() for group in pair]
    devices = sorted({name for group in groups for name in group})
    return f"rdma ({', '.join(devices)})" if devices and not is_tcp_forced else "tcp"


class ReadableMemory:
    """A store's side: memory that members may read. Over TCP a thread of the engine's answers, which sleeps while nobody asks.

    Args:
        memory: All of it.
        host: The address or name members reach this machine by.

    Attributes:
        transport: Its name.
        metadata: What members must know.
        told: How it works, in words.

    Raises:
        OSError: The engine does not work here, or members could not find it.
    """

    transport = TRANSPORT

    def __init__(self, memory: memoryview, host: str) -> None:
        if host in ("0.0.0.0", "::", "[::]"):
            raise NoMooncake(
                f"members must be told an address to read from, and {host} is none: name one of this machine's in --bind"
            )
        self._engine, way = _engine(host)
        self.told = f"mooncake over {way}"
        if self._engine.register_memory(address(memory), len(memory)):
            raise NoMooncake("the store's memory cannot be registered with Mooncake's transfer engine; its log says why")
        name = f"{host}:{self._engine.get_rpc_port()}"
        self.metadata = msgspec.msgpack.encode(Where(address(memory), len(memory), name.encode()))


class Reader:
    """A member's side: an engine for each store that is joined, and slots to read into.

    Args:
        slab: Of the slots.

    Attributes:
        told: How it works, in words.

    Raises:
        OSError: The engine does not load here.
    """

    def __init__(self, slab: SharedSlab) -> None:
        load()
        self.told = TRANSPORT
        self._slab = slab

    def join(self, metadata: bytes) -> Remote:
        """Know a store, by what it said at `Join`, and see whether it answers.

        Raises:
            PeerError: It does not.
        """
        try:
            where = msgspec.msgpack.decode(metadata, type=Where)
            remote = where.agent.decode()
            engine, way = _engine(_my_address(remote))
            self.told = f"mooncake over {way}"
            if way != "tcp" and engine.register_memory(address(self._slab.whole), len(self._slab.whole)):
                raise NoMooncake("the staging memory cannot be registered")
            if status := engine.send_probe(remote):
                raise NoMooncake(f"{remote} does not answer (status {status})")
        except Exception as error:
            raise PeerError(f"the store cannot be reached by Mooncake's transfer engine: {brief(error)}") from None
        return Remote(_Link(engine, remote), self._slab, where)


def _my_address(remote: str) -> str:
    """The address of this machine on the way to a store; nothing is sent."""
    host, _, port = remote.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class _Link:
    """An engine, and the store it reads from. Staging memory is registered where RDMA wants it; over TCP nobody can reach it then."""

    name = "Mooncake's transfer engine"

    def __init__(self, engine: Any, remote: str) -> None:
        self._engine, self._remote = engine, remote

    def begin(self, near: Sequence[int], far: Sequence[int], size: int) -> _Transfer:
        engine = self._engine
        transfer = _Transfer(engine.transfer_check_status)
        for to, at in zip(near, far, strict=True):
            batch = engine.batch_transfer_async_read(self._remote, [to], [at], [size])
            if not batch:  # what was begun before it has to end all the same
                transfer.has_failed = True
                break
            transfer.batches.append(batch)
        return transfer

    def close(self) -> None:
        self._engine = None


class _Transfer:
    """One read of several blocks, a batch each. Keeps its engine alive through `ask`. A batch that has ended must not be asked again."""

    def __init__(self, ask: Callable[[int], int]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self.batches: list[int] = []
        self.has_failed = False

    def poll(self) -> str:
        with self._lock:
            while self.batches:
                state = self._ask(self.batches[-1])
                if state not in (_ARRIVED, _FAILED):
                    return PENDING
                self.has_failed |= state == _FAILED
                self.batches.pop()
        return "a block did not arrive" if self.has_failed else DONE

    def end(self) -> None:
        return
