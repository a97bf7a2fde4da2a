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

from octavo_core.keys import block_keys, partial_key
from octavo_core.plan import Loaded, StepPlan
from octavo_core.specs import CacheSpec
from octavo_core.wire import TierStats
from octavo_engine._src.block_mover import BlockMover
from octavo_engine._src.device_blocks import DeviceBlocks, Name, There
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
    """Bytes on their way for a request.

    Attributes:
        brought: Column of each block; True: with the bytes of every group.
        there: What the device had when the fetch began.
    """

    fetch: Fetch
    brought: dict[int, bool]
    there: There
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
        spec: Of the cache.
        root: Where the key chain of a namespace begins.
        token_s: Assumed of a prompt token until steps were timed.
        learns: False keeps `token_s`.
    """

    def __init__(
        self,
        store: TieredStore,
        mover: BlockMover,
        lending: Lending,
        spec: CacheSpec,
        root: Callable[[bytes], bytes],
        *,
        token_s: float,
        learns: bool = True,
    ) -> None:
        self.store, self._mover, self._lending = store, mover, lending
        self._spec, self._block_size, self._root = spec, spec.block_size, root
        self.token_s, self.learns = token_s, learns
        self._chains: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()
        self._loading: dict[Sequence, Waiting] = {}
        self._ready: dict[Sequence, Waiting] = {}
        self._held_bytes = 0
        self._round = _Round()
        self.blocks = DeviceBlocks(spec)
        self._unsaved: dict[bytes, None] = {}
        self._reused: dict[bytes, None] = {}
        self._loan: tuple[Any, list[bool] | None] | None = None
        self.is_amid_turn = False

    # Requests ---------------------------------------------------------------------------------------------------------

    def keys_of(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of the leading blocks of a sequence, as far as its tokens go."""
        chain = self._chains.setdefault(sequence, [])
        if len(chain) < num_blocks:
            start = len(chain) * self._block_size
            prompt = sequence.request.prompt_ids
            stop = num_blocks * self._block_size
            tokens = [*prompt[start:stop], *sequence.output[max(start - len(prompt), 0) : max(stop - len(prompt), 0)]]
            parent = chain[-1] if chain else self._root(sequence.request.namespace)
            chain += block_keys(tokens, b"", self._block_size, parent=parent)
        return chain[:num_blocks]

    def begin(self, sequence: Sequence) -> bool:
        """Look for a request's prefix; whether it has to wait for bytes before it is queued."""
        keys = self.keys_of(sequence, (sequence.prompt_len - 1) // self._block_size)
        there = self.blocks.of(keys)
        kept, has = self._kept(keys, there), self.blocks.end(there)
        end = self.blocks.end(there.joined(kept))
        if end <= has or self._held_bytes >= MAX_HELD_BYTES:
            return False
        brought = {i: kept[i] for i in self.blocks.lacking(there, end)}
        names = [keys[i] if is_complete else partial_key(keys[i]) for i, is_complete in brought.items()]
        fetch = self.store.fetch(names, self.token_s * self._block_size * (end - has) / len(names))
        if fetch is None:
            return False
        waiting = Waiting(fetch, brought, there, len(fetch.keys) * sum(self._mover.piece_bytes))
        self._loading[sequence] = waiting
        self._held_bytes += waiting.held_bytes
        return True

    def _kept(self, keys: list[bytes], there: There) -> dict[int, bool]:
        """Columns of blocks that a tier may have; True: with the bytes of every group.

        Where all groups keep every block a fetch finds out by itself how far they go.
        """
        if not self.blocks.reaches:
            return {i: True for i, is_there in enumerate(there.whole) if not is_there}
        kept = {}
        for i, key in enumerate(keys):
            if self.store.finds(key):
                kept[i] = True
            elif self.blocks.has_whole and not there.whole[i]:
                if not self.store.finds(partial_key(key)):
                    break
                kept[i] = False
        return kept

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
            load = self._load_of(sequence, waiting)
            if load is not None:
                self._round.loads.append((load, waiting, self.keys_of(sequence, load.upto)))

    def _load_of(self, sequence: Sequence, waiting: Waiting) -> Load | None:
        """What of a prompt can be loaded with what has come; None: nothing that is worth it."""
        request, blocks = sequence.request, self.blocks
        came = dict(list(waiting.brought.items())[: waiting.fetch.num_blocks])
        upto = blocks.end(waiting.there.joined(came))
        if upto <= blocks.end(waiting.there):
            return None
        first = upto if blocks.has_whole else 0  # the cache must have all before it
        while first - 1 in came:
            first -= 1
        complete = [i for i, is_complete in came.items() if is_complete]
        return Load(request.prompt_ids, first, upto, complete, request.namespace, request.tenant)

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
        if self._loan is None and not self.store.is_busy and self._lending.is_crowded(plan.events.num_free):
            self._round.loan = self._lending.lend()

    def follow(self, plan: StepPlan, sequences: Many[Sequence | None]) -> None:
        """Carry out what a plan means for tiers, before its step is dispatched."""
        this, self._round = self._round, _Round()
        events = plan.events
        removed = self.blocks.named(_listed(events.removed))
        self._save([key for name in removed if (key := self.blocks.key_of(name)) is not None])
        for name in removed:
            self.blocks.strike(name)
        is_known = not bool(events.overflow)
        if not is_known:  # an event that is missing may be the end of any of them
            self.blocks.clear()
            self._unsaved.clear()
        gone = set(removed)
        for (load, waiting, keys), loaded in zip(this.loads, this.loaded, strict=True):
            for name, key in self._write(load, waiting, keys, loaded):
                if is_known and name not in gone:
                    self.blocks.enter(name, key)
        if is_known:
            self._note_stored(events.stored, sequences, gone)
        if this.loan is not None:
            self._copy_loan(this.loan)

    def _write(self, load: Load, waiting: Waiting, keys: list[bytes], loaded: Loaded) -> list[tuple[Name, bytes]]:
        """Write loaded blocks to the device, and name them. One evicted in the same plan is written too: whoever has it now writes after it."""
        found, new, blocks = int(loaded.num_found), int(loaded.num_new), self.blocks
        ids = np.full((self._spec.groups, len(keys)), -1, np.int32)
        if blocks.has_whole and new:
            ids[list(self._spec.whole_groups), found : found + new] = loaded.block_ids[found : found + new]
        for number, group in enumerate(self._spec.side_groups):
            ids[group] = np.where(loaded.side_new[number], loaded.side_ids[number], -1)[: len(keys)]
        columns = np.flatnonzero((ids >= 0).any(0)).tolist()
        if not columns:
            return []
        row_of = {column: row for row, column in enumerate(waiting.brought)}
        rows = [row_of[column] for column in columns]
        chosen = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        self._mover.scatter(ids[:, columns], [piece[chosen] for piece in waiting.fetch.take()])
        generations = [loaded.generations, *loaded.side_generations][0 if blocks.has_whole else 1 :]
        return [
            ((part, int(ids[groups[0], i]), int(generations[part][i])), keys[i])
            for part, groups in enumerate(blocks.groups)
            for i in columns
            if ids[groups[0], i] >= 0
        ]

    def _note_stored(self, stored: Any, sequences: Many[Sequence | None], gone: set[Name]) -> None:
        for event in _listed(stored):
            sequence, column = sequences[event[3]] if 0 <= event[3] < len(sequences) else None, event[4]
            for name in self.blocks.named([event]):
                keys = self.keys_of(sequence, column + 1) if sequence is not None and name not in gone else []
                if len(keys) > column:
                    self.blocks.enter(name, keys[column])
                    self._unsaved[keys[column]] = None

    def _copy_loan(self, loan: Any) -> None:
        """Copy lent blocks; the loan ends when the tiers have answered."""
        names = zip(loan[0].tolist(), loan[1].tolist(), strict=True)
        keys = [self.blocks.key_of((0, block, generation)) for block, generation in names]
        chosen = [None if key is None else self._choose(key) for key in keys]
        stored = [key is not None and choice is None for key, choice in zip(keys, chosen, strict=True)]
        missing = [i for i, choice in enumerate(chosen) if choice is not None]
        self._loan = loan, None if missing else stored

        def kept(answers: list[bool]) -> None:
            for i, answer in zip(missing, answers, strict=True):
                stored[i] = answer
            self._loan = loan, stored

        self._copy([choice for choice in chosen if choice is not None], kept)

    # Copying out ------------------------------------------------------------------------------------------------------

    def _choose(self, key: bytes) -> tuple[bytes, tuple[int, ...]] | None:
        """How a block is to be kept: its name in the tiers, and where it is in each part. None: there is no more of it than they have."""
        ids = self.blocks.ids(key)
        if self.store.has(key) or not any(ids):
            return None
        if all(ids):
            return key, ids
        name = partial_key(key)
        return (name, ids) if self.blocks.has_whole and ids[0] and not self.store.has(name) else None

    def _save(self, keys: Many[bytes]) -> None:
        """Copy what is on the device of these blocks and no tier has."""
        self._copy([choice for key in dict.fromkeys(keys) if (choice := self._choose(key)) is not None])
        for key in keys:
            self._unsaved.pop(key, None)

    def _copy(self, chosen: list[tuple[bytes, tuple[int, ...]]], kept: Callable[[list[bool]], None] | None = None) -> None:
        """Copy blocks. `kept` hears of all at once, and only of at most as many as are moved at once."""
        ids = np.zeros((self._spec.groups, len(chosen)), np.int32)
        for part, groups in enumerate(self.blocks.groups):
            ids[list(groups)] = [where[part] for _, where in chosen]
        for some, pieces in self._mover.gather(ids):
            self.store.save([name for name, _ in chosen[some]], pieces, kept)

    def reuse(self, sequence: Sequence, cached_len: int) -> None:
        """A prefix was found on the device: it is worth keeping. It is copied when the step has been dispatched."""
        count = min(cached_len // self._block_size, REUSED_BLOCKS)
        self._reused.update(dict.fromkeys(self.keys_of(sequence, count)))

    def catch_up(self) -> None:
        """Copy what was reused, before the next step; what the books name is there until the plan after this."""
        if self._reused:
            reused, self._reused = self._reused, {}
            self._save(list(reused))

    def idle(self) -> None:
        """Nothing runs: copy some of what no tier has."""
        if self._unsaved and not self.store.is_busy:
            self._save(list(self._unsaved)[:IDLE_BLOCKS])

    def clear(self) -> None:
        """Forget which blocks the device has, when the cache was reset; the tiers keep theirs."""
        self.blocks.clear()
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
