"""One-sided reads by NIXL and UCX: a member reads leased blocks out of a store's memory, which does not take part. Touches the network.

Only the receiver moves bytes, when it wants them: what is not under lease is not read, and windows bound what is. The store tells
where its memory is at `Join`, over the control plane; UCX itself knows no keys and encrypts nothing.

A transfer that is late cannot be called back. It raises `LateError`, and until `LateError.has_ended` nobody may use the slots again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from octavo_offload._src import nixl
from octavo_offload._src.remote.peer import PeerError
from octavo_offload._src.remote.shared import SharedSlab
from octavo_offload._src.slab import address

_LOG = logging.getLogger(__name__)

TRANSPORT: Final = "ucx"
_EAGER_S: Final = 2e-4
_PAUSE_S: Final = 1e-4
_ANSWER_S: Final = 2e-5
_IDLE_S: Final = 2e-3
_MODE: Final = {"ucx_error_handling_mode": "peer"}
"""So that a peer that is gone is an error and not silence."""


class Where(msgspec.Struct, array_like=True, frozen=True):
    """A store's memory: where it begins, how large it is, and what NIXL must know to read it."""

    start: int
    size: int
    agent: bytes


class LateError(PeerError):
    """A transfer has not ended by its deadline. `has_ended` says when nobody writes any more."""

    def __init__(self, message: str, transfer: _Transfer) -> None:
        super().__init__(message)
        self._transfer = transfer

    def has_ended(self) -> bool:
        """Whether the slots may be used again. Once it has, do not ask any more."""
        if self._transfer.poll() == "PROC":
            return False
        self._transfer.end()
        return True


def told() -> str:
    """How UCX was told to travel, in words."""
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
        metadata: What members must know.

    Raises:
        OSError: NIXL or UCX does not work here.
    """

    def __init__(self, memory: memoryview, is_leased: Callable[[], bool]) -> None:
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

    Raises:
        OSError: NIXL or UCX does not work here.
    """

    def __init__(self, slab: SharedSlab) -> None:
        self._slab = slab
        self._name = f"octavo-member-{os.urandom(8).hex()}"
        self._lock = threading.Lock()
        self._agent = _agent(self._name)
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
        return Remote(self, name, where)

    def begin(self, remote: str, near: Sequence[tuple[int, int, int]], far: Sequence[tuple[int, int, int]]) -> _Transfer:
        """Begin to read."""
        with self._lock:
            agent = self._agent
            mine, theirs = agent.get_xfer_descs(list(near), "DRAM"), agent.get_xfer_descs(list(far), "DRAM")
            transfer = _Transfer(self, agent.initialize_xfer("READ", mine, theirs, remote))
            transfer.state = agent.transfer(transfer.handle)
        return transfer

    def poll(self, transfer: _Transfer) -> str:
        """How a transfer stands; a transfer that failed has ended too."""
        with self._lock:
            if transfer.state == "PROC":
                try:
                    transfer.state = self._agent.check_xfer_state(transfer.handle)
                except Exception as error:
                    transfer.state = nixl.why(error)
            return str(transfer.state)

    def release(self, transfer: _Transfer) -> None:
        """It has ended."""
        with self._lock:
            transfer.handle.release()

    def slot(self, index: int, size: int) -> tuple[int, int, int]:
        """Where a slot is."""
        return address(self._slab.slot(index)), size, 0

    def forget(self, remote: str) -> None:
        """A store is gone."""
        with self._lock:
            try:
                self._agent.remove_remote_agent(remote)
            except Exception:  # it was gone already
                return


class _Transfer:
    """One read of several blocks."""

    def __init__(self, reader: Reader, handle: Any) -> None:
        self._reader, self.handle, self.state = reader, handle, "PROC"

    def poll(self) -> str:
        """`PROC`, `DONE`, or why it failed."""
        return self._reader.poll(self)

    def end(self) -> None:
        """Give its handle back."""
        self._reader.release(self)


class Remote:
    """A store that was joined. Made by `Reader.join`."""

    def __init__(self, reader: Reader, name: str, where: Where) -> None:
        self._reader, self._name, self._where = reader, name, where

    def read(self, blocks: Sequence[tuple[int, int]], size: int, deadline_s: float) -> None:
        """Read blocks of `size` bytes, each from a place in the store's memory into a slot.

        Raises:
            PeerError: It failed, or a place is outside the store's memory; nobody writes into the slots any more.
            LateError: It has not ended.
        """
        where, end_s = self._where, time.monotonic() + deadline_s
        if any(place < 0 or place + size > where.size for place, _ in blocks):
            raise PeerError("the store named a place outside its memory")
        near = [self._reader.slot(slot, size) for _, slot in blocks]
        far = [(where.start + place, size, 0) for place, _ in blocks]
        try:
            transfer = self._reader.begin(self._name, near, far)
        except Exception as error:
            raise PeerError(f"a read by UCX could not begin: {nixl.why(error)}") from None
        started_s = time.monotonic()
        while transfer.poll() == "PROC":
            now_s = time.monotonic()
            if now_s > end_s:
                raise LateError(f"a read by UCX has not ended after {deadline_s:.1f} s", transfer)
            if now_s > started_s + _EAGER_S:
                time.sleep(_PAUSE_S)
        state = transfer.poll()
        transfer.end()
        if state != "DONE":
            raise PeerError(f"a read by UCX failed: {state}")

    def close(self) -> None:
        """No longer needed."""
        self._reader.forget(self._name)
