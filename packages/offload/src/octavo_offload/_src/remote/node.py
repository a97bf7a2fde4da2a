"""A store of blocks for several engines: the gRPC server behind `octavo kv-store`. Touches the network; keeps everything in memory.

Members join with a shared key or certificates, say every now and then that they live, lease what they want to read and give it back. A
member that falls silent is forgotten; its leases end after their quarantine. A store that starts again has a new incarnation and
nothing of the old. The store opens no connections: it never learns an address it could be made to use.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import grpc
import msgspec

from octavo_core.errors import ConfigError
from octavo_offload._src.checksum import checksum
from octavo_offload._src.remote import auth
from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote.blocks import Blocks
from octavo_offload._src.remote.tls import Tls

_LOG = logging.getLogger(__name__)

SILENT_S: Final = 30.0
"""How long a member may say nothing."""
MAX_MEMBERS: Final = 256
MAX_MESSAGE: Final = 128 << 20
CHUNK: Final = 1 << 20
"""Bytes of a block in one message of a stream."""
M = TypeVar("M")


@runtime_checkable
class Readable(Protocol):
    """Memory that members may read without the store taking part, by `transport`. `metadata` says how."""

    transport: str
    metadata: bytes


@dataclass
class _Member:
    session: auth.Session
    identity: bytes
    block_bytes: int
    transport: str
    heard_s: float


class Node:
    """One store.

    Args:
        bind: Host and port to listen at; port 0: a free one.
        blocks: Where they are kept.
        secret: Shared with members; may be empty with `tls`.
        tls: Mutual TLS.
        threads: Calls served at a time.
        readable: Lets members read the memory of `blocks` by themselves; None: blocks travel by gRPC alone.

    Attributes:
        address: Where it listens, once started.

    Raises:
        ConfigError: Nobody could be told from anybody, or the address cannot be listened at.
    """

    def __init__(
        self,
        bind: str,
        blocks: Blocks,
        secret: bytes,
        *,
        tls: Tls | None = None,
        threads: int = 32,
        readable: Readable | None = None,
    ) -> None:
        if not secret and tls is None:
            raise ConfigError("a KV store wants --key-file or --tls-cert, --tls-key and --tls-ca: it serves nobody it cannot tell")
        self.blocks, self._readable = blocks, readable
        self.transports = (readable.transport, "grpc") if readable is not None else ("grpc",)
        self.incarnation = os.urandom(8)
        self._secret, self._nonces = secret, auth.Nonces()
        self._members: dict[int, _Member] = {}
        self._lock = threading.Lock()
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.server(ThreadPoolExecutor(threads, "kv-store"), options=options, maximum_concurrent_rpcs=8 * threads)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(m.SERVICE, self._handlers()),))
        self.address = self._listen(bind, tls)

    def _listen(self, bind: str, tls: Tls | None) -> str:
        try:
            if tls is None:
                port = self._server.add_insecure_port(bind)
            else:
                pair = [(tls.key, tls.certificate)]
                port = self._server.add_secure_port(
                    bind, grpc.ssl_server_credentials(pair, tls.authorities, require_client_auth=True)
                )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"--bind {bind} cannot be listened at: {' '.join(str(error).split())}") from None
        return f"{bind.rpartition(':')[0]}:{port}"

    def start(self) -> None:
        """Serve."""
        self._server.start()

    def stop(self, grace_s: float = 1.0) -> None:
        """End, letting calls that run do so."""
        self._server.stop(grace_s).wait()

    @property
    def num_members(self) -> int:
        """Those that were heard lately."""
        with self._lock:
            return len(self._members)

    # Calls ------------------------------------------------------------------------------------------------------------

    def _handlers(self) -> dict[str, Any]:
        def plain(ask: type[M], run: Callable[[M], Any]) -> Any:
            def call(request: bytes, context: Any) -> bytes:
                try:
                    return msgspec.msgpack.encode(run(msgspec.msgpack.decode(request, type=ask)))
                except (auth.Refused, msgspec.DecodeError) as error:
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                    raise

            return grpc.unary_unary_rpc_method_handler(call)

        def signed(method: str, ask: type[M], run: Callable[[_Member, M, memoryview], Any]) -> Any:
            def call(request: bytes, context: Any) -> bytes:
                member, number, body, rest = self._open(method, ask, request, context)
                return member.session.answer(method, number, msgspec.msgpack.encode(run(member, body, rest)))

            return grpc.unary_unary_rpc_method_handler(call)

        return {
            "Hello": plain(m.Hello, self._hello),
            "Join": plain(m.Join, self._join),
            "Beat": signed("Beat", m.Beat, self._beat),
            "Lease": signed("Lease", m.Ask, self._lease),
            "Release": signed("Release", m.Give, self._release),
            "Put": signed("Put", m.Put, self._put),
            "Leave": signed("Leave", m.Nothing, self._leave),
            "Read": grpc.unary_stream_rpc_method_handler(self._read),
        }

    def _open(self, method: str, ask: type[M], request: bytes, context: Any) -> tuple[_Member, int, M, memoryview]:
        with self._lock:
            member = self._members.get(auth.member_of(request))
        if member is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not a member; join again")
            raise auth.Refused
        try:
            number, body, rest = member.session.open(method, request)
            member.heard_s = time.monotonic()
            return member, number, msgspec.msgpack.decode(body, type=ask), rest
        except (auth.Refused, msgspec.DecodeError) as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            raise

    # Membership -------------------------------------------------------------------------------------------------------

    def _hello(self, ask: m.Hello) -> m.Challenge:
        if ask.version != m.VERSION:
            raise auth.Refused(
                f"the store speaks version {m.VERSION} of the protocol, the member {ask.version}; use equal releases"
            )
        nonce = self._nonces.new(ask.nonce)
        return m.Challenge(nonce, auth.proof(self._secret, "store", ask.nonce, nonce, self.incarnation), self.incarnation)

    def _join(self, ask: m.Join) -> m.Joined:
        self._nonces.check(ask.nonce, ask.hello_nonce)
        wanted = auth.proof(self._secret, "member", ask.hello_nonce, ask.nonce, ask.identity)
        auth.expect(ask.proof, wanted, "a member that wants to join")
        transport = next((t for t in ask.transports if t in self.transports), None)
        if transport is None:
            raise auth.Refused(f"the store moves blocks by {', '.join(self.transports)}, the member by {', '.join(ask.transports)}")
        if not 0 < ask.block_bytes <= self.blocks.segment_bytes:
            raise auth.Refused(
                f"blocks of {ask.block_bytes} bytes are larger than the store's segments of {self.blocks.segment_bytes}; give it more --memory"
            )
        self._forget_silent()
        number = int.from_bytes(os.urandom(7), "little") | 1
        session = auth.Session(self._secret, ask.hello_nonce, ask.nonce, number)
        with self._lock:
            if len(self._members) >= MAX_MEMBERS:
                raise auth.Refused(f"the store has {MAX_MEMBERS} members already")
            self._members[number] = _Member(session, ask.identity, ask.block_bytes, transport, time.monotonic())
        metadata = self._readable.metadata if self._readable is not None and transport != "grpc" else b""
        return m.Joined(number, self.incarnation, self.blocks.member_bytes, self.blocks.lease_s, transport, metadata)

    def _forget_silent(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            silent = [n for n, member in self._members.items() if now_s > member.heard_s + SILENT_S]
            for number in silent:
                del self._members[number]
        for number in silent:
            self.blocks.release_member(number)
            _LOG.warning("member %x has not been heard for %.0f s: forgotten", number, SILENT_S)

    def _leave(self, member: _Member, _: m.Nothing, rest: memoryview) -> m.Nothing:
        with self._lock:
            self._members.pop(member.session.member, None)
        self.blocks.release_member(member.session.member)
        return m.Nothing()

    def _beat(self, member: _Member, ask: m.Beat, rest: memoryview) -> m.Beaten:
        self._forget_silent()
        return self.blocks.changes(member.identity, ask.cursor)

    # Blocks -----------------------------------------------------------------------------------------------------------

    def _lease(self, member: _Member, ask: m.Ask, rest: memoryview) -> m.Leased:
        return self.blocks.lease(member.session.member, member.identity, ask.keys)

    def _release(self, member: _Member, ask: m.Give, rest: memoryview) -> m.Nothing:
        self.blocks.release(member.session.member, ask.lease)
        return m.Nothing()

    def _read(self, request: bytes, context: Any) -> Iterator[bytes]:
        """The leased blocks, one after the other, in pieces; the lease ends with the stream."""
        member, _, ask, _ = self._open("Read", m.Give, request, context)
        try:
            for address, size in self.blocks.places(member.session.member, ask.lease):
                for start in range(0, size, CHUNK):
                    yield bytes(self.blocks.view(address + start, min(CHUNK, size - start)))
                self.blocks.count.read_bytes += size
        finally:
            self.blocks.release(member.session.member, ask.lease)

    def _put(self, member: _Member, ask: m.Put, rest: memoryview) -> m.Kept:
        if len(rest) != member.block_bytes:
            return m.Kept(False)
        address = self.blocks.reserve(member.identity, ask.key, member.block_bytes)
        if address is None:
            return m.Kept(self.blocks.has(member.identity, ask.key))
        view = self.blocks.view(address, member.block_bytes)
        view[:] = rest
        if checksum(ask.key, view) != ask.seal:
            self.blocks.count.corrupt += 1
            self.blocks.abandon(address, member.block_bytes)
            return m.Kept(False)
        self.blocks.publish(address, member.block_bytes, ask.seal)
        return m.Kept(True)
