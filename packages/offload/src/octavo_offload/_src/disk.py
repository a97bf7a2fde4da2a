"""Tier 3: blocks in preallocated files, the least recently used going first.

Who owns what: a slot is free, being written (one writer, no key leads to it) or published. Publication follows the write, so nobody reads
what is half-written; a published slot that is being read is not reused. Every read is verified against the header and the checksum, and
what fails is forgotten. At start the headers of all slots are read: what was published before a crash is found again.

The ladder of trouble: a write that fails makes the tier read-only; the third read that fails turns it off. Both are told and counted.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple

from octavo_core.tiers import Answer, Capacity, Done
from octavo_offload._src import header
from octavo_offload._src.checksum import checksum
from octavo_offload._src.counters import Counters, timed
from octavo_offload._src.files import Files
from octavo_offload._src.folder import Folder
from octavo_offload._src.header import Header
from octavo_offload._src.jobs import Jobs
from octavo_offload._src.nixl_files import choose_files
from octavo_offload._src.slab import PAGE, address, aligned
from octavo_offload._src.tickets import Tickets

_LOG = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 256 << 20
_FATAL_READS: Final = 3
_SYNC_EVERY_S: Final = 5.0

State = Literal["on", "read-only", "off"]


class Slot(NamedTuple):
    """A published block: where, of which write, and what it must hash to."""

    slot: int
    sequence: int
    seal: int


class DiskTier:
    """A `Tier` in a folder.

    Size: one set of books, under one lock.

    Args:
        path: Of the tier; made if it is not there.
        total_bytes: Budget of the path, over all identities in it.
        block_bytes: Of each block.
        identity: 32 bytes over everything that all blocks of this engine have in common.
        jobs: Threads that read and write.
        files: How; None: the best that works here.
        max_pending: Writes that may wait; those beyond are dropped.
        segment_bytes: Of each file; None: an eighth of the budget, at most 256 MiB.

    Attributes:
        told: How it works, in words.
    """

    def __init__(
        self,
        path: Path,
        total_bytes: int,
        block_bytes: int,
        identity: bytes,
        jobs: Jobs,
        *,
        files: Files | None = None,
        max_pending: int = 256,
        segment_bytes: int | None = None,
    ) -> None:
        self.name, self.block_bytes = "disk", block_bytes
        self.count = Counters()
        self.state: State = "on"
        self._identity, self._jobs, self._total_bytes = identity, jobs, total_bytes
        self._padded = aligned(block_bytes)
        self._slot_bytes = PAGE + self._padded
        segment_bytes = segment_bytes or min(SEGMENT_BYTES, total_bytes // 8)
        self._per_segment = max(1, min(segment_bytes, total_bytes) // self._slot_bytes)
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._index: OrderedDict[bytes, Slot] = OrderedDict()
        self._reading: dict[int, int] = {}
        self._doomed: set[int] = set()
        self._free: deque[int] = deque()
        self._fds: dict[int, int] = {}
        self._writing: set[bytes] = set()
        self._sequence, self._num_pending, self._max_pending, self._failed_reads = 0, 0, max_pending, 0
        self._dirty: set[int] = set()
        self._synced_s = time.monotonic()
        self._may_grow = True
        self._tickets, self._scratch = Tickets(), threading.local()
        self._folder = Folder(path, identity)
        self._files = files or choose_files(self._folder.path)
        self.told = f"{self._files.told}; {self._recover()} blocks found"

    # Recovery ---------------------------------------------------------------------------------------------------------

    def _recover(self) -> int:
        """Open every segment and read every header; answers how many blocks there are."""
        most = self._total_bytes // (self._per_segment * self._slot_bytes)
        numbers = []
        for path in self._folder.segments():
            number, size = int(path.stem.removeprefix("seg-")), path.stat().st_size
            if number < most and size == self._per_segment * self._slot_bytes and self._open(number):
                numbers.append(number)
            else:
                path.unlink(missing_ok=True)
        with ThreadPoolExecutor(8) as pool:
            headers = [found for part in pool.map(self._read_headers, numbers) for found in part]
        newest = {h.key: Slot(slot, h.sequence, h.seal) for slot, h in sorted(headers, key=lambda item: item[1].sequence)}
        taken = {slot.slot for slot in newest.values()}
        self._free.extend(s for n in sorted(self._fds) for s in self._slots_of(n) if s not in taken)
        self._index.update(sorted(newest.items(), key=lambda item: item[1].sequence))
        self._sequence = max((h.sequence for _, h in headers), default=0)
        return len(self._index)

    def _read_headers(self, segment: int) -> list[tuple[int, Header]]:
        """What the slots of a segment say that they hold."""
        page, _ = self._own_buffers()
        found = []
        for slot in self._slots_of(segment):
            try:
                self._files.read(*self._place(slot, [page]))
            except OSError:
                continue
            head = header.unpack(page)
            if head is not None and head.identity == self._identity and head.length == self.block_bytes:
                found.append((slot, head))
        return found

    def _open(self, number: int) -> bool:
        try:
            self._fds[number] = self._files.open(self._folder.segment(number), self._per_segment * self._slot_bytes)
        except OSError as error:
            self._trouble("open", error)
            return False
        return True

    def _slots_of(self, segment: int) -> range:
        return range(segment * self._per_segment, (segment + 1) * self._per_segment)

    def _place(self, slot: int, buffers: list[memoryview]) -> tuple[int, list[memoryview], int]:
        segment, index = divmod(slot, self._per_segment)
        return self._fds[segment], buffers, index * self._slot_bytes

    @property
    def is_busy(self) -> bool:
        """Half of the writes that may wait do."""
        return self._num_pending >= self._max_pending // 2

    def adopt(self, memory: memoryview) -> None:
        """Memory whose parts blocks will be read into and written from."""
        self._files.adopt(memory)

    # Writing ----------------------------------------------------------------------------------------------------------

    def write(self, key: bytes, data: memoryview, seal: int, done: Callable[[Answer], None]) -> None:
        """Store a block, given its checksum; `done` hears from another thread. The buffer must not change until then."""
        with self._lock:
            if key in self._index:
                self._index.move_to_end(key)
                answer = Answer.HIT_VERIFIED
            elif self.state != "on" or key in self._writing or self._num_pending >= self._max_pending:
                self.count.dropped += 1
                answer = Answer.MISS
            else:
                self._writing.add(key)
                self._num_pending += 1
                self._jobs.submit(lambda: self._write(key, data, seal, done))
                return
        done(answer)

    def _write(self, key: bytes, data: memoryview, seal: int, done: Callable[[Answer], None]) -> None:
        answer = Answer.MISS
        try:
            slot, sequence = self._take_slot()
            if slot is not None:
                answer = self._write_slot(Header(sequence, key, self._identity, self.block_bytes, seal), slot, data)
        finally:
            with self._lock:
                self._writing.discard(key)
                self._num_pending -= 1
                self.count.dropped += answer is Answer.MISS
            done(answer)
        self._sync_sometimes()

    def _write_slot(self, head: Header, slot: int, data: memoryview) -> Answer:
        page, bounce = self._own_buffers()
        header.pack(head, page)
        if len(data) != self._padded or address(data) % PAGE:
            bounce[: self.block_bytes] = data[: self.block_bytes]
            data = bounce
        try:
            with timed() as taken:
                fd, buffers, offset = self._place(slot, [page, data])
                self._files.write(fd, buffers, offset)
        except OSError as error:
            self._trouble("write", error)
            self._free.append(slot)  # what is there now is unknown, and no key leads to it
            return Answer.MISS
        with self._lock:
            self._index[head.key] = Slot(slot, head.sequence, head.seal)
            self._dirty.add(fd)
            self.count.stored += 1
            self.count.written_bytes += self.block_bytes
            self.count.write_s += taken[0]
        return Answer.HIT_VERIFIED

    def _own_buffers(self) -> tuple[memoryview, memoryview]:
        """A header page and a block, aligned, of this thread."""
        if not hasattr(self._scratch, "view"):
            self._scratch.view = memoryview(mmap.mmap(-1, self._slot_bytes))
            self._files.adopt(self._scratch.view)
        return self._scratch.view[:PAGE], self._scratch.view[PAGE:]

    def _take_slot(self) -> tuple[int | None, int]:
        """A slot no key leads to, and the number of this write."""
        with self._growing:
            if not self._free and self._may_grow:
                self._grow()
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            if self._free:
                return self._free.popleft(), sequence
            victim = next((k for k, s in self._index.items() if s.slot not in self._reading), None)
            if victim is None:
                return None, sequence
            self.count.evicted += 1
            return self._index.pop(victim).slot, sequence

    def _grow(self) -> None:
        """One segment more, if the budget and the disk have room."""
        size = self._per_segment * self._slot_bytes
        number = next(n for n in range(len(self._fds) + 1) if n not in self._fds)
        try:
            self._may_grow = self._folder.has_room(size, self._total_bytes)
            fd = self._files.open(self._folder.segment(number), size) if self._may_grow else -1
        except OSError as error:
            self._may_grow = False
            _LOG.warning("the disk tier stays at %d bytes: %s", len(self._fds) * size, error)
            with self._lock:
                self.count.errors += 1
                self.state = self.state if self._fds else "read-only"
            return
        if self._may_grow:
            with self._lock:
                self._fds[number] = fd
                self._free.extend(self._slots_of(number))

    def _sync_sometimes(self) -> None:
        now_s = time.monotonic()
        if self._dirty and now_s >= self._synced_s + _SYNC_EVERY_S:
            self._synced_s = now_s
            self.sync()

    def sync(self) -> None:
        """Let what was written so far survive a loss of power."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            for fd in dirty:
                self._files.sync(fd)
        except OSError as error:
            self._trouble("sync", error)

    # Reading ----------------------------------------------------------------------------------------------------------

    def read(self, key: bytes, into: memoryview, done: Callable[[Answer, int], None], *, urgent: bool = True) -> None:
        """Read a block and verify it; `done` hears the answer and the checksum from another thread."""
        with self._lock:
            slot = self._index.get(key) if self.state != "off" else None
            if slot is not None:
                self._index.move_to_end(key)
                self._reading[slot.slot] = self._reading.get(slot.slot, 0) + 1
            else:
                self.count.misses += 1
        if slot is None:
            done(Answer.MISS, 0)
        else:
            self._jobs.submit(lambda: self._read(key, slot, into, done), urgent=urgent)

    def _read(self, key: bytes, slot: Slot, into: memoryview, done: Callable[[Answer, int], None]) -> None:
        answer = Answer.MISS
        try:
            answer = self._read_slot(key, slot, into)
        finally:
            with self._lock:
                self._end_read(slot.slot)
                self.count.hits += answer is Answer.HIT_VERIFIED
                self.count.misses += answer is Answer.MISS
            done(answer, slot.seal)

    def _end_read(self, slot: int) -> None:
        self._reading[slot] -= 1
        if not self._reading[slot]:
            del self._reading[slot]
            if slot in self._doomed:
                self._doomed.discard(slot)
                self._free.append(slot)

    def _read_slot(self, key: bytes, slot: Slot, into: memoryview) -> Answer:
        page, bounce = self._own_buffers()
        direct = len(into) == self._padded and not address(into) % PAGE
        data = into if direct else bounce
        try:
            with timed() as taken:
                self._files.read(*self._place(slot.slot, [page, data]))
        except OSError as error:
            self._trouble("read", error)
            self._forget(key, slot)
            return Answer.MISS
        wanted = Header(slot.sequence, key, self._identity, self.block_bytes, slot.seal)
        good = header.unpack(page) == wanted and checksum(key, data[: self.block_bytes]) == slot.seal
        if good and not direct:
            into[: self.block_bytes] = data[: self.block_bytes]
        with self._lock:
            self.count.verified += good
            self.count.corrupt += not good
            self.count.read_bytes += self.block_bytes * good
            self.count.read_s += taken[0]
        if not good:
            _LOG.warning("a block on disk is not what was written: forgotten")
            self._forget(key, slot)
        return Answer(good)

    def _forget(self, key: bytes, slot: Slot) -> None:
        with self._lock:
            if self._index.get(key) == slot:
                del self._index[key]
                self._doomed.add(slot.slot)  # being read by the caller

    def _trouble(self, what: str, error: OSError) -> None:
        """One step down the ladder."""
        with self._lock:
            self.count.errors += 1
            self._failed_reads += what == "read"
            was = self.state
            if self._failed_reads >= _FATAL_READS:
                self.state = "off"
            elif what != "read" and self.state == "on":
                self.state = "read-only"
            state = self.state
        if state != was:
            _LOG.warning("the disk tier is %s from now on: %s failed: %s", state, what, error)

    # The seam ---------------------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether a block can be found, or will be soon."""
        with self._lock:
            return key in self._index or key in self._writing

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """See `octavo_core.tiers.Tier`."""
        return self._tickets.each(
            self.block_bytes, keys, blocks, lambda key, block, done: self.write(key, block, checksum(key, block), done)
        )

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """See `octavo_core.tiers.Tier`."""
        return self._tickets.each(
            self.block_bytes, keys, into, lambda key, block, done: self.read(key, block, lambda answer, _: done(answer))
        )

    def poll(self) -> list[Done]:
        """See `octavo_core.tiers.Tier`."""
        return self._tickets.poll()

    def find(self, keys: Sequence[bytes]) -> int:
        """See `octavo_core.tiers.Tier`."""
        with self._lock:
            if self.state == "off":
                return 0
            return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def capacity(self) -> Capacity:
        """See `octavo_core.tiers.Tier`. Used are the files, whole."""
        with self._lock:
            return Capacity(self._total_bytes, len(self._fds) * self._per_segment * self._slot_bytes, len(self._index))

    def close(self) -> None:
        """Sync and let the folder go. The tier's jobs must have ended."""
        self.sync()
        self.state = "off"
        while self._fds:
            self._files.close(self._fds.popitem()[1])
        self._folder.close()
