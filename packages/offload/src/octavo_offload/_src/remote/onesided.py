"""One-sided reads: a member reads leased blocks out of a store's memory, which does not take part. Knows none of the libraries that do it.

Only the receiver moves bytes, when it wants them: what is not under lease is not read, and windows bound what is. The store tells
where its memory is at `Join`, over the control plane.

A transfer that is late cannot be called back. It raises `LateError`, and until `LateError.has_ended` nobody may use the slots again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, Protocol, runtime_checkable

import msgspec

from octavo_offload._src.remote.errors import PeerError
from octavo_offload._src.remote.shared import SharedSlab
from octavo_offload._src.slab import address

PENDING: Final = "PROC"
DONE: Final = "DONE"
_EAGER_S: Final = 2e-4
_PAUSE_S: Final = 1e-4


class Where(msgspec.Struct, array_like=True, frozen=True):
    """A store's memory: where it begins, how large it is, and what a member's library must know to read it."""

    start: int
    size: int
    agent: bytes


@runtime_checkable
class Transfer(Protocol):
    """One read of several blocks, which was begun."""

    def poll(self) -> str:
        """`PENDING`; `DONE`; or why it failed. A transfer that failed has ended too: nobody writes into its slots any more."""

    def end(self) -> None:
        """It has ended: give back what it holds."""


@runtime_checkable
class Link(Protocol):
    """One library's connection to a store."""

    name: str

    def begin(self, near: Sequence[int], far: Sequence[int], size: int) -> Transfer:
        """Begin to read `size` bytes from each of the addresses `far` to the one of `near` beside it. Raises what the library raises."""

    def close(self) -> None:
        """No longer needed; transfers that are late may still be asked how they stand."""


@runtime_checkable
class Reader(Protocol):
    """A member's side of one library, for the life of its process. Made over the slab of its slots; OSError where the library does not work."""

    told: str

    def join(self, metadata: bytes) -> Remote:
        """Know a store, by what it said at `Join`, and connect; PeerError where that cannot be."""


class LateError(PeerError):
    """A transfer has not ended by its deadline. `has_ended` says when nobody writes any more."""

    def __init__(self, message: str, transfer: Transfer) -> None:
        super().__init__(message)
        self._transfer = transfer

    def has_ended(self) -> bool:
        """Whether the slots may be used again. Once it has, do not ask any more."""
        if self._transfer.poll() == PENDING:
            return False
        self._transfer.end()
        return True


class Remote:
    """A store that was joined. Made by a `Reader`.

    Args:
        link: To it.
        slab: Of the slots to read into.
        where: Its memory.
    """

    def __init__(self, link: Link, slab: SharedSlab, where: Where) -> None:
        self._link, self._slab, self._where = link, slab, where

    def read(self, blocks: Sequence[tuple[int, int]], size: int, deadline_s: float) -> None:
        """Read blocks of `size` bytes, each from a place in the store's memory into a slot.

        Raises:
            PeerError: It failed, or a place is outside the store's memory; nobody writes into the slots any more.
            LateError: It has not ended.
        """
        where, name, end_s = self._where, self._link.name, time.monotonic() + deadline_s
        if any(place < 0 or place + size > where.size for place, _ in blocks):
            raise PeerError("the store named a place outside its memory")
        near = [address(self._slab.slot(slot)) for _, slot in blocks]
        try:
            transfer = self._link.begin(near, [where.start + place for place, _ in blocks], size)
        except Exception as error:
            raise PeerError(f"a read by {name} could not begin: {brief(error)}") from None
        started_s = time.monotonic()
        while (state := transfer.poll()) == PENDING:
            now_s = time.monotonic()
            if now_s > end_s:
                raise LateError(f"a read by {name} has not ended after {deadline_s:.1f} s", transfer)
            if now_s > started_s + _EAGER_S:
                time.sleep(_PAUSE_S)
        transfer.end()
        if state != DONE:
            raise PeerError(f"a read by {name} failed: {state}")

    def close(self) -> None:
        """No longer needed."""
        self._link.close()


def brief(error: BaseException) -> str:
    """A library's error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
