"""Tier 4: blocks in a store on another machine, through an agent process.

Who owns what: a staging slot of the slab shared with the agent is free, or belongs to one `Work` until its `Result` came or the agent was seen
to be dead. Bytes that arrive are copied out of it and verified after that, where nothing can reach them any more; then the slot is free.
A work past its deadline is answered MISS at once, and its slot stays in quarantine. An agent that is silent for too long is killed;
one that died is replaced, with longer and longer pauses.

What the store has is known from a directory of key prefixes that the agent keeps current: `find` asks nobody.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from octavo_core.errors import ConfigError
from octavo_core.tiers import Answer, Capacity, Done
from octavo_offload._src.checksum import checksum
from octavo_offload._src.counters import Counters
from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote import transports
from octavo_offload._src.remote.config import Job, RemoteConfig
from octavo_offload._src.remote.shared import Pipe, SharedSlab
from octavo_offload._src.tickets import Tickets

_LOG = logging.getLogger(__name__)

_TICK_S: Final = 0.1
_BACKOFF_S: Final = (0.2, 10.0)
_GOODBYE_S: Final = 1.0
_HUNG: Final = 4
"""Deadlines after which an agent that has not answered is killed."""


class RemoteTier:
    """A `Tier` in a store.

    Size: one set of books, under one lock.

    Args:
        config: Which store.
        block_bytes: Of each block.
        identity: 32 bytes over everything that all blocks of this engine have in common.
        max_pending: Blocks that may wait in each direction; those beyond are missed or dropped.

    Attributes:
        told: How it works, in words.

    Raises:
        ConfigError: The store refuses us.
    """

    def __init__(self, config: RemoteConfig, block_bytes: int, identity: bytes, *, max_pending: int = 256) -> None:
        self.name, self.block_bytes = "remote", block_bytes
        self.count = Counters()
        self.state, self.told = "off", "not joined yet"
        self._config, self._identity, self._max_pending = config, identity, max_pending
        self._transports = transports.installed(encrypted=config.tls is not None)
        self._lock = threading.Lock()
        self._slab = SharedSlab(2 * max(2, config.window_bytes // max(block_bytes, 1)), block_bytes)
        half = self._slab.num_slots // 2
        self._free = {"read": deque(range(half)), "write": deque(range(half, 2 * half))}
        self._queues: dict[str, deque[Job]] = {"read": deque(), "write": deque()}
        self._jobs: dict[int, Job] = {}
        self._next = 0
        self._directory: set[bytes] = set()
        self._writing: set[bytes] = set()
        self._seen = (0, 0, 0)
        self._tickets = Tickets()
        self._closing = False
        self._settled = threading.Event()
        self._refused = ""
        self._sending = threading.Lock()
        self._child, self._pipe = self._spawn()
        self._thread = threading.Thread(target=self._listen_on, name="octavo-remote", daemon=True)
        self._thread.start()
        self._settled.wait(config.join_s)
        if self._refused:
            self.close()
            raise ConfigError(f"the KV store at {config.target} refuses this engine: {self._refused}")

    # The agent --------------------------------------------------------------------------------------------------------

    def _spawn(self) -> tuple[subprocess.Popen[bytes], Pipe]:
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "octavo_offload._src.remote.agent", str(theirs.fileno()), str(self._slab.fd)]
        child = subprocess.Popen(words, pass_fds=(theirs.fileno(), self._slab.fd), stdin=subprocess.DEVNULL)
        theirs.close()
        pipe = Pipe(ours.detach(), m.FromAgent)
        config = self._config
        start = m.Start(
            config.target, self._identity, self.block_bytes, self._slab.slot_bytes, self._slab.num_slots, self._transports,
            config.deadline_s, config.secret, config.tls, config.tls_name,
        )  # fmt: skip
        pipe.send(start)
        return child, pipe

    @property
    def agent_id(self) -> int:
        """Of the agent's process."""
        return self._child.pid

    def _listen_on(self) -> None:
        pause_s = _BACKOFF_S[0]
        while not self._closing:
            started_s = time.monotonic()
            try:
                while not self._closing:
                    message = self._pipe.receive(_TICK_S)
                    if message is not None:
                        self._hear(message)
                    self._look_at_clock()
            except (EOFError, OSError):
                pass
            self._bury()
            if self._closing:
                return
            pause_s = _BACKOFF_S[0] if time.monotonic() > started_s + 30.0 else min(2 * pause_s, _BACKOFF_S[1])
            self._wait(pause_s)
            try:
                with self._sending:
                    self._child, self._pipe = self._spawn()
            except OSError as error:
                _LOG.warning("the agent of the remote tier cannot be started: %s", error)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._closing and time.monotonic() < end:
            time.sleep(0.02)

    def _bury(self) -> None:
        """The agent is gone, or must go: nothing it began can be trusted, and nobody writes into its slots once it is dead."""
        self._pipe.close()
        if self._closing:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_GOODBYE_S)
        self._child.kill()
        self._child.wait()
        if not self._closing:
            _LOG.warning("the agent of the remote tier has ended (status %s): what was under way is missed", self._child.returncode)
        self._leave("the agent has ended")
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
            for job in jobs:
                self._free["read" if job.seal is None else "write"].append(job.slot)
            self.count.errors += not self._closing
        for job in jobs:
            self._answer(job, Answer.MISS)

    def _leave(self, told: str) -> None:
        """The store is not there: forget what it had, and miss what waits."""
        with self._lock:
            self.state, self.told = "off", told
            self._directory.clear()
            waiting = [*self._queues["read"], *self._queues["write"]]
            for queue in self._queues.values():
                queue.clear()
        for job in waiting:
            self._answer(job, Answer.MISS)

    def _hear(self, message: m.FromAgent) -> None:
        if isinstance(message, m.Result):
            self._end(message)
        elif isinstance(message, m.News):
            self._read_news(message.beat)
        elif message.is_joined:
            with self._lock:
                self.state, self.told = "on", f"{message.told}; {len(self._directory)} blocks found"
            self._settled.set()
            _LOG.info("the KV store at %s was joined: %s", self._config.target, self.told)
        else:
            if self.state == "on":
                _LOG.warning("the KV store at %s is lost: %s", self._config.target, message.told)
            self._leave(message.told)
            self._refused = message.told if message.is_final and not self._settled.is_set() else ""
            if message.is_final:
                self._settled.set()

    def _read_news(self, beat: m.Beaten) -> None:
        size = m.PREFIX_BYTES
        with self._lock:
            if beat.reset:
                self._directory.clear()
            self._directory |= {beat.added[i : i + size] for i in range(0, len(beat.added), size)}
            self._directory -= {beat.removed[i : i + size] for i in range(0, len(beat.removed), size)}
            self._seen = beat.total_bytes, beat.used_bytes, beat.num_blocks

    def _look_at_clock(self) -> None:
        now_s, limit_s = time.monotonic(), self._config.deadline_s
        with self._lock:
            late = [job for job in self._jobs.values() if not job.is_answered and now_s > job.started_s + limit_s]
            waited = [job for queue in self._queues.values() for job in queue if now_s > job.started_s + limit_s]
            for job in waited:
                self._queues["read" if job.seal is None else "write"].remove(job)
            is_hung = any(now_s > job.started_s + _HUNG * limit_s for job in self._jobs.values())
            self.count.errors += len(late)
        for job in (*late, *waited):
            self._answer(job, Answer.MISS)
        if is_hung:
            _LOG.warning("the agent of the remote tier does not answer: it is ended")
            raise EOFError

    # Blocks -----------------------------------------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        """Send, or let it wait for a slot; MISS where too many do."""
        lane = "read" if job.seal is None else "write"
        with self._lock:
            is_full = len(self._queues[lane]) >= self._max_pending or self.state != "on" or self._closing
            if not is_full:
                self._queues[lane].append(job)
        if is_full:
            self._answer(job, Answer.MISS)
        else:
            self._pump(lane)

    def _pump(self, lane: str) -> None:
        """Give slots to those that wait."""
        while True:
            with self._lock:
                if not self._queues[lane] or not self._free[lane]:
                    return
                job = self._queues[lane].popleft()
                job.slot = self._free[lane].popleft()
                self._next += 1
                ticket = self._next
                self._jobs[ticket] = job
            if job.seal is not None:
                _copy(self._staged(job), job.view)
            try:
                with self._sending:
                    self._pipe.send(m.Work(ticket, job.key, job.slot, job.seal))
            except OSError:
                return  # the thread that listens sees it too, and answers

    def _staged(self, job: Job) -> memoryview:
        return self._slab.slot(job.slot)[: self.block_bytes]

    def _end(self, result: m.Result) -> None:
        with self._lock:
            job = self._jobs.pop(result.ticket, None)
        if job is None:
            return
        answer = Answer(result.is_good)
        if job.seal is None and not job.is_answered and result.is_good:
            answer = self._arrive(job, result.seal)
        with self._lock:
            lane = "read" if job.seal is None else "write"
            self._free[lane].append(job.slot)
            if answer is Answer.HIT_VERIFIED and job.seal is not None and self.state == "on":
                self._directory.add(job.key[: m.PREFIX_BYTES])
        self._answer(job, answer, result.seal)
        self._pump(lane)

    def _arrive(self, job: Job, seal: int) -> Answer:
        """Copy a block to where it is wanted, then verify it there."""
        into = job.view[: self.block_bytes]
        _copy(into, self._staged(job))
        good = checksum(job.key, into) == seal
        with self._lock:
            self.count.verified += good
            self.count.corrupt += not good
            if not good:
                self._directory.discard(job.key[: m.PREFIX_BYTES])
        if not good:
            _LOG.warning("a block of the KV store is not what was put there: missed")
        return Answer(good)

    def _answer(self, job: Job, answer: Answer, seal: int = 0) -> None:
        is_hit, took_s = answer is Answer.HIT_VERIFIED, time.monotonic() - job.started_s
        with self._lock:
            if job.is_answered:
                return
            job.is_answered = True
            if job.seal is None:
                self.count.hits += is_hit
                self.count.misses += not is_hit
                self.count.read_bytes += self.block_bytes * is_hit
                self.count.read_s += took_s * is_hit
            else:
                self._writing.discard(job.key)
                self.count.stored += is_hit
                self.count.dropped += not is_hit
                self.count.written_bytes += self.block_bytes * is_hit
                self.count.write_s += took_s * is_hit
        job.done(answer, seal)

    # What stores of tiers call ----------------------------------------------------------------------------------------

    def write(self, key: bytes, data: memoryview, seal: int, done: Callable[[Answer], None]) -> None:
        """Store a block, given its checksum; `done` hears, perhaps from another thread. The buffer must not change until then."""
        with self._lock:
            is_there = key[: m.PREFIX_BYTES] in self._directory
            is_refused = not is_there and (key in self._writing or self.state != "on")
            if not is_there and not is_refused:
                self._writing.add(key)
            self.count.dropped += is_refused
        if is_there or is_refused:
            done(Answer(is_there))
        else:
            self._submit(Job(key, data[: self.block_bytes], seal, lambda answer, _: done(answer), time.monotonic()))

    def read(self, key: bytes, into: memoryview, done: Callable[[Answer, int], None], *, urgent: bool = True) -> None:
        """Read a block and verify it; `done` hears the answer and the checksum, perhaps from another thread."""
        if self.find([key]):
            self._submit(Job(key, into, None, done, time.monotonic()))
        else:
            with self._lock:
                self.count.misses += 1
            done(Answer.MISS, 0)

    @property
    def is_busy(self) -> bool:
        """Half of the writes that may wait do."""
        return len(self._queues["write"]) >= self._max_pending // 2

    def has(self, key: bytes) -> bool:
        """Whether a block can be found, or will be soon."""
        with self._lock:
            return key[: m.PREFIX_BYTES] in self._directory or key in self._writing

    @property
    def num_quarantined(self) -> int:
        """Slots whose transfer is past its deadline and has not ended."""
        with self._lock:
            return sum(job.is_answered for job in self._jobs.values())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when that took too long."""
        end = time.monotonic() + timeout_s
        while len(self) and time.monotonic() < end:
            time.sleep(0.002)
        return not len(self)

    def __len__(self) -> int:
        """Blocks on their way, and those that wait."""
        with self._lock:
            return len(self._jobs) + sum(map(len, self._queues.values()))

    # The seam ---------------------------------------------------------------------------------------------------------

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
            return next((i for i, key in enumerate(keys) if key[: m.PREFIX_BYTES] not in self._directory), len(keys))

    def capacity(self) -> Capacity:
        """See `octavo_core.tiers.Tier`. Used is what all members together use."""
        with self._lock:
            total, used, _ = self._seen
            return Capacity(total, used, len(self._directory))

    def close(self, timeout_s: float = 5.0) -> None:
        """End the agent. What is under way is missed."""
        self._closing = True
        self._thread.join(timeout_s)
        self._slab.close()


def _copy(into: Any, data: Any) -> None:
    """Copy bytes without holding the interpreter's lock."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
