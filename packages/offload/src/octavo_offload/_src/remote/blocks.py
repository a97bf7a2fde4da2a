"""The blocks of a store: one slab in segments, each segment cut into slots of one size, the least recently used going first.

Who owns what: a slot is free, being written (one writer, no key leads to it), or published. A published slot that anybody leases is neither
evicted nor rewritten. A lease ends when it is released, or some time after it ran out: a one-sided read that is late cannot be called
back, so until it must have ended its slot is in quarantine. Blocks of different identities (model, weights, types, sizes) lie side
by side and never find each other; which segment has slots of which size follows what is stored.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from octavo_offload._src.counters import Counters
from octavo_offload._src.remote.messages import PREFIX_BYTES, Beaten, Entry, Leased
from octavo_offload._src.slab import Slab, aligned

_LOG_LENGTH: Final = 1 << 16
"""Changes an identity's directory remembers; who is further behind is told everything."""


@dataclass
class _Block:
    identity: bytes
    key: bytes
    address: int
    size: int
    seal: int
    generation: int
    stamp: int
    leases: int = 0


@dataclass
class _Lease:
    member: int
    blocks: list[_Block]
    num_bytes: int
    until_s: float


@dataclass
class _Directory:
    """What one identity has, and how it came to that."""

    blocks: dict[bytes, _Block] = field(default_factory=dict)
    log: deque[tuple[int, bool, bytes]] = field(default_factory=lambda: deque(maxlen=_LOG_LENGTH))
    cursor: int = 1
    forgotten: int = 0

    def note(self, is_there: bool, key: bytes) -> None:
        self.cursor += 1
        if len(self.log) == _LOG_LENGTH:
            self.forgotten = self.log[0][0]
        self.log.append((self.cursor, is_there, key[:PREFIX_BYTES]))


class Blocks:
    """Memory with keyed blocks in it. Safe for threads.

    Size: one set of books, under one lock.

    Args:
        total_bytes: Of memory.
        window_bytes: What all leases together may hold; None: half of the memory.
        member_bytes: What the leases of one member may hold.
        lease_s: How long a lease is good.
        quarantine_s: How long after that its slots are left alone.
        lock: Keep it from being swapped out.
        clock: Seconds.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        window_bytes: int | None = None,
        member_bytes: int = 64 << 20,
        lease_s: float = 10.0,
        quarantine_s: float = 30.0,
        lock: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.segment_bytes = max(4096, min(64 << 20, total_bytes // 8) // 4096 * 4096)
        self.slab = Slab(max(1, total_bytes // self.segment_bytes), self.segment_bytes, lock=lock)
        self.total_bytes = self.slab.num_slots * self.segment_bytes
        self.count = Counters()
        self.num_expired = 0
        self.lease_s, self.member_bytes = lease_s, member_bytes
        self._window_bytes = self.total_bytes // 2 if window_bytes is None else window_bytes
        self._quarantine_s, self._clock = quarantine_s, clock
        self._lock = threading.Lock()
        self._directories: dict[bytes, _Directory] = {}
        self._order: dict[int, OrderedDict[int, _Block]] = {}
        self._free: dict[int, list[int]] = {}
        self._sizes = [0] * self.slab.num_slots
        self._spare = deque(range(self.slab.num_slots))
        self._writing: dict[int, tuple[bytes, bytes]] = {}
        self._leases: dict[int, _Lease] = {}
        self._leased_bytes = self._stamp = self._next_lease = 0

    def view(self, address: int, size: int) -> memoryview:
        """The bytes of a block."""
        return self.slab.whole[address : address + size]

    # Room -------------------------------------------------------------------------------------------------------------

    def reserve(self, identity: bytes, key: bytes, size: int) -> int | None:
        """Where to write a block; None: it is there or being written, or there is no room that nobody uses."""
        with self._lock:
            known = self._directories.get(identity)
            if (known and key in known.blocks) or (identity, key) in self._writing.values():
                return None
            address = self._take(aligned(size)) if 0 < size <= self.segment_bytes else None
            if address is not None:
                self._writing[address] = identity, key
            return address

    def _take(self, size: int) -> int | None:
        """A slot: a free one, one of a new segment, or that of the oldest block, whatever its size."""
        free = self._free.setdefault(size, [])
        if not free and not self._spare:
            self._make_room(size)
        if not free and self._spare:
            self._cut(self._spare.popleft(), size)
        return free.pop() if free else None

    def _cut(self, segment: int, size: int) -> None:
        self._sizes[segment] = size
        start = segment * self.segment_bytes
        self._free[size] += [start + i * size for i in range(self.segment_bytes // size)]

    def _make_room(self, size: int) -> None:
        oldest = {s: next((b for b in order.values() if not b.leases), None) for s, order in self._order.items()}
        victims = sorted((b.stamp, s) for s, b in oldest.items() if b is not None)
        for _, other in victims:
            victim = oldest[other]
            if victim is None:
                continue
            if other == size:
                self._drop(victim)
                self.count.evicted += 1
                return
            if self._clear(victim.address // self.segment_bytes, other):
                return

    def _clear(self, segment: int, size: int) -> bool:
        """Empty a segment of slots of another size; False: something in it is in use."""
        start, end = segment * self.segment_bytes, (segment + 1) * self.segment_bytes
        inside = [b for a, b in self._order[size].items() if start <= a < end]
        if any(b.leases for b in inside) or any(start <= a < end for a in self._writing):
            return False
        for block in inside:
            self._drop(block)
        self.count.evicted += len(inside)
        self._free[size] = [a for a in self._free[size] if not start <= a < end]
        self._sizes[segment] = 0
        self._spare.append(segment)
        return True

    def _drop(self, block: _Block) -> None:
        directory = self._directories[block.identity]
        del directory.blocks[block.key]
        directory.note(False, block.key)
        size = aligned(block.size)
        del self._order[size][block.address]
        self._free[size].append(block.address)

    # Writing ----------------------------------------------------------------------------------------------------------

    def publish(self, address: int, size: int, seal: int) -> None:
        """Let a written block be found from now on."""
        with self._lock:
            identity, key = self._writing.pop(address)
            self._stamp += 1
            block = _Block(identity, key, address, size, seal, self._stamp, self._stamp)
            directory = self._directories.setdefault(identity, _Directory())
            directory.blocks[key] = block
            directory.note(True, key)
            self._order.setdefault(aligned(size), OrderedDict())[address] = block
            self.count.stored += 1
            self.count.written_bytes += size

    def abandon(self, address: int, size: int) -> None:
        """Give a slot back that was reserved and not published. Nobody may write into it any more."""
        with self._lock:
            del self._writing[address]
            self._free[aligned(size)].append(address)
            self.count.dropped += 1

    def has(self, identity: bytes, key: bytes) -> bool:
        """Whether a block can be found."""
        with self._lock:
            directory = self._directories.get(identity)
            return directory is not None and key in directory.blocks

    # Leases -----------------------------------------------------------------------------------------------------------

    def lease(self, member: int, identity: bytes, keys: Sequence[bytes]) -> Leased:
        """Keep blocks where they are for a while. What is not there, or would be more than may be leased, is None."""
        now_s = self._clock()
        with self._lock:
            self._end_old(now_s)
            mine = sum(lease.num_bytes for lease in self._leases.values() if lease.member == member)
            directory = self._directories.get(identity, _Directory())
            entries: list[Entry | None] = []
            blocks: list[_Block] = []
            num_bytes = 0
            for key in keys:
                block = directory.blocks.get(key)
                size = aligned(block.size) if block else 0
                fits = mine + num_bytes + size <= self.member_bytes and self._leased_bytes + num_bytes + size <= self._window_bytes
                if block is None or not fits:
                    entries.append(None)
                    self.count.misses += 1
                    continue
                num_bytes += size
                self._touch(block)
                block.leases += 1
                blocks.append(block)
                entries.append(Entry(block.address, block.generation, block.seal))
            self._next_lease += 1
            self._leases[self._next_lease] = _Lease(member, blocks, num_bytes, now_s + self.lease_s)
            self._leased_bytes += num_bytes
            self.count.hits += len(blocks)
            return Leased(self._next_lease, entries)

    def _touch(self, block: _Block) -> None:
        self._stamp += 1
        block.stamp = self._stamp
        self._order[aligned(block.size)].move_to_end(block.address)

    def places(self, member: int, lease: int) -> list[tuple[int, int]]:
        """Address and size of what a member leased and has not given back."""
        with self._lock:
            known = self._leases.get(lease)
            return [(b.address, b.size) for b in known.blocks] if known is not None and known.member == member else []

    def release(self, member: int, lease: int) -> None:
        """End a lease; one that has ended is none."""
        with self._lock:
            known = self._leases.get(lease)
            if known is not None and known.member == member:
                self._end(lease)

    def release_member(self, member: int) -> None:
        """A member is gone: its leases end when the last read it may have begun must have ended."""
        with self._lock:
            for lease in self._leases.values():
                if lease.member == member:
                    lease.until_s = min(lease.until_s, self._clock())

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number)
        self._leased_bytes -= lease.num_bytes
        for block in lease.blocks:
            block.leases -= 1

    def _end_old(self, now_s: float) -> None:
        for number in [n for n, lease in self._leases.items() if now_s > lease.until_s + self._quarantine_s]:
            self._end(number)
            self.num_expired += 1

    def is_leased(self) -> bool:
        """Whether any lease is out. Takes no lock."""
        return self._leased_bytes > 0

    @property
    def num_leased(self) -> int:
        """Leases of blocks that are out or in quarantine."""
        with self._lock:
            self._end_old(self._clock())
            return sum(len(lease.blocks) for lease in self._leases.values())

    # The directory ----------------------------------------------------------------------------------------------------

    def changes(self, identity: bytes, cursor: int) -> Beaten:
        """What an identity's directory has become since `cursor`."""
        with self._lock:
            directory = self._directories.setdefault(identity, _Directory())
            reset = not directory.forgotten <= cursor <= directory.cursor or cursor == 0
            if reset:
                added, removed = b"".join(key[:PREFIX_BYTES] for key in directory.blocks), b""
            else:
                behind = directory.cursor - cursor
                last: dict[bytes, bool] = {}
                for i in range(len(directory.log) - behind, len(directory.log)):
                    last[directory.log[i][2]] = directory.log[i][1]
                added = b"".join(prefix for prefix, there in last.items() if there)
                removed = b"".join(prefix for prefix, there in last.items() if not there)
            used = sum(map(len, self._order.values())), sum(size * len(order) for size, order in self._order.items())
            return Beaten(directory.cursor, reset, added, removed, len(directory.blocks), used[1], self.total_bytes)
