"""A member's side of the control plane: joins a store and asks it. Touches the network; every call has a deadline.

Everything that can go wrong with a store is a `PeerError`; `is_final` says that trying again would not help.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import grpc
import msgspec

from octavo_offload._src.remote import auth
from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote.errors import PeerError

M = TypeVar("M")

_OPTIONS: Final = [
    ("grpc.max_receive_message_length", 128 << 20),
    ("grpc.max_send_message_length", 128 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]
_FINAL: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)


class Peer:
    """A joined store.

    Args:
        start: Which, and as whom.

    Attributes:
        told: How blocks are read, in words.
        remote: Reads the store's memory (`onesided.Remote`); None: blocks are asked for by `read`.

    Raises:
        PeerError: It cannot be joined.
    """

    def __init__(self, start: m.Start) -> None:
        self._start, self._deadline_s = start, start.deadline_s
        self._channel = self._open(start)
        self._calls: dict[str, Any] = {}
        self.told = ""
        self.remote: Any = None
        try:
            self.joined, self._session = self._join(start)
        except BaseException:
            self._channel.close()
            raise

    @staticmethod
    def _open(start: m.Start) -> Any:
        if start.tls is None:
            return grpc.insecure_channel(start.target, options=_OPTIONS)
        certificate, key, authorities = start.tls
        options = [*_OPTIONS, *([("grpc.ssl_target_name_override", start.tls_name)] if start.tls_name else [])]
        return grpc.secure_channel(start.target, grpc.ssl_channel_credentials(authorities, key, certificate), options=options)

    def _call(self, method: str, frame: bytes, deadline_s: float | None = None) -> bytes:
        call = self._calls.get(method)
        if call is None:
            call = self._calls[method] = self._channel.unary_unary(f"/{m.SERVICE}/{method}", None, None)
        try:
            return bytes(call(frame, timeout=deadline_s or self._deadline_s))
        except grpc.RpcError as error:
            raise _peer_error(error) from None
        except ValueError:  # the channel was closed by another thread
            raise PeerError("the store was dropped") from None

    def _plain(self, method: str, ask: Any, answer: type[M]) -> M:
        try:
            return msgspec.msgpack.decode(self._call(method, msgspec.msgpack.encode(ask), 5.0), type=answer)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a KV store's answer: {error}", is_final=True) from None

    def _join(self, start: m.Start) -> tuple[m.Joined, auth.Session]:
        mine = os.urandom(auth.NONCE_BYTES)
        challenge = self._plain("Hello", m.Hello(m.VERSION, mine), m.Challenge)
        wanted = auth.proof(start.secret, "store", mine, challenge.nonce, challenge.incarnation)
        try:
            auth.expect(challenge.proof, wanted, "the store")
        except auth.Refused as error:
            raise PeerError(str(error), is_final=True) from None
        proof = auth.proof(start.secret, "member", mine, challenge.nonce, start.identity)
        ask = m.Join(mine, challenge.nonce, proof, start.identity, start.block_bytes, start.transports)
        joined = self._plain("Join", ask, m.Joined)
        return joined, auth.Session(start.secret, mine, challenge.nonce, joined.member)

    def _ask(self, method: str, ask: Any, answer: type[M], data: memoryview | None = None) -> M:
        frame = self._session.seal(method, msgspec.msgpack.encode(ask))
        try:
            body = self._session.open_answer(method, self._call(method, frame if data is None else b"".join((frame, data))), frame)
            return msgspec.msgpack.decode(body, type=answer)
        except (auth.Refused, msgspec.DecodeError) as error:
            raise PeerError(f"{method}: {error}") from None

    def beat(self, cursor: int) -> m.Beaten:
        """Say that we live; hear what is new."""
        return self._ask("Beat", m.Beat(cursor), m.Beaten)

    def lease(self, keys: Sequence[bytes]) -> m.Leased:
        """Have blocks kept where they are."""
        return self._ask("Lease", m.Ask(list(keys)), m.Leased)

    def release(self, lease: int) -> None:
        """Give a lease back."""
        self._ask("Release", m.Give(lease), m.Nothing)

    def put(self, key: bytes, seal: int, data: memoryview) -> bool:
        """Have a block kept."""
        return self._ask("Put", m.Put(key, seal), m.Kept, data).is_kept

    def read(self, lease: int, into: Sequence[memoryview]) -> None:
        """Fill buffers with the blocks of a lease, in order; it ends with that."""
        frame = self._session.seal("Read", msgspec.msgpack.encode(m.Give(lease)))
        try:
            stream = self._channel.unary_stream(f"/{m.SERVICE}/Read", None, None)(frame, timeout=self._deadline_s)
            _fill(stream, into)
        except grpc.RpcError as error:
            raise _peer_error(error) from None
        except ValueError:
            raise PeerError("the store was dropped") from None

    def leave(self) -> None:
        """Say good-bye, if the store listens."""
        with contextlib.suppress(PeerError):
            self._ask("Leave", m.Nothing(), m.Nothing)
        self.close()

    def close(self) -> None:
        """Drop the connection; calls that run fail."""
        self._channel.close()
        if self.remote is not None:
            self.remote.close()


def _fill(stream: Any, into: Sequence[memoryview]) -> None:
    """Copy a stream's chunks over buffers; every one must be filled, and no more come."""
    buffers = iter(into)
    view, at = next(buffers, None), 0
    for chunk in stream:
        if view is None or at + len(chunk) > len(view):
            stream.cancel()
            raise PeerError("the store sent more than was asked")
        view[at : at + len(chunk)] = chunk
        at += len(chunk)
        if at == len(view):
            view, at = next(buffers, None), 0
    if view is not None:
        raise PeerError("the store sent less than was asked")


def _peer_error(error: Any) -> PeerError:
    code = error.code()
    return PeerError(f"{code.name.lower().replace('_', ' ')}: {error.details()}", is_final=code in _FINAL)
