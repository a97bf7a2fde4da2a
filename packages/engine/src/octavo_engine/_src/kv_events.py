"""Publishes KV events over ZeroMQ: a PUB socket for what happens, a ROUTER socket for what a follower missed.

Who owns what: the step loop hands a change over and never waits; a thread of its own turns changes into batches, sends
and keeps them. The queue between them is bounded: what finds it full is dropped and counted, and its number is left out, so
followers see the gap, and the next batch tells them to start over. Touches the network.

Frames of a message: topic, number of the batch (8 bytes, big-endian), msgpack. A replay request is an empty frame and the first number wanted;
its answers are an empty frame, number and msgpack each, and at the end number −1 with nothing.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence as Many
from typing import Any, Final

import numpy as np
import zmq

from octavo_core.errors import ConfigError
from octavo_core.plan import CacheEvents
from octavo_core.specs import KVGroupSpec
from octavo_engine._src.kv_events_config import FLAG, KVEventsConfig
from octavo_engine._src.kv_events_keys import Change, KeyBook, Stored
from octavo_engine._src.kv_events_wire import encode
from octavo_engine._src.sequence import Sequence

logger = logging.getLogger(__name__)

END: Final = (-1).to_bytes(8, "big", signed=True)
"""Number of the frame after the last one replayed."""
_REPLAY_EVERY_S: Final = 0.02
"""How long a replay request may wait for the thread to look."""
_CLOSE_S: Final = 5.0
_LINGER_MS: Final = 500
_BINDS: Final = ("*", "::", "ipc://")


class KVEvents:
    """One engine's events. `begin` starts the thread; `take` and `close` are called by the engine.

    Args:
        config: Where and how.

    Raises:
        ConfigError: A socket cannot be opened.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self.num_dropped = 0
        self._config = config
        self._num_lost = 0
        self._number, self._num_skipped = 0, 0
        self._changes: queue.Queue[Change | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._context: Any = zmq.Context()
        try:
            self._pub = self._socket(zmq.PUB, config.hwm)
            self.endpoint, self.binds = self._attach(self._pub, config.endpoint)
            self._router, self.replay_endpoint = None, None
            if config.replay_endpoint is not None:
                self._router = self._socket(zmq.ROUTER, config.buffer_steps + 1)
                self.replay_endpoint, _ = self._attach(self._router, config.replay_endpoint, must_bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _socket(self, kind: int, most: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, most)
        return socket

    def _attach(self, socket: Any, endpoint: str, *, must_bind: bool = False) -> tuple[str, bool]:
        """Bind or connect; answers where, and whether it is bound."""
        binds = must_bind or any(mark in endpoint for mark in _BINDS)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{FLAG}: cannot {'bind' if binds else 'connect to'} '{endpoint}': {error}; choose another endpoint"
            ) from None
        return (socket.getsockopt_string(zmq.LAST_ENDPOINT) if binds else endpoint), binds

    @property
    def told(self) -> tuple[str, str]:
        """For the start-up table: where, and how."""
        verb = "bound" if self.binds else "connected"
        replay = f", replay on {self.replay_endpoint}" if self.replay_endpoint else ", no replay"
        return self.endpoint, f"{FLAG}: {verb}{replay}"

    def begin(self, groups: Many[KVGroupSpec], block_size: int) -> None:
        """Start publishing for a cache of these groups."""
        book = KeyBook(groups, block_size, as_ints=self._config.block_hashes == "int")
        self._thread = threading.Thread(target=self._run, args=(book,), name="octavo-kv-events", daemon=True)
        self._thread.start()

    def take(self, events: CacheEvents, sequences: Many[Sequence | None]) -> None:
        """Hand over what a step changed; never waits.

        Args:
            events: Of the step's plan, as NumPy arrays.
            sequences: Whose index of the cache's state is whose, in that step.
        """
        is_incomplete = bool(events.overflow)
        stored, removed = _listed(events.stored), _listed(events.removed)
        if not (stored or removed or is_incomplete):
            return
        known = [
            Stored((group, block, generation), sequence, column)
            for group, block, generation, index, column in stored
            if 0 <= index < len(sequences) and (sequence := sequences[index]) is not None
        ]
        change = Change(time.time(), known, [(g, b, n) for g, b, n in removed], is_incomplete, self._num_lost)
        try:
            self._changes.put_nowait(change)
            self._num_lost = 0
        except queue.Full:
            self._num_lost += 1
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("%s: %d batches wait to be published, new ones are dropped", FLAG, self._config.max_queue_size)

    def close(self) -> None:
        """Publish what is waiting, for a few seconds at most, and close the sockets."""
        self._closing = True
        if self._thread is None:
            self._context.destroy(linger=0)
            return
        try:
            self._changes.put_nowait(None)
        except queue.Full:
            logger.debug("closing with a full queue")
        self._thread.join(_CLOSE_S)

    # The publishing thread --------------------------------------------------------------------------------------------

    def _run(self, book: KeyBook) -> None:
        wait_s = None if self._router is None else _REPLAY_EVERY_S
        while not (self._closing and self._changes.empty()):
            self._serve_replays()
            try:
                change = self._changes.get(timeout=wait_s)
            except queue.Empty:
                continue
            if change is not None:
                self._publish(book, change)
        self._context.destroy(linger=_LINGER_MS)

    def _publish(self, book: KeyBook, change: Change) -> None:
        """A change that cannot be told leaves a gap in the numbers; serving goes on."""
        lost, self._num_skipped = change.num_lost + self._num_skipped, 0
        self._number += lost
        try:
            events = book.translate(change, is_after_loss=lost > 0)
            if events:
                self._send(encode(change.time_s, events, as_maps=self._config.encoding == "map"))
        except Exception:
            self._num_skipped = 1
            logger.exception("%s: batch %d was not published", FLAG, self._number)

    def _send(self, payload: bytes) -> None:
        message = self._number.to_bytes(8, "big"), payload
        self._pub.send_multipart((self._config.topic.encode(), *message), zmq.DONTWAIT)
        self._sent.append(message)
        self._number += 1

    def _serve_replays(self) -> None:
        while self._router is not None and self._router.poll(0):
            try:
                self._replay(self._router, self._router.recv_multipart(zmq.DONTWAIT))
            except zmq.ZMQError:
                logger.exception("%s: a replay failed", FLAG)

    def _replay(self, router: Any, request: list[bytes]) -> None:
        """Every batch still kept from the number asked for on, and the end; only the end where the request is none."""
        client, *rest = request
        if len(rest) == 2 and len(rest[1]) == 8:
            for message in self._sent:
                if message[0] >= rest[1]:
                    router.send_multipart((client, b"", *message), zmq.DONTWAIT)
        router.send_multipart((client, b"", END, b""), zmq.DONTWAIT)


def _listed(rows: Any) -> list[list[int]]:
    """The rows that are not padding."""
    rows = np.asarray(rows)
    return rows[rows[:, 0] >= 0].tolist()
