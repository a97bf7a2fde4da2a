"""One-sided reads by NIXL and UCX. Touches the network; UCX knows no keys and encrypts nothing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from octavo_offload._src import nixl
from octavo_offload._src.remote.errors import PeerError
from octavo_offload._src.remote.onesided import PENDING, Remote, Where
from octavo_offload._src.remote.shared import SharedSlab
from octavo_offload._src.slab import address

_LOG = logging.getLogger(__name__)

TRANSPORT: Final = "ucx"
_ANSWER_S: Final = 2e-5
_IDLE_S: Final = 2e-3
_MODE: Final = {"ucx_error_handling_mode": "peer"}
"""So that a peer that is gone is an error and not silence."""


def is_here() -> bool:
    """Whether the library is installed; it is not loaded for that."""
    return nixl.name() is not None


def _told() -> str:
    return f"ucx over {os.environ.get('UCX_TLS') or 'what UCX chooses (UCX_TLS is not set)'}"


def _agent(who: str) -> Any:
    agent = nixl.agent(who)
    try:
        agent.create_backend("UCX", {**agent.get_plugin_params("UCX"), **_MODE})
    except Exception as error:
        raise nixl.NoNixl(f"UCX does not start: {nixl.why(error)}") from None
    return agent


class ReadableMemory:
    """A store's side: memory that members may read.

    Over RDMA nobody here takes part. Over TCP somebody has to answer: a thread does, eagerly while anything is leased.

    Args:
        memory: All of it.
        is_leased: Whether anybody may be reading.

    Attributes:
        transport: Its name.
        metadata: What members must know.
        told: How it works, in words.

    Raises:
        OSError: NIXL or UCX does not work here.
    """

    transport = TRANSPORT

    def __init__(self, memory: memoryview, is_leased: Callable[[], bool]) -> None:
        self.told = _told()
        self._is_leased = is_leased
        self._agent = _agent(f"octavo-store-{os.urandom(8).hex()}")
        try:
            self._agent.register_memory([(address(memory), len(memory), 0, "")], "DRAM", backends=["UCX"])
            self.metadata = msgspec.msgpack.encode(Where(address(memory), len(memory), self._agent.get_agent_metadata()))
        except Exception as error:
            raise nixl.NoNixl(f"the store's memory cannot be registered: {nixl.why(error)}") from None
        threading.Thread(target=self._answer_on, name="octavo-ucx", daemon=True).start()

    def _answer_on(self) -> None:
        while True:
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # of a member that is gone
                _LOG.debug("UCX: %s", nixl.why(error))
            time.sleep(_ANSWER_S if self._is_leased() else _IDLE_S)


class Reader:
    """A member's side: one NIXL agent for the life of the process, and slots to read into.

    Args:
        slab: Of the slots.

    Attributes:
        told: How it works, in words.

    Raises:
        OSError: NIXL or UCX does not work here.
    """

    def __init__(self, slab: SharedSlab) -> None:
        self.told = _told()
        self._slab = slab
        self._lock = threading.Lock()
        self._agent = _agent(f"octavo-member-{os.urandom(8).hex()}")
        try:
            self._agent.register_memory([(address(slab.whole), len(slab.whole), 0, "")], "DRAM", backends=["UCX"])
        except Exception as error:
            raise nixl.NoNixl(f"the staging memory cannot be registered: {nixl.why(error)}") from None

    def join(self, metadata: bytes) -> Remote:
        """Know a store, by what it said at `Join`, and connect.

        Raises:
            PeerError: That was nothing NIXL can use.
        """
        try:
            where = msgspec.msgpack.decode(metadata, type=Where)
            with self._lock:
                name = self._agent.add_remote_agent(where.agent)
                name = name.decode() if isinstance(name, bytes) else name
                self._agent.make_connection(name, backends=["UCX"])
        except Exception as error:
            raise PeerError(f"the store cannot be reached by UCX: {nixl.why(error)}") from None
        return Remote(_Link(self, name), self._slab, where)

    def begin(self, remote: str, near: Sequence[int], far: Sequence[int], size: int) -> _Transfer:
        """Begin to read."""
        with self._lock:
            agent = self._agent
            mine, theirs = (agent.get_xfer_descs([(at, size, 0) for at in places], "DRAM") for places in (near, far))
            transfer = _Transfer(self, agent.initialize_xfer("READ", mine, theirs, remote))
            transfer.state = agent.transfer(transfer.handle)
        return transfer

    def poll(self, transfer: _Transfer) -> str:
        """How a transfer stands; a transfer that failed has ended too."""
        with self._lock:
            if transfer.state == PENDING:
                try:
                    transfer.state = self._agent.check_xfer_state(transfer.handle)
                except Exception as error:
                    transfer.state = nixl.why(error)
            return str(transfer.state)

    def release(self, transfer: _Transfer) -> None:
        """It has ended."""
        with self._lock:
            transfer.handle.release()

    def forget(self, remote: str) -> None:
        """A store is gone."""
        with self._lock:
            try:
                self._agent.remove_remote_agent(remote)
            except Exception:  # it was gone already
                return


class _Link:
    """A store, by the name NIXL gave it."""

    name = "UCX"

    def __init__(self, reader: Reader, remote: str) -> None:
        self._reader, self._remote = reader, remote

    def begin(self, near: Sequence[int], far: Sequence[int], size: int) -> _Transfer:
        return self._reader.begin(self._remote, near, far, size)

    def close(self) -> None:
        self._reader.forget(self._remote)


class _Transfer:
    """One read of several blocks."""

    def __init__(self, reader: Reader, handle: Any) -> None:
        self._reader, self.handle, self.state = reader, handle, PENDING

    def poll(self) -> str:
        return self._reader.poll(self)

    def end(self) -> None:
        self._reader.release(self)
