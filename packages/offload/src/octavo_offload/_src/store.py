"""The tiers together: blocks go down as pieces of gathered arrays and come up as pieces to be scattered.

Who owns what in each phase. *Down*: the caller hands over arrays that nobody writes any more; a worker waits for them, copies each block
into a reserved slot of host memory, seals and publishes it, and hands the slot, leased, to the disk. *Up*: host slots are leased and
disk blocks read into slots; when all there will be is there, a worker verifies each once more and copies it into buffers that belong
to the caller from then on; then every lease goes back. So no consumer ever sees memory that is used again: on a CPU `jax.device_put` of a
slab would alias it.

Nothing here raises for what storage does, and nothing but `close` waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from octavo_core.tiers import Answer
from octavo_core.wire import TierStats
from octavo_offload._src.disk import DiskTier
from octavo_offload._src.host import HostTier, Lease
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.policy import Chooser, Meter

_LOG = logging.getLogger(__name__)

MAX_WAITING: Final = 16
"""Batches that may wait to be copied down; those beyond are dropped."""


class Fetch:
    """Leading blocks of a prompt on their way up. `is_done`, then `take`; or `cancel`. Made by `TieredStore.fetch`."""

    def __init__(self, store: TieredStore, keys: Sequence[bytes], wait_s: float) -> None:
        self._store, self.keys = store, list(keys)
        self._lock = threading.Lock()
        self._leases: list[Lease | None] = [None] * len(keys)
        self._loose: list[int] = []
        self._reads = self._num_asked = self._num_read = 0
        self._finishing = self._cancelled = False
        self._done = threading.Event()
        self._pieces: list[np.ndarray] = []
        self.num_blocks = 0
        self._started_s = time.monotonic()
        self.deadline_s = self._started_s + wait_s

    @property
    def is_done(self) -> bool:
        """Nothing more will come. Past its deadline a fetch stops waiting for the disk and ends with what is there."""
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
        host, disk = self._store.host, self._store.disk
        with self._lock:
            self._reads = 1
        for i, key in enumerate(self.keys):
            self._leases[i] = host.lease(key)
            if self._leases[i] is None and (disk is None or not self._read_from(disk, i, key)):
                self.keys = self.keys[:i]
                break
        self._one_read_less()

    def _read_from(self, disk: DiskTier, index: int, key: bytes) -> bool:
        slot = self._store.host.reserve(key)
        name: bytes | None = key
        if slot is None:  # being written by another, or no room that is not leased
            slot, name = self._store.host.reserve(None), None
        if slot is None:
            return False
        with self._lock:
            self._reads += 1
            self._num_asked += 1
        self._store.note_pending(1)
        disk.read(key, self._store.host.slab.slot(slot), lambda answer, seal: self._arrived(index, key, name, slot, answer, seal))
        return True

    def _arrived(self, index: int, key: bytes, name: bytes | None, slot: int, answer: Answer, seal: int) -> None:
        """A block has been read from disk, or not."""
        host = self._store.host
        self._store.note_pending(-1)
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
        self._one_read_less(1)

    def _one_read_less(self, is_block: int = 0) -> None:
        with self._lock:
            self._reads -= 1
            self._num_read += is_block
            last = self._reads == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self._finishing:
                return
            self._finishing = True
            if self._num_asked:
                self._store.chooser.disk.saw(max(self._num_read, 1), time.monotonic() - self._started_s)
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
            if lease is None or self._store.host.read(lease, lambda view, i=i: split(view, pieces, i)) is Answer.MISS:  # type: ignore[misc]
                break
            done += 1
        self._pieces, self.num_blocks = [p[:done] for p in pieces], done
        self._store.chooser.host.saw(done, time.monotonic() - start)


def split(view: memoryview, pieces: Sequence[np.ndarray], index: int) -> None:
    """Copy a block's bytes to its row of each piece."""
    data, first = np.frombuffer(view, np.uint8), 0
    for piece in pieces:
        size = piece.shape[1]
        piece[index] = data[first : first + size]
        first += size


def join(view: memoryview, pieces: Sequence[np.ndarray], index: int) -> None:
    """The inverse of `split`."""
    data, first = np.frombuffer(view, np.uint8), 0
    for piece in pieces:
        size = piece.shape[1]
        data[first : first + size] = piece[index]
        first += size


class TieredStore:
    """Host memory over a disk.

    Args:
        host: Tier 2; it is also where blocks of the disk arrive.
        disk: Tier 3, or None.
        jobs: Threads that copy.
        piece_bytes: Bytes of a block in each of the arrays it is gathered to.
        disk_jobs: Threads of the disk, to be ended with it.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        jobs: Jobs,
        piece_bytes: Sequence[int],
        disk_jobs: Jobs | None = None,
    ) -> None:
        self.host, self.disk, self.jobs = host, disk, jobs
        self.piece_bytes = tuple(piece_bytes)
        self.chooser = Chooser(Meter(host.block_bytes / 2e9), Meter(host.block_bytes / 5e8))
        self._disk_jobs = disk_jobs
        self._lock = threading.Lock()
        self._waiting = self._pending = 0
        self.num_refused = 0

    def note_pending(self, by: int) -> None:
        """Blocks that are being read from disk."""
        with self._lock:
            self._pending += by

    def has(self, key: bytes) -> bool:
        """Whether a block is kept, or will be soon."""
        return self.host.has(key) or (self.disk is not None and self.disk.has(key))

    def leading(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """How many leading blocks host memory has, and how many more both tiers together have."""
        in_host = self.host.find(keys)
        found = in_host
        while found < len(keys) and self.disk is not None:
            more = self.disk.find(keys[found:])
            also = self.host.find(keys[found + more :]) if more else 0
            if not more:
                break
            found += more + also
        return in_host, found - in_host

    # Down -------------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """So much waits to be copied down, or to be written, that more would be dropped."""
        return self._waiting >= MAX_WAITING or (self.disk is not None and self.disk.is_busy)

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
        lease = self.host.write(key, slot, lambda view: join(view, arrays, index), lease=True)
        if self.disk is None:
            self.host.release(lease)
        else:
            self.disk.write(key, self.host.slab.slot(slot), lease.seal, lambda _: self.host.release(lease))
        return True

    # Up ---------------------------------------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], recompute_block_s: float) -> Fetch | None:
        """Begin to bring the leading blocks that are kept; None: there are none, or computing them is faster.

        Args:
            keys: Of a prompt, without those the device has.
            recompute_block_s: What the engine needs to compute a block.
        """
        num_host, num_disk = self.leading(keys)
        if num_host + num_disk == 0:
            return None
        choice, wait_s = self.chooser.choose(num_host, num_disk, self._pending, recompute_block_s)
        if num_disk and choice != "all":
            self.num_refused += 1
            if self.chooser.should_probe():
                self._probe(keys[num_host])
        if choice == "nothing":
            return None
        fetch = Fetch(self, keys[: num_host + num_disk * (choice == "all")], wait_s if choice == "all" else 1e9)
        fetch.start()
        return fetch

    def _probe(self, key: bytes) -> None:
        """Read one block into host memory, for what that takes."""
        if self.disk is None:
            return
        slot = self.host.reserve(key)
        if slot is None:
            return
        start = time.monotonic()

        def arrived(answer: Answer, seal: int) -> None:
            self.chooser.disk.saw(1, time.monotonic() - start)
            if answer is Answer.HIT_VERIFIED:
                self.host.publish(key, slot, seal)
            else:
                self.host.abandon(key, slot)

        self.disk.read(key, self.host.slab.slot(slot), arrived, urgent=False)

    # Looking in -------------------------------------------------------------------------------------------------------

    def stats(self) -> list[TierStats]:
        """A reading of each tier."""
        tiers: list[tuple[Any, str, int]] = [(self.host, "on", self.host.num_leased)]
        if self.disk is not None:
            tiers.append((self.disk, self.disk.state, self._pending))
        return [_stats(tier, state, busy) for tier, state, busy in tiers]

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until what was handed over is kept or dropped; False when that took too long."""
        end = time.monotonic() + timeout_s
        lanes = [jobs for jobs in (self.jobs, self._disk_jobs) if jobs is not None]
        while time.monotonic() < end:
            if not any(map(len, lanes)):  # one hands over to the other before it has ended
                return True
            for jobs in lanes:
                jobs.wait_idle(max(0.0, end - time.monotonic()))
        return False

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what waits, for so long at most, and end."""
        self.jobs.close(timeout_s)
        if self._disk_jobs is not None:
            self._disk_jobs.close(timeout_s)
        if self.disk is not None:
            self.disk.close()


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
