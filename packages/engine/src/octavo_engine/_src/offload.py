"""KV below the device, as the step loop sees it: what is fetched before a request is let in, what is copied out, and under which keys.

Who owns what. A request whose prefix is in a tier waits here, *loading*, before it enters the queue: it holds no row and no block, so
aborting it gives back nothing but host memory. When its bytes are there and it is let in, the cache takes blocks for them (in the
planner's thread, before the plan that admits it) and the bytes are written to the device before that plan's step.

A block's key is known from the events of the plan that made it findable, and forgotten with the event that says it is gone; where events
are lost every key is forgotten. Blocks are copied out when they are evicted (before the step that takes them), when a prefix is reused,
when the pool is crowded (lent by the cache until the copy is kept), when nothing runs, and at the end. The device runs what it is given
in order, so a copy begun before a step has what was there before it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from octavo_core.keys import block_keys
from octavo_core.plan import Loaded, StepPlan
from octavo_core.wire import TierStats
from octavo_engine._src.block_mover import BlockMover
from octavo_engine._src.lending import Lending, Load
from octavo_engine._src.sequence import Sequence

if TYPE_CHECKING:
    from octavo_offload import Fetch, TieredStore
else:
    Fetch = TieredStore = Any

_LOG = logging.getLogger(__name__)

MAX_HELD_BYTES: Final = 512 << 20
"""Host memory for bytes of requests that wait; beyond it a request is computed instead."""
IDLE_BLOCKS: Final = 32
"""Blocks copied out in one idle turn."""
REUSED_BLOCKS: Final = 64
"""Blocks of a reused prefix copied out at once."""
FLUSH_S: Final = 3.0
_KEEP: Final = 0.8
_LEAST_TOKENS: Final = 16


@dataclasses.dataclass(frozen=True)
class Waiting:
    """Bytes on their way for a request: of its blocks from `first` on."""

    fetch: Fetch
    first: int
    held_bytes: int


@dataclasses.dataclass
class _Round:
    """What one plan has to do with tiers: filled before and while it is made, read when it is there."""

    loads: list[tuple[Load, Waiting, list[bytes]]] = dataclasses.field(default_factory=list)
    loaded: list[Loaded] = dataclasses.field(default_factory=list)
    loan: Any = None


class Offload:
    """One engine's. Everything but `load`, `unload` and `lend` is called by the step loop.

    Size: one set of books on blocks, keys and requests.

    Args:
        store: The tiers.
        mover: Blocks of the device.
        lending: The cache's side.
        block_size: Tokens in a block.
        root: Where the key chain of a namespace begins.
        token_s: Assumed of a prompt token until steps were timed.
        learns: False keeps `token_s`.
    """

    def __init__(
        self,
        store: TieredStore,
        mover: BlockMover,
        lending: Lending,
        block_size: int,
        root: Callable[[bytes], bytes],
        *,
        token_s: float,
        learns: bool = True,
    ) -> None:
        self.store, self._mover, self._lending = store, mover, lending
        self._block_size, self._root = block_size, root
        self.token_s, self.learns = token_s, learns
        self._chains: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()
        self._loading: dict[Sequence, Waiting] = {}
        self._ready: dict[Sequence, Waiting] = {}
        self._held_bytes = 0
        self._round = _Round()
        self._blocks: dict[int, tuple[int, bytes]] = {}
        self._keys: dict[bytes, int] = {}
        self._unsaved: dict[int, None] = {}
        self._reused: list[tuple[int, bytes]] = []
        self._loan: tuple[Any, list[bool] | None] | None = None
        self.is_amid_turn = False

    # Requests ---------------------------------------------------------------------------------------------------------

    def keys_of(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of the leading blocks of a sequence, as far as its tokens go."""
        chain = self._chains.setdefault(sequence, [])
        if len(chain) < num_blocks:
            start = len(chain) * self._block_size
            prompt = sequence.request.prompt_ids
            tokens = (prompt[start:] + sequence.output[max(start - len(prompt), 0) :])[: num_blocks * self._block_size - start]
            parent = chain[-1] if chain else self._root(sequence.request.namespace)
            chain += block_keys(tokens, b"", self._block_size, parent=parent)
        return chain[:num_blocks]

    def begin(self, sequence: Sequence) -> bool:
        """Look for a request's prefix; whether it has to wait for bytes before it is queued."""
        keys = self.keys_of(sequence, (sequence.prompt_len - 1) // self._block_size)
        first = next((i for i, key in enumerate(keys) if key not in self._keys), len(keys))
        if first == len(keys) or self._held_bytes >= MAX_HELD_BYTES:
            return False
        fetch = self.store.fetch(keys[first:], self.token_s * self._block_size)
        if fetch is None:
            return False
        waiting = Waiting(fetch, first, len(fetch.keys) * sum(self._mover.piece_bytes))
        self._loading[sequence] = waiting
        self._held_bytes += waiting.held_bytes
        return True

    @property
    def num_loading(self) -> int:
        """Requests that wait for bytes."""
        return len(self._loading)

    def arrived(self) -> list[Sequence]:
        """Requests that need not wait any longer, in order."""
        arrived = [sequence for sequence, waiting in self._loading.items() if waiting.fetch.is_done]
        for sequence in arrived:
            self._ready[sequence] = self._loading.pop(sequence)
        return arrived

    def wait(self, seconds: float) -> None:
        """Nothing else is to do: wait for the first that loads."""
        for waiting in self._loading.values():
            waiting.fetch.wait(seconds)
            break

    def forget(self, sequence: Sequence) -> None:
        """A request has ended."""
        for waiting in (self._loading.pop(sequence, None), self._ready.pop(sequence, None)):
            if waiting is not None:
                waiting.fetch.cancel()
                self._held_bytes -= waiting.held_bytes

    def learn(self, step_s: float, prompt_tokens: int) -> None:
        """A step took so long for so many prompt tokens."""
        if self.learns and prompt_tokens >= _LEAST_TOKENS:
            self.token_s = _KEEP * self.token_s + (1 - _KEEP) * step_s / prompt_tokens

    # Around a plan ----------------------------------------------------------------------------------------------------

    def admit(self, newcomers: Many[Sequence]) -> None:
        """These are let in with the next plan."""
        for sequence in newcomers:
            waiting = self._ready.pop(sequence, None)
            if waiting is None:
                continue
            self._held_bytes -= waiting.held_bytes
            if not waiting.fetch.num_blocks:
                continue
            request, upto = sequence.request, waiting.first + waiting.fetch.num_blocks
            load = Load(request.prompt_ids, waiting.first, upto, request.namespace, request.tenant)
            self._round.loads.append((load, waiting, self.keys_of(sequence, upto)))

    def load(self) -> None:
        """Take blocks for those let in, and end a loan whose copies are kept. In the planner's thread, before `arrive`."""
        if self._loan is not None and self._loan[1] is not None:
            self._lending.settle(self._loan[0], self._loan[1])
            self._loan = None
        self._round.loaded = [self._lending.load(load) for load, _, _ in self._round.loads]

    def unload(self) -> None:
        """They have been admitted, or wait without their blocks. In the planner's thread."""
        for loaded in self._round.loaded:
            self._lending.unload(loaded)

    def lend(self, plan: StepPlan) -> None:
        """Have blocks lent where the pool is crowded. In the planner's thread, after the plan."""
        if self._loan is None and not self.store.is_busy and self._lending.is_crowded(int(plan.events.num_free[0])):
            self._round.loan = self._lending.lend()

    def follow(self, plan: StepPlan, sequences: Many[Sequence | None]) -> None:
        """Carry out what a plan means for tiers, before its step is dispatched."""
        this, self._round = self._round, _Round()
        events = plan.events
        removed = {(block, generation) for group, block, generation in _listed(events.removed) if group == 0}
        self._save([(block, key) for block, generation in removed if (key := self._strike(block, generation)) is not None])
        is_known = not bool(events.overflow)
        if not is_known:  # an event that is missing may be the end of any of them
            self._blocks.clear()
            self._keys.clear()
            self._unsaved.clear()
        for (load, waiting, keys), loaded in zip(this.loads, this.loaded, strict=True):
            self._write(load, waiting, keys, loaded, removed, is_known=is_known)
        if is_known:
            self._note_stored(events.stored, sequences)
        if this.loan is not None:
            self._copy_loan(this.loan)

    def _strike(self, block: int, generation: int) -> bytes | None:
        """Forget a block that is gone; its key where it was known."""
        known = self._blocks.get(block)
        if known is None or known[0] != generation:
            return None
        del self._blocks[block]
        self._unsaved.pop(block, None)
        if self._keys.get(known[1]) == block:
            del self._keys[known[1]]
        return known[1]

    def _enter(self, block: int, generation: int, key: bytes) -> None:
        old = self._blocks.get(block)
        if old is not None:
            self._strike(block, old[0])
        self._blocks[block] = generation, key
        self._keys[key] = block

    def _write(
        self,
        load: Load,
        waiting: Waiting,
        keys: list[bytes],
        loaded: Loaded,
        removed: set[tuple[int, int]],
        *,
        is_known: bool,
    ) -> None:
        """Write loaded blocks to the device. One that was evicted in the same plan is written too: whoever has it now writes after it."""
        found, new = int(loaded.num_found), int(loaded.num_new)
        if not new:
            return
        rows, columns = slice(found - load.first, found - load.first + new), slice(found, found + new)
        ids, generations = loaded.block_ids[columns].tolist(), loaded.generations[columns].tolist()
        self._mover.scatter(ids, [piece[rows] for piece in waiting.fetch.take()])
        for block, generation, key in zip(ids, generations, keys[columns], strict=True):
            if is_known and (block, generation) not in removed:
                self._enter(block, generation, key)

    def _note_stored(self, stored: Any, sequences: Many[Sequence | None]) -> None:
        for group, block, generation, index, column in _listed(stored):
            sequence = sequences[index] if 0 <= index < len(sequences) else None
            if group == 0 and sequence is not None:
                keys = self.keys_of(sequence, column + 1)
                if len(keys) > column:
                    self._enter(block, generation, keys[column])
                    self._unsaved[block] = None

    def _copy_loan(self, loan: Any) -> None:
        """Copy lent blocks; the loan ends when the tiers have answered."""
        names = zip(loan[0].tolist(), loan[1].tolist(), strict=True)
        known = [self._blocks.get(block) for block, _ in names]
        keys = [k[1] if k is not None and k[0] == g else None for k, g in zip(known, loan[1].tolist(), strict=True)]
        stored = [key is not None and self.store.has(key) for key in keys]
        missing = [i for i, key in enumerate(keys) if key is not None and not stored[i]]
        self._loan = loan, None if missing else stored

        def kept(answers: list[bool]) -> None:
            for i, answer in zip(missing, answers, strict=True):
                stored[i] = answer
            self._loan = loan, stored

        blocks = [(int(loan[0][i]), key) for i in missing if (key := keys[i]) is not None]
        self._save(blocks, kept)

    # Copying out ------------------------------------------------------------------------------------------------------

    def _save(self, blocks: list[tuple[int, bytes]], kept: Callable[[list[bool]], None] | None = None) -> None:
        """Copy blocks that no tier has. `kept` hears of all at once, and only of at most as many as are moved at once."""
        if kept is None:
            blocks = [(block, key) for block, key in blocks if not self.store.has(key)]
        for part, pieces in self._mover.gather([block for block, _ in blocks]):
            self.store.save([key for _, key in blocks[part]], pieces, kept)
        for block, _ in blocks:
            self._unsaved.pop(block, None)

    def reuse(self, sequence: Sequence, table: np.ndarray, cached_len: int) -> None:
        """A prefix was found on the device: it is worth keeping. It is copied when the step has been dispatched."""
        count = min(cached_len // self._block_size, REUSED_BLOCKS)
        keys = self.keys_of(sequence, count)
        self._reused += [(b, k) for b, k in zip(table[:count].tolist(), keys, strict=True) if not self.store.has(k)]

    def catch_up(self) -> None:
        """Copy what was reused, before the next step. Its lease holds at least until the plan after this."""
        if self._reused:
            reused, self._reused = self._reused, []
            self._save(reused)

    def idle(self) -> None:
        """Nothing runs: copy some of what no tier has."""
        if self._unsaved and not self.store.is_busy:
            chosen = list(self._unsaved)[:IDLE_BLOCKS]
            for block in chosen:
                del self._unsaved[block]
            self._save([(block, self._blocks[block][1]) for block in chosen])

    def clear(self) -> None:
        """Forget which blocks the device has, when the cache was reset; the tiers keep theirs."""
        self._blocks.clear()
        self._keys.clear()
        self._unsaved.clear()
        self._reused.clear()
        self._loan, self._round = None, _Round()

    def stats(self) -> list[TierStats]:
        """A reading of each tier."""
        return self.store.stats()

    def close(self) -> None:
        """Copy what no tier has, for a few seconds at most, and end. After a turn that failed, device and books may differ: nothing is."""
        end = time.monotonic() + FLUSH_S
        try:
            while self._unsaved and not self.is_amid_turn and time.monotonic() < end:
                self.idle()
                if self.store.is_busy:
                    time.sleep(0.005)
        except Exception:
            _LOG.exception("blocks were not copied at the end")
        self.store.close(FLUSH_S)


def _listed(rows: Any) -> list[list[int]]:
    """The rows that are not padding."""
    rows = np.asarray(rows)
    return rows[rows[:, 0] >= 0].tolist()
