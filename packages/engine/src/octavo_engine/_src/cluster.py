"""Several nodes that run one model: who they are, the channel on which node 0 tells the others what to run, and who is gone.

Who owns what: node 0 plans and alone takes requests; every node has JAX processes of one `jax.distributed` job and runs the same programs in
the same order, because node 0 says each of them beforehand on a channel of its own (ZeroMQ, numbered, no pickle). A thread on every node says
that it lives and listens for the others: whoever is silent for `node_timeout_s` counts as dead, and nobody waits longer than that for a dead node,
not even inside a collective that it will never join: node 0 runs its programs in a thread that it can leave, the others end their process.

Who may speak: both ends derive their key pairs from one shared key (`nodes_key`), and the channel is encrypted and authenticated with them
(CURVE, RFC 26 of ZeroMQ). A peer without the key is never heard. Node 0 listens on the named address only.

Size: both ends of one protocol.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import jax
import msgspec
import zmq
import zmq.auth.thread
import zmq.utils.z85

from octavo_core.errors import ConfigError, EngineDeadError, FrameError
from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0
POLL_S: Final = 0.02
FAREWELL_S: Final = 20.0
FAILED_STATUS: Final = 70
LEFT: Final = "left"
KEY_VARIABLE: Final = "OCTAVO_NODES_KEY"
LEAST_KEY_BYTES: Final = 16
_OWN: Final = frozenset(
    {
        "node_rank",
        "headless",
        "master_addr",
        "nodes_key_file",
        "download_dir",
        "compilation_cache_dir",
        "step_log",
        "request_log",
        "kv_events_config",
    }
    | {"max_num_queued_reqs", "max_num_queued_tokens", "max_queue_s", "scheduling_policy", "tenant_weights", "seed"}
    | {
        "generation_config",
        "skip_tokenizer_init",
        "enable_prefix_caching",
        "prefix_cache",
        "prefix_cache_policy",
        "prefix_cache_quotas",
    }
)
"""Options that one node alone looks at: they may differ from node to node."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """What goes over the channel. `number` counts the commands, from 0; other kinds carry −1."""

    kind: str
    number: int = -1
    data: Any = None


class Hello(msgspec.Struct, frozen=True):
    """A node introduces itself."""

    rank: int
    host: str
    jax: str
    options: dict[str, Any]


@dataclasses.dataclass
class _Node:
    """What node 0 knows of another."""

    rank: int
    address: bytes = b""
    host: str = "?"
    heard_s: float = 0.0
    said: Any = None


def options_of(config: EngineConfig) -> dict[str, Any]:
    """What must be the same on every node."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in _OWN}


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Options in which another node's differ, as a sentence has them."""
    names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    return [f"--{name.replace('_', '-')} ({mine.get(name)!r} here, {theirs.get(name)!r} there)" for name in names]


def nodes_key(config: EngineConfig) -> bytes:
    """What all nodes share and nobody else knows: of `--nodes-key-file`, or of the environment.

    Raises:
        ConfigError: There is none, it cannot be read, or it is too short to be a secret.
    """
    where = config.nodes_key_file
    try:
        key = (os.environ.get(KEY_VARIABLE, "").encode() if where is None else Path(where).expanduser().read_bytes()).strip()
    except OSError as error:
        raise ConfigError(f"--nodes-key-file {where} cannot be read: {error.strerror or error}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"several nodes need a key of at least {LEAST_KEY_BYTES} bytes that all of them share: set {KEY_VARIABLE}, or name its file "
            f"with --nodes-key-file; `openssl rand -hex 32` makes one; got {len(key)} bytes"
        )
    return key


def _key_pair(key: bytes, end: str) -> tuple[bytes, bytes]:
    """The public and the secret key of an end of the channel, in Z85."""
    secret = zmq.utils.z85.encode(hmac.digest(key, f"octavo nodes 1 {end}".encode(), hashlib.sha256))
    return zmq.curve_public(secret), secret


class _OneClient:
    """Lets those in who have the shared key, in the words of `zmq.auth`."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may speak."""
        return hmac.compare_digest(key, self._public)


def address_of(name: str, port: int) -> str:
    """A host's name as the address that a socket is bound to or connects to.

    Raises:
        ConfigError: The name is not known.
    """
    try:
        family, *_, where = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--master-addr {name} is not known: {error.strerror or error}") from None
    return f"[{where[0]}]" if family == socket.AF_INET6 else str(where[0])


class _Channel:
    """A ZeroMQ socket that several threads may send on, and the thread that reads it.

    Attributes:
        error: Why the work of the nodes is over.
    """

    _patience_ms = 0
    """How long reading holds the socket: nobody sends meanwhile."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self._key = config, nodes_key(config)
        self.address = address_of(config.master_addr, config.master_port)
        self.timeout_s = config.node_timeout_s
        self.error: str | None = None
        self._context = zmq.Context()
        self._socket: Any = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="octavo-cluster", daemon=True)

    def _open(self, kind: int, identity: bytes = b"") -> None:
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDTIMEO, int(self.timeout_s * 1000))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)

    def _listen(self) -> None:
        said_s = 0.0
        try:
            while not self._closing.is_set():
                self._read()
                now_s = time.monotonic()
                if now_s - said_s >= BEAT_S:
                    said_s = now_s
                    self._beat()
                self._watch(now_s)
                time.sleep(0.0005 if self._patience_ms else POLL_S)
        except Exception as error:
            self._fail(f"the channel between the nodes has failed: {type(error).__name__}: {error}")

    def _read(self) -> None:
        """Take in all that has come."""
        wait_ms = self._patience_ms
        while True:
            with self._lock:
                parts = self._socket.recv_multipart() if self._socket.poll(wait_ms) else None
            if parts is None:
                return
            self._hear(parts[:-1], msgspec.msgpack.decode(parts[-1], type=Frame))
            wait_ms = 0

    def _hear(self, address: list[bytes], frame: Frame) -> None:
        raise NotImplementedError

    def _beat(self) -> None:
        raise NotImplementedError

    def _watch(self, now_s: float) -> None:
        raise NotImplementedError

    def _fail(self, error: str) -> None:
        self.error = self.error or error

    def _stop(self) -> None:
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=500)


class Leader(_Channel):
    """Node 0's side.

    Raises:
        ConfigError: The port is taken, or a node was started with other options.
        EngineDeadError: A node does not come in time.
    """

    rank = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._nodes = {rank: _Node(rank) for rank in range(1, config.nnodes)}
        self._hellos: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self._number = 0
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Any]] = queue.SimpleQueue()
        self._is_joined = False
        self._open(zmq.ROUTER)
        self._guard = zmq.auth.thread.ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback("*", _OneClient(_key_pair(self._key, "client")[0]))
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(self._key, "server")
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(f"tcp://{self.address}:{config.master_port}")
        except zmq.ZMQError as error:
            self._guard.stop()
            self._context.destroy(linger=0)
            raise ConfigError(
                f"--master-addr {config.master_addr} --master-port {config.master_port} cannot be listened on: {error}; name an address "
                "of this node and a free port"
            ) from None
        threading.Thread(target=self._run, name="octavo-device", daemon=True).start()
        self._thread.start()
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    def _gather(self) -> None:
        """Wait for every node; refuse one that would compute something else."""
        missing, end_s = set(self._nodes), time.monotonic() + self.config.distributed_timeout_seconds
        logger.info("waiting for %d more node(s) on port %d", len(missing), self.config.master_port)
        while missing:
            try:
                hello = self._hellos.get(timeout=max(0.0, min(0.5, end_s - time.monotonic())))
            except queue.Empty:
                if time.monotonic() < end_s:
                    continue
                raise EngineDeadError(
                    f"node(s) of rank {', '.join(map(str, sorted(missing)))} did not come within "
                    f"{self.config.distributed_timeout_seconds} s; start each with --node-rank N --headless, the same key and the "
                    f"--master-addr and --master-port ({self.config.master_port}) of this one"
                ) from None
            other = differing(options_of(self.config), hello.options)
            if hello.jax != jax.__version__:
                other.append(f"JAX ({jax.__version__} here, {hello.jax} there)")
            if other:
                error = f"node {hello.rank} ({hello.host}) was started with another {', '.join(other)}; start all nodes alike"
                self._send(hello.rank, Frame("refused", data=error))
                raise ConfigError(error)
            missing.discard(hello.rank)
        self._is_joined = True
        for rank in self._nodes:
            self._send(rank, Frame("welcome"))

    def least(self, value: int) -> int:
        """The least of all nodes' values, on every node.

        Raises:
            EngineDeadError: A node is gone or says nothing in time.
        """
        end_s = time.monotonic() + self.config.distributed_timeout_seconds
        while any(node.said is None for node in self._nodes.values()):
            self._check()
            if time.monotonic() > end_s:
                silent = [str(node.rank) for node in self._nodes.values() if node.said is None]
                raise EngineDeadError(f"node(s) of rank {', '.join(silent)} are not ready as long after this one as may be waited")
            time.sleep(0.01)
        least = min(value, *(int(node.said) for node in self._nodes.values()))
        for node in self._nodes.values():
            node.said = None
        self.tell("least", least)
        return least

    def tell(self, name: str, data: Any = None) -> None:
        """Send the next command to every node.

        Raises:
            EngineDeadError: A node is gone.
        """
        self._check()
        payload = msgspec.msgpack.encode(Frame(name, self._number, data))
        self._number += 1
        for rank in self._nodes:
            self._send_bytes(rank, payload)

    def run(self, work: Callable[[], Any]) -> Any:
        """What `work` answers. It runs in a thread of its own, which is left behind where a node it waits for is gone.

        Raises:
            EngineDeadError: A node is gone.
        """
        self._check()
        done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._work.put((work, done))
        while True:
            try:
                is_well, value = done.get(timeout=POLL_S)
            except queue.Empty:
                self._check()
                continue
            if is_well:
                return value
            self._settle()
            raise value

    def _settle(self) -> None:
        """A program failed: likely because a node is gone, which the channel may not know yet."""
        end_s = time.monotonic() + min(2.0, self.timeout_s)
        while self.error is None and time.monotonic() < end_s:
            time.sleep(0.02)
        self._check()

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            try:
                answer = True, work()
            except BaseException as error:
                answer = False, error
            done.put(answer)

    def _check(self) -> None:
        if self.error is not None:
            raise EngineDeadError(self.error)

    def _hear(self, address: list[bytes], frame: Frame) -> None:
        if frame.kind == "hello":
            self._greet(address[0], msgspec.convert(frame.data, Hello))
            return
        node = next((node for node in self._nodes.values() if node.address == address[0]), None)
        if node is None:  # of an earlier node 0, at this address and port
            end = Frame("end", data="node 0 has started anew; start this node anew too")
            with contextlib.suppress(zmq.ZMQError), self._lock:
                self._socket.send_multipart([address[0], msgspec.msgpack.encode(end)])
            return
        node.heard_s = time.monotonic()
        if frame.kind in ("have", "bye"):
            node.said = frame.data
        elif frame.kind == "failed":
            self._fail(f"node {node.rank} ({node.host}) has failed: {frame.data}")

    def _greet(self, address: bytes, hello: Hello) -> None:
        node = self._nodes.get(hello.rank)
        if node is None:
            logger.warning("a node of rank %d (%s) is ignored: there are %d nodes", hello.rank, hello.host, self.config.nnodes)
        elif self._is_joined:
            self._fail(f"node {node.rank} ({node.host}) has started anew; all nodes start together")
        else:
            node.address, node.host, node.heard_s = address, hello.host, time.monotonic()
            self._hellos.put(hello)

    def _beat(self) -> None:
        if self._is_joined:
            for rank in self._nodes:
                self._send(rank, Frame("beat"))

    def _watch(self, now_s: float) -> None:
        if not self._is_joined:
            return
        for node in self._nodes.values():
            if node.heard_s and now_s - node.heard_s > self.timeout_s:
                self._fail(f"node {node.rank} ({node.host}) has not been heard of for {now_s - node.heard_s:.0f} s")

    def _send(self, rank: int, frame: Frame) -> None:
        self._send_bytes(rank, msgspec.msgpack.encode(frame))

    def _send_bytes(self, rank: int, payload: bytes) -> None:
        try:
            with self._lock:
                self._socket.send_multipart([self._nodes[rank].address, payload])
        except zmq.ZMQError as error:
            self._fail(f"node {rank} ({self._nodes[rank].host}) cannot be reached: {error}")

    def close(self) -> None:
        """Tell the others that it is over, and let them leave JAX's job first: they would abort if its first process were gone."""
        if self._closing.is_set():
            return
        for rank in self._nodes if self._is_joined else ():
            self._send(rank, Frame("end", data=self.error))
        end_s = time.monotonic() + min(FAREWELL_S, self.timeout_s)
        while self._number and self.error is None and time.monotonic() < end_s:
            if all(node.said == LEFT for node in self._nodes.values()):
                break
            time.sleep(POLL_S)
        self._stop()

    def _stop(self) -> None:
        self._guard.stop()
        super()._stop()


class Follower(_Channel):
    """Another node's side: a process that does nothing else.

    Raises:
        ConfigError: Node 0 was started with other options.
        EngineDeadError: Node 0 does not answer in time.
    """

    _patience_ms = 50

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.rank, self._number = config.node_rank, 0
        self._heard_s = 0.0
        self._frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._open(zmq.DEALER, f"node {self.rank} {os.urandom(8).hex()}".encode())
        self._socket.curve_serverkey = _key_pair(self._key, "server")[0]
        self._socket.curve_publickey, self._socket.curve_secretkey = _key_pair(self._key, "client")
        self._socket.connect(f"tcp://{self.address}:{config.master_port}")
        hello = Hello(self.rank, socket.gethostname(), jax.__version__, options_of(config))
        self._say(Frame("hello", data=msgspec.to_builtins(hello)))
        self._thread.start()
        try:
            welcome = self._frames.get(timeout=config.distributed_timeout_seconds)
        except queue.Empty:
            self._stop()
            raise EngineDeadError(
                f"node 0 did not answer at {config.master_addr}:{config.master_port} within {config.distributed_timeout_seconds} s; is it "
                f"started, with the same key, and is no other node of rank {self.rank} there?"
            ) from None
        if welcome.kind != "welcome":
            self._stop()
            raise ConfigError(f"node 0 says: {welcome.data}")
        self._heard_s = time.monotonic()

    def least(self, value: int) -> int:
        """As `Leader.least`."""
        self._say(Frame("have", data=value))
        frame = self._frames.get()
        if frame.kind != "least":
            raise EngineDeadError(f"node 0 has ended: {frame.data or 'no reason was given'}")
        return int(frame.data)

    def commands(self) -> Any:
        """Every command of node 0, until it ends.

        Raises:
            EngineDeadError: Node 0 ended for a reason.
        """
        while (frame := self._frames.get()).kind != "end":
            yield frame
        if frame.data:
            raise EngineDeadError(f"node 0 has ended: {frame.data}")

    def leave(self) -> None:
        """After the last command: leave JAX's job and say so."""
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        self._say(Frame("bye", data=LEFT))

    def failed(self, error: BaseException) -> None:
        """Tell node 0 why this node ends."""
        self._say(Frame("failed", data=f"{type(error).__name__}: {error}"))
        time.sleep(0.2)

    def _say(self, frame: Frame) -> None:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(frame))

    def _hear(self, address: list[bytes], frame: Frame) -> None:
        self._heard_s = time.monotonic()
        if frame.kind == "beat":
            return
        if frame.number >= 0:
            if frame.number != self._number:
                raise FrameError(f"command {self._number} was due, {frame.number} came")
            self._number += 1
        self._frames.put(frame)

    def _beat(self) -> None:
        self._say(Frame("beat"))

    def _watch(self, now_s: float) -> None:
        if self._heard_s and now_s - self._heard_s > self.timeout_s:
            _end(f"node 0 has not been heard of for {now_s - self._heard_s:.0f} s")

    def _fail(self, error: str) -> None:
        _end(error)

    def close(self) -> None:
        """Leave the channel."""
        self._stop()


def _end(reason: str) -> NoReturn:
    """End a process whose other threads may wait for ever in a collective."""
    logger.error("%s; this node ends", reason)
    sys.stderr.flush()
    os._exit(FAILED_STATUS)


def join(config: EngineConfig) -> Leader | Follower | None:
    """Meet the other nodes and let JAX see all their devices; None where there is one node. Before JAX is used for anything else.

    Raises:
        ConfigError: JAX has been used, or nodes differ.
        EngineDeadError: A node does not come in time.
    """
    if config.nnodes == 1:
        return None
    if jax.distributed.is_initialized():
        raise ConfigError("this process is part of several nodes' work already; start another one for another engine")
    cluster: Leader | Follower = Leader(config) if config.node_rank == 0 else Follower(config)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from whoever ends this process gently
    jax.config.update("jax_enable_recoverability", True)  # a node that is gone ends this one by our error, not by JAX's
    try:
        jax.distributed.initialize(
            f"{cluster.address}:{config.master_port + 1}",
            config.nnodes,
            config.node_rank,
            initialization_timeout=config.distributed_timeout_seconds,
            heartbeat_timeout_seconds=max(10, int(2 * config.node_timeout_s)),
            shutdown_timeout_seconds=10,
            coordinator_bind_address=f"{cluster.address}:{config.master_port + 1}",
        )
    except RuntimeError as error:
        cluster.close()
        raise ConfigError(
            f"the nodes' JAX processes cannot meet at {config.master_addr}:{config.master_port + 1}: {error}"
        ) from None
    return cluster
