"""Tier 2: blocks in host memory, one slab for each memory node; the least recently used going first, or those ARC names.

Who owns what: a slot is free, being written (one writer, no key leads to it), or published under a key. A published slot is only read, and
is not reused while anybody leases it. Every lease is given back by whoever took it; `num_leased` is 0 when nothing is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from octavo_core.tiers import Answer, Capacity, Done
from octavo_offload._src.checksum import copy_and_seal
from octavo_offload._src.counters import Counters
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.numa import memory_nodes
from octavo_offload._src.order import Policy, order_of
from octavo_offload._src.slab import Slabs
from octavo_offload._src.tickets import Tickets

_JOB_BYTES: Final = 8 << 20
"""Most that one job copies: what an urgent one waits for."""


class Lease(NamedTuple):
    """A slot that will not change until it is given back."""

    key: bytes
    slot: int
    seal: int


class HostTier:
    """A `Tier` in slabs.

    Args:
        total_bytes: Of all slabs; at least one block.
        block_bytes: Of each block.
        jobs: Threads that copy.
        lock: Lock the slabs in memory.
        policy: Which block goes first.
        nodes: Memory nodes to use; None: all this process may.
        on_evict: Hears of keys that are gone.
    """

    def __init__(
        self,
        total_bytes: int,
        block_bytes: int,
        jobs: Jobs,
        *,
        lock: bool = False,
        policy: Policy = "lru",
        nodes: Sequence[int] | None = None,
        on_evict: Callable[[bytes], None] | None = None,
    ) -> None:
        self.name, self.block_bytes = "host", block_bytes
        self.slab = Slabs(
            max(1, total_bytes // max(block_bytes, 1)), block_bytes, lock=lock, nodes=memory_nodes() if nodes is None else nodes
        )
        self.count = Counters()
        self._jobs, self._on_evict = jobs, on_evict
        self._at_once = max(1, _JOB_BYTES // max(block_bytes, 1))
        self._lock = threading.Lock()
        self._index = order_of(policy, self.slab.num_slots)
        self._free = deque(range(self.slab.num_slots))
        self._leases = [0] * self.slab.num_slots
        self._seals = [0] * self.slab.num_slots
        self._writing: set[bytes] = set()
        self._doomed: set[int] = set()
        self._tickets = Tickets()

    # Slots ------------------------------------------------------------------------------------------------------------

    def view(self, slot: int) -> memoryview:
        """The bytes of a block in its slot."""
        return self.slab.slot(slot)[: self.block_bytes]

    def reserve(self, key: bytes | None) -> int | None:
        """A slot to write a block into, evicting the least recently used one that nobody leases; without a key it is not to be published.

        None: every slot is leased, or the block is there already or being written.
        """
        with self._lock:
            if key is not None and (self._index.get(key) is not None or key in self._writing):
                return None
            slot = self._take_slot(key)
            if slot is not None and key is not None:
                self._writing.add(key)
            return slot

    def _take_slot(self, wanted: bytes | None) -> int | None:
        if self._free:
            return self._free.popleft()
        victim = self._index.evict(wanted, lambda slot: not self._leases[slot])
        if victim is None:
            return None
        self.count.evicted += 1
        if self._on_evict is not None:
            self._on_evict(victim[0])
        return victim[1]

    def publish(self, key: bytes, slot: int, seal: int, *, lease: bool = False) -> Lease:
        """Let the block be found from now on; with `lease`, leased once to the caller."""
        with self._lock:
            self._writing.discard(key)
            self._index.add(key, slot)
            self._seals[slot] = seal
            self._leases[slot] += lease
            self.count.stored += 1
            return Lease(key, slot, seal)

    def abandon(self, key: bytes | None, slot: int) -> None:
        """Give back a slot that was reserved and not published."""
        with self._lock:
            if key is not None:
                self._writing.discard(key)
            self._free.append(slot)

    def lease(self, key: bytes) -> Lease | None:
        """Keep a block from being evicted while it is read; None: it is not here."""
        with self._lock:
            slot = self._index.get(key)
            if slot is None:
                return None
            self._index.touch(key)
            self._leases[slot] += 1
            return Lease(key, slot, self._seals[slot])

    def release(self, lease: Lease) -> None:
        """Give a lease back."""
        with self._lock:
            self._leases[lease.slot] -= 1
            if not self._leases[lease.slot] and lease.slot in self._doomed:
                self._doomed.discard(lease.slot)
                self._free.append(lease.slot)

    def read(self, lease: Lease, targets: Callable[[memoryview], Iterable[tuple[Any, Any]]]) -> Answer:
        """Copy a leased block to the first of each pair that `targets` makes of it, and verify the copies. A damaged one is forgotten."""
        start_s = time.perf_counter()
        good = copy_and_seal(lease.key, targets(self.view(lease.slot))) == lease.seal
        taken_s = time.perf_counter() - start_s
        with self._lock:
            self.count.verified += good
            self.count.corrupt += not good
            self.count.hits += good
            self.count.misses += not good
            self.count.read_bytes += self.block_bytes * good
            self.count.read_s += taken_s
        if not good:
            self.forget(lease.key)
        return Answer(good)

    def write(
        self, key: bytes, slot: int, sources: Callable[[memoryview], Iterable[tuple[Any, Any]]], *, lease: bool = False
    ) -> Lease:
        """Copy to a reserved slot the second of each pair that `sources` makes of it, seal the copy and publish it."""
        start_s = time.perf_counter()
        seal = copy_and_seal(key, sources(self.view(slot)))
        taken_s = time.perf_counter() - start_s
        with self._lock:
            self.count.written_bytes += self.block_bytes
            self.count.write_s += taken_s
        return self.publish(key, slot, seal, lease=lease)

    def forget(self, key: bytes) -> None:
        """Let a block no longer be found; its slot is free once nobody leases it."""
        with self._lock:
            slot = self._index.remove(key)
            if slot is not None and self._leases[slot]:
                self._doomed.add(slot)
            elif slot is not None:
                self._free.append(slot)

    def has(self, key: bytes) -> bool:
        """Whether a block can be found, or will be soon."""
        with self._lock:
            return self._index.get(key) is not None or key in self._writing

    def note_dropped(self, count: int) -> None:
        """Blocks that were handed over and not stored."""
        with self._lock:
            self.count.dropped += count

    @property
    def num_leased(self) -> int:
        """Leases that are out."""
        with self._lock:
            return sum(self._leases)

    # The seam ---------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `octavo_core.tiers.Tier`."""
        return self._tickets.start(
            self._jobs, [partial(self._put, k, b) for k, b in zip(keys, blocks, strict=True)], most=self._at_once
        )

    def _put(self, key: bytes, block: memoryview) -> Answer:
        lease = self.lease(key)
        if lease is not None:
            self.release(lease)
            return Answer.HIT_VERIFIED
        slot = self.reserve(key) if len(block) == self.block_bytes else None
        if slot is None:
            self.note_dropped(1)
            return Answer.MISS

        self.write(key, slot, lambda view: [(view, block)])
        return Answer.HIT_VERIFIED

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """See `octavo_core.tiers.Tier`."""
        jobs = [partial(self._get, k, b) for k, b in zip(keys, into, strict=True)]
        return self._tickets.start(self._jobs, jobs, most=self._at_once, urgent=True)

    def _get(self, key: bytes, into: memoryview) -> Answer:
        lease = self.lease(key) if len(into) == self.block_bytes else None
        if lease is None:
            with self._lock:
                self.count.misses += 1
            return Answer.MISS

        try:
            return self.read(lease, lambda view: [(into, view)])
        finally:
            self.release(lease)

    def poll(self) -> list[Done]:
        """See `octavo_core.tiers.Tier`."""
        return self._tickets.poll()

    def find(self, keys: Sequence[bytes]) -> int:
        """See `octavo_core.tiers.Tier`."""
        with self._lock:
            return next((i for i, key in enumerate(keys) if self._index.get(key) is None), len(keys))

    def capacity(self) -> Capacity:
        """See `octavo_core.tiers.Tier`."""
        with self._lock:
            total, held = self.slab.num_slots, len(self._index)
        return Capacity(total * self.slab.slot_bytes, held * self.slab.slot_bytes, held)
