"""What members and a store say to each other, and an agent and its engine. Knows no sockets.

Bodies are msgpack. Bytes of blocks travel beside them, not in them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from octavo_offload._src.remote.tls import Tls

VERSION: Final = 1
SERVICE: Final = "octavo.KvStore1"
PREFIX_BYTES: Final = 8
"""Of a key, in the directory: enough to hope for a block, too few to ask for it."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A member's first word."""

    version: int
    nonce: bytes


class Challenge(msgspec.Struct, array_like=True, frozen=True):
    """The store's answer; `proof` shows that it has the key."""

    nonce: bytes
    proof: bytes
    incarnation: bytes


class Join(msgspec.Struct, array_like=True, frozen=True):
    """`proof` shows that the member has the key. `transports`: what it can read with, the best first."""

    hello_nonce: bytes
    nonce: bytes
    proof: bytes
    identity: bytes
    block_bytes: int
    transports: list[str]


class Joined(msgspec.Struct, array_like=True, frozen=True):
    """What a member may do. `window_bytes` may be leased at a time, for `lease_s` each; `metadata` is what `transport` has to know."""

    member: int
    incarnation: bytes
    window_bytes: int
    lease_s: float
    transport: str
    metadata: bytes = b""


class Beat(msgspec.Struct, array_like=True, frozen=True):
    """A member lives, and knows the directory up to `cursor`."""

    cursor: int


class Beaten(msgspec.Struct, array_like=True, frozen=True):
    """What has changed; with `reset`, all there is. `keys`: prefixes, one after the other."""

    cursor: int
    reset: bool
    added: bytes
    removed: bytes
    num_blocks: int
    used_bytes: int
    total_bytes: int


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """Lease these blocks."""

    keys: list[bytes]


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """A leased block: where it is in the store's memory, which write it comes from, what it hashes to."""

    address: int
    generation: int
    seal: int


class Leased(msgspec.Struct, array_like=True, frozen=True):
    """None: not there, or more than may be leased now."""

    lease: int
    entries: list[Entry | None]


class Give(msgspec.Struct, array_like=True, frozen=True):
    """Send the blocks of a lease, or (`Release`) end it."""

    lease: int


class Put(msgspec.Struct, array_like=True, frozen=True):
    """Keep a block, whose bytes follow."""

    key: bytes
    seal: int


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """Whether a block can be found now."""

    is_kept: bool


class Nothing(msgspec.Struct, array_like=True, frozen=True):
    """Done."""


# Between an agent and its engine ------------------------------------------------------------------------------------------


class Start(msgspec.Struct, array_like=True, tag="start", frozen=True):
    """Everything an agent must know. Goes through its pipe: a key must not be seen in a list of processes."""

    target: str
    identity: bytes
    block_bytes: int
    slot_bytes: int
    num_slots: int
    transports: list[str]
    deadline_s: float
    secret: bytes = b""
    tls: Tls | None = None
    tls_name: str = ""


class Work(msgspec.Struct, array_like=True, tag="work", frozen=True):
    """Read a block into a slot, or with `seal` not None keep the one that is there."""

    ticket: int
    key: bytes
    slot: int
    seal: int | None = None


class Result(msgspec.Struct, array_like=True, tag="result", frozen=True):
    """The end of a `Work`: nobody writes into the slot any more. `seal`: what the store says its bytes hash to."""

    ticket: int
    is_good: bool
    seal: int = 0


class News(msgspec.Struct, array_like=True, tag="news", frozen=True):
    """What the directory has become, and how the store stands."""

    beat: Beaten


class Peer(msgspec.Struct, array_like=True, tag="peer", frozen=True):
    """The store was joined (`transport` says how), lost, or (`is_final`) has refused for good."""

    is_joined: bool
    told: str
    is_final: bool = False


ToAgent = Start | Work
FromAgent = Result | News | Peer
