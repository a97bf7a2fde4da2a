"""How a store and its members prove to each other that they have the same key, without sending it, and sign what they say.

Each sends a nonce and proves that it can hash both with the key; from the same the session's own key follows, with which every message of
the control plane is signed, in both directions, over its method and its number: what is recorded cannot be played again. With mutual
TLS certificates prove who speaks and the key may be empty. Blocks themselves are not signed: their checksums are, which find damage.
"""

from __future__ import annotations

import hmac
import os
import struct
import threading
import time
from typing import Final

from octavo_core.errors import ConfigError

NONCE_BYTES: Final = 32
LEAST_KEY_BYTES: Final = 16
_FRAME: Final = struct.Struct("<QQI16s")
_FRESH_S: Final = 30.0
_WINDOW: Final = 4096


class Refused(ConnectionError):
    """The other side does not have the key, or does not speak for who it says."""


def read_key(path: str) -> bytes:
    """A key from a file, without white space around it.

    Raises:
        ConfigError: There is none, or it is short.
    """
    try:
        with open(path, "rb") as file:
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"the key of the KV store cannot be read from {path}: {error.strerror}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{path} has a key of {len(key)} bytes, at least {LEAST_KEY_BYTES} are wanted; make one with: openssl rand -hex 32"
        )
    return key


def proof(key: bytes, role: str, hello_nonce: bytes, nonce: bytes, context: bytes = b"") -> bytes:
    """What only who has the key can say about two nonces."""
    return hmac.digest(key, b"|".join((b"octavo-kv-1", role.encode(), hello_nonce, nonce, context)), "sha256")


def expect(given: bytes, wanted: bytes, who: str) -> None:
    """Compare in constant time.

    Raises:
        Refused: They differ.
    """
    if not hmac.compare_digest(given, wanted):
        raise Refused(f"{who} does not have the same key")


class Nonces:
    """The store's nonces: none is remembered, each carries its time and is good once its hash is."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def new(self, hello_nonce: bytes) -> bytes:
        """One for a member's nonce."""
        now = struct.pack("<d", time.monotonic())
        return now + self._seal(now, hello_nonce)

    def _seal(self, now: bytes, hello_nonce: bytes) -> bytes:
        return hmac.digest(self._secret, now + hello_nonce, "sha256")[: NONCE_BYTES - len(now)]

    def check(self, nonce: bytes, hello_nonce: bytes) -> None:
        """Whether it is ours and young.

        Raises:
            Refused: It is not.
        """
        expect(nonce[8:], self._seal(nonce[:8], hello_nonce), "a member without a challenge")
        if time.monotonic() - struct.unpack("<d", nonce[:8])[0] > _FRESH_S:
            raise Refused("the challenge has become old; join again")


class Session:
    """Signs and checks frames of one member.

    Args:
        key: The shared one.
        hello_nonce, nonce: Of both sides.
        member: As the store numbers it.
    """

    def __init__(self, key: bytes, hello_nonce: bytes, nonce: bytes, member: int) -> None:
        self.member = member
        self._key = proof(key, "session", hello_nonce, nonce)
        self._lock = threading.Lock()
        self._next = self._highest = 0
        self._seen: set[int] = set()

    def _sign(self, way: str, method: str, number: int, body: bytes) -> bytes:
        words = b"|".join((way.encode(), method.encode(), struct.pack("<QQ", self.member, number), body))
        return hmac.digest(self._key, words, "sha256")[:16]

    def seal(self, method: str, body: bytes) -> bytes:
        """A frame of a member to the store."""
        with self._lock:
            self._next += 1
            number = self._next
        return _FRAME.pack(self.member, number, len(body), self._sign("ask", method, number, body)) + body

    def answer(self, method: str, number: int, body: bytes) -> bytes:
        """The store's frame for the frame with this number."""
        return _FRAME.pack(self.member, number, len(body), self._sign("answer", method, number, body)) + body

    def open(self, method: str, frame: bytes) -> tuple[int, bytes, memoryview]:
        """Number, body and what follows it, in the store. Each number is taken once.

        Raises:
            Refused: It was not signed by the member, or came before.
        """
        number, body, rest = self._check("ask", method, frame)
        with self._lock:
            if number in self._seen or number + _WINDOW <= self._highest:
                raise Refused("a message came twice")
            self._seen.add(number)
            if number > self._highest:
                self._highest = number
                if len(self._seen) > 2 * _WINDOW:
                    self._seen = {n for n in self._seen if n + _WINDOW > number}
        return number, body, rest

    def open_answer(self, method: str, frame: bytes, asked: bytes) -> bytes:
        """The body of the store's answer to a frame.

        Raises:
            Refused: It was not signed by the store, or answers something else.
        """
        number, body, _ = self._check("answer", method, frame)
        if number != _FRAME.unpack_from(asked)[1]:
            raise Refused("the answer belongs to another message")
        return body

    def _check(self, way: str, method: str, frame: bytes) -> tuple[int, bytes, memoryview]:
        if len(frame) < _FRAME.size:
            raise Refused("a message without a signature")
        member, number, length, mac = _FRAME.unpack_from(frame)
        body = frame[_FRAME.size : _FRAME.size + length]
        if member != self.member or not hmac.compare_digest(mac, self._sign(way, method, number, body)):
            raise Refused("a message was not signed by who it says")
        return number, body, memoryview(frame)[_FRAME.size + length :]


def member_of(frame: bytes) -> int:
    """Which session a frame says it belongs to."""
    return int(_FRAME.unpack_from(frame)[0]) if len(frame) >= _FRAME.size else 0
