"""The tiers together: blocks go down as pieces of gathered arrays and come up as pieces to be scattered.

Who owns what in each phase. *Down*: the caller hands over arrays that nobody writes any more; a worker waits for them, copies each block
into a reserved slot of host memory, seals and publishes it, and hands the slot, leased, to each lower tier. *Up*: host slots are leased
and blocks of lower tiers read into slots; when all there will be is there, a worker verifies each once more and copies it into buffers that belong
to the caller from then on; then every lease goes back. So no consumer ever sees memory that is used again: on a CPU `jax.device_put` of a
slab would alias it.

Nothing here raises for what storage does, and nothing but `close` waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from octavo_core.tiers import Answer
from octavo_core.wire import TierStats
from octavo_offload._src.disk import DiskTier
from octavo_offload._src.host import HostTier, Lease
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.lower import Lane, LowerTier
from octavo_offload._src.policy import Chooser, Meter

_LOG = logging.getLogger(__name__)

MAX_WAITING: Final = 16
"""Batches that may wait to be copied down; those beyond are dropped."""


class Fetch:
    """Leading blocks of a prompt on their way up. `is_done`, then `take`; or `cancel`. Made by `TieredStore.fetch`."""

    def __init__(self, store: TieredStore, keys: Sequence[bytes], places: Sequence[int], wait_s: float) -> None:
        self._store, self.keys, self._places = store, list(keys), places
        self._lock = threading.Lock()
        self._leases: list[Lease | None] = [None] * len(keys)
        self._loose: list[int] = []
        self._reads = 0
        self._num_asked, self._num_read = ([0] * len(store.lower) for _ in range(2))
        self._finishing = self._cancelled = False
        self._done = threading.Event()
        self._pieces: list[np.ndarray] = []
        self.num_blocks = 0
        self._started_s = time.monotonic()
        self.deadline_s = self._started_s + wait_s

    @property
    def is_done(self) -> bool:
        """Nothing more will come. Past its deadline a fetch stops waiting for lower tiers and ends with what is there."""
        if not self._finishing and time.monotonic() > self.deadline_s:
            self._finish()
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for `is_done`."""
        return self._done.wait(timeout_s)

    def take(self) -> list[np.ndarray]:
        """Of each piece the bytes of the first `num_blocks` blocks, verified: uint8 `[blocks, piece_bytes]`. The caller's own."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def cancel(self) -> None:
        """Nobody wants it any more. What it leased goes back when its reads have ended."""
        with self._lock:
            self._cancelled = True
        self._finish()

    # In the store's threads -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Lease what is in host memory, begin to read the rest. In the caller's thread."""
        host = self._store.host
        with self._lock:
            self._reads = 1
        for i, key in enumerate(self.keys):
            self._leases[i] = host.lease(key)
            if self._leases[i] is None and not self._read_from(self._places[i] - 1, i, key):
                self.keys = self.keys[:i]
                break
        self._one_read_less()

    def _read_from(self, tier: int, index: int, key: bytes) -> bool:
        if tier < 0:
            return False
        slot = self._store.host.reserve(key)
        name: bytes | None = key
        if slot is None:  # being written by another, or no room that is not leased
            slot, name = self._store.host.reserve(None), None
        if slot is None:
            return False
        with self._lock:
            self._reads += 1
            self._num_asked[tier] += 1
        self._store.note_pending(tier, 1)
        into = self._store.host.slab.slot(slot)
        self._store.lower[tier].read(key, into, lambda answer, seal: self._arrived(tier, index, key, name, slot, answer, seal))
        return True

    def _arrived(self, tier: int, index: int, key: bytes, name: bytes | None, slot: int, answer: Answer, seal: int) -> None:
        """A block has been read from a lower tier, or not."""
        host = self._store.host
        self._store.note_pending(tier, -1)
        if answer is Answer.MISS:
            host.abandon(name, slot)
        elif name is not None:
            lease = host.publish(key, slot, seal, lease=True)
            with self._lock:
                late = self._finishing
                if not late:
                    self._leases[index] = lease
            if late:
                host.release(lease)
        else:
            with self._lock:
                late = self._finishing
                if not late:
                    self._leases[index] = Lease(key, slot, seal)
                    self._loose.append(slot)
            if late:
                host.abandon(None, slot)
        self._one_read_less(tier)

    def _one_read_less(self, tier: int | None = None) -> None:
        with self._lock:
            self._reads -= 1
            if tier is not None:
                self._num_read[tier] += 1
            last = self._reads == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._finishing:
                return
            self._finishing = True
            for meter, asked, read in zip(self._store.chooser.lower, self._num_asked, self._num_read, strict=True):
                if asked:
                    meter.saw(max(read, 1), time.monotonic() - self._started_s)
        self._store.jobs.submit(self._copy_up, urgent=True)

    def _copy_up(self) -> None:
        try:
            if not self._cancelled:
                self._copy()
        finally:
            for lease in self._leases:
                if lease is not None:
                    self._give_back(lease)
            self._leases = []
            self._done.set()

    def _give_back(self, lease: Lease) -> None:
        if lease.slot in self._loose:
            self._store.host.abandon(None, lease.slot)
        else:
            self._store.host.release(lease)

    def _copy(self) -> None:
        start = time.monotonic()
        count = next((i for i, lease in enumerate(self._leases) if lease is None), len(self._leases))
        pieces = [np.empty((count, size), np.uint8) for size in self._store.piece_bytes]
        done = 0
        for i, lease in enumerate(self._leases[:count]):
            if lease is None or self._store.host.read(lease, lambda view, i=i: rows(view, pieces, i)) is Answer.MISS:  # type: ignore[misc]
                break
            done += 1
        self._pieces, self.num_blocks = [p[:done] for p in pieces], done
        self._store.chooser.host.saw(done, time.monotonic() - start)


def rows(view: memoryview, pieces: Sequence[np.ndarray], index: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of each piece its row, and the part of a block's bytes that belongs to it."""
    data, first = np.frombuffer(view, np.uint8), 0
    for piece in pieces:
        size = piece.shape[1]
        yield piece[index], data[first : first + size]
        first += size


class TieredStore:
    """Host memory over tiers below it.

    Args:
        host: Tier 2; it is also where blocks of lower tiers arrive.
        lower: Tiers 3 and 4, the faster first.
        jobs: Threads that copy.
        piece_bytes: Bytes of a block in each of the arrays it is gathered to.
        lower_jobs: Threads of lower tiers, to be ended with them.
        lanes: Whatever else has to be idle before all is kept.
    """

    def __init__(
        self,
        host: HostTier,
        lower: Sequence[LowerTier],
        jobs: Jobs,
        piece_bytes: Sequence[int],
        *,
        lower_jobs: Sequence[Jobs] = (),
        lanes: Sequence[Lane] = (),
    ) -> None:
        self.host, self.lower, self.jobs = host, tuple(lower), jobs
        self.piece_bytes = tuple(piece_bytes)
        self.chooser = Chooser(Meter(host.block_bytes / 2e9), *(Meter(host.block_bytes / 5e8) for _ in lower))
        self.lower_jobs, self._lanes = tuple(lower_jobs), (jobs, *lower_jobs, *lanes)
        self._lock = threading.Lock()
        self._waiting = 0
        self._pending = [0] * len(self.lower)
        self.num_refused = 0

    @property
    def disk(self) -> DiskTier | None:
        """Tier 3, if there is one."""
        return next((tier for tier in self.lower if isinstance(tier, DiskTier)), None)

    @property
    def num_pending(self) -> int:
        """Blocks that requests wait for in lower tiers."""
        return sum(self._pending)

    def note_pending(self, tier: int, by: int) -> None:
        """Blocks that are being read from a lower tier."""
        with self._lock:
            self._pending[tier] += by

    def has(self, key: bytes) -> bool:
        """Whether a block is kept, or will be soon."""
        return self.host.has(key) or any(tier.has(key) for tier in self.lower)

    def finds(self, key: bytes) -> bool:
        """Whether a block can be found now."""
        return self.host.find([key]) > 0 or any(tier.find([key]) for tier in self.lower)

    def places(self, keys: Sequence[bytes]) -> list[int]:
        """Of each leading block that is kept where: 0 in host memory, from 1 on in a tier below."""
        places: list[int] = []
        tiers: list[HostTier | LowerTier] = [self.host, *self.lower]
        while len(places) < len(keys):
            rest = keys[len(places) :]
            for place, tier in enumerate(tiers):
                count = tier.find(rest)
                if count:
                    places += [place] * count
                    break
            else:
                break
        return places

    # Down -------------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """So much waits to be copied down, or to be written, that more would be dropped."""
        return self._waiting >= MAX_WAITING or any(tier.is_busy for tier in self.lower)

    def save(self, keys: Sequence[bytes], pieces: Sequence[Any], done: Callable[[list[bool]], None] | None = None) -> None:
        """Keep blocks: row `i` of each piece belongs to `keys[i]`; rows beyond the keys are padding. Answers at once.

        Args:
            keys: Of the blocks.
            pieces: Arrays, or what becomes one by `numpy.asarray`, that nobody changes any more.
            done: Hears, from another thread, which are kept.
        """
        with self._lock:
            full = self._waiting >= MAX_WAITING
            self._waiting += not full
        if full:
            self.host.note_dropped(len(keys))
            if done is not None:
                done([False] * len(keys))
            return
        self.jobs.submit(lambda: self._save(list(keys), list(pieces), done))

    def _save(self, keys: list[bytes], pieces: list[Any], done: Callable[[list[bool]], None] | None) -> None:
        kept = [False] * len(keys)
        try:
            arrays = [np.asarray(piece) for piece in pieces]
            for i, key in enumerate(keys):
                kept[i] = self._save_one(key, arrays, i)
        finally:
            with self._lock:
                self._waiting -= 1
            if done is not None:
                done(kept)

    def _save_one(self, key: bytes, arrays: list[np.ndarray], index: int) -> bool:
        slot = self.host.reserve(key)
        if slot is None:
            return self.host.has(key)
        lease = self.host.write(key, slot, lambda view: ((data, row) for row, data in rows(view, arrays, index)), lease=True)
        for tier in self.lower:
            held = self.host.lease(key)
            if held is not None:
                tier.write(key, self.host.slab.slot(slot), lease.seal, lambda _, held=held: self.host.release(held))  # type: ignore[misc]
        self.host.release(lease)
        return True

    # Up ---------------------------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], recompute_block_s: float) -> Fetch | None:
        """Begin to bring the leading blocks that are kept; None: there are none, or computing them is faster.

        Args:
            keys: Of a prompt, without those the device has.
            recompute_block_s: What the engine needs to compute a block.
        """
        places = self.places(keys)
        if not places:
            return None
        num, wait_s = self.chooser.choose(places, self._pending, recompute_block_s)
        if num < len(places):
            self.num_refused += 1
            if self.chooser.should_probe():
                self._probe(keys, places, num)
        if not num:
            return None
        fetch = Fetch(self, keys[:num], places, wait_s)
        fetch.start()
        return fetch

    def _probe(self, keys: Sequence[bytes], places: Sequence[int], first: int) -> None:
        """Read the first block that was not worth it into host memory, for what that takes."""
        index = next((i for i in range(first, len(places)) if places[i]), None)
        slot = self.host.reserve(keys[index]) if index is not None else None
        if index is None or slot is None:
            return
        key, tier, start = keys[index], places[index] - 1, time.monotonic()

        def arrived(answer: Answer, seal: int) -> None:
            self.chooser.lower[tier].saw(1, time.monotonic() - start)
            if answer is Answer.HIT_VERIFIED:
                self.host.publish(key, slot, seal)
            else:
                self.host.abandon(key, slot)

        self.lower[tier].read(key, self.host.slab.slot(slot), arrived, urgent=False)

    # Looking in -------------------------------------------------------------------------------------------------------

    def stats(self) -> list[TierStats]:
        """A reading of each tier."""
        tiers: list[tuple[Any, str, int]] = [(self.host, "on", self.host.num_leased)]
        tiers += [(tier, tier.state, pending) for tier, pending in zip(self.lower, self._pending, strict=True)]
        return [_stats(tier, state, busy) for tier, state, busy in tiers]

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until what was handed over is kept or dropped; False when that took too long."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if not any(map(len, self._lanes)):  # one hands over to the other before it has ended
                return True
            for lane in self._lanes:
                lane.wait_idle(max(0.0, end - time.monotonic()))
        return False

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what waits, for so long at most, and end."""
        self.wait_idle(timeout_s)
        for jobs in (self.jobs, *self.lower_jobs):
            jobs.close(timeout_s)
        for tier in self.lower:
            tier.close()


def _stats(tier: Any, state: str, num_leased: int) -> TierStats:
    count, capacity = tier.count, tier.capacity()
    return TierStats(
        name=tier.name,
        state=state,
        num_leased=num_leased,
        num_blocks=capacity.num_blocks,
        used_bytes=capacity.used_bytes,
        total_bytes=capacity.total_bytes,
        **{name: getattr(count, name) for name in count.__dataclass_fields__},
    )
