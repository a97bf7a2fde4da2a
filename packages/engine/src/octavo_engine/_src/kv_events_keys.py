"""From (group, block, generation) to keys: what a step's cache events say in words that mean something outside the process.

Keeps the key chain of each sequence as far as events needed it, and the key of every block that was announced. Owned by the
publishing thread: hashing thousands of tokens is no work for the step loop. A `Sequence` only ever appends to its tokens, and
a block is announced after they are known, so reading them here is safe while the loop goes on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence as Many
from typing import Final
from weakref import WeakKeyDictionary

from octavo_core.keys import block_keys
from octavo_core.specs import KVGroupSpec
from octavo_engine._src.kv_events_wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event
from octavo_engine._src.sequence import Sequence

Block = tuple[int, int, int]
"""(group, block id, generation)."""

_KINDS: Final = {"full": "full_attention", "window": "sliding_window", "latent": "mla_attention", "state": "mamba"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """A block that can be found from now on: block `column` of the tokens of `sequence`."""

    block: Block
    sequence: Sequence
    column: int


@dataclasses.dataclass(frozen=True)
class Change:
    """What one step changed in the cache.

    Attributes:
        time_s: Seconds since 1970.
        is_incomplete: The cache could not list all of it.
        num_lost: Changes right before this one that were dropped.
    """

    time_s: float
    stored: list[Stored]
    removed: list[Block]
    is_incomplete: bool
    num_lost: int


class KeyBook:
    """Translates changes, in the order in which they happened.

    Args:
        groups: Kinds are announced with the blocks.
        block_size: Tokens in a block.
        as_ints: Announce the last 8 bytes of a key as an integer.
    """

    def __init__(self, groups: Many[KVGroupSpec], block_size: int, *, as_ints: bool) -> None:
        self._groups, self._block_size, self._as_ints = tuple(groups), block_size, as_ints
        self._chains: WeakKeyDictionary[Sequence, list[bytes]] = WeakKeyDictionary()
        self._keys: dict[Block, bytes] = {}
        self._copies: Counter[tuple[int, bytes]] = Counter()

    def translate(self, change: Change, *, is_after_loss: bool) -> list[Event]:
        """The events of one batch: what was stored, parents first, then what was removed.

        After a loss followers cannot know what they hold: they are told to drop everything, and a later block may then have a
        parent they do not know. A block that is removed while another block with its key remains is not announced.
        """
        events: list[Event] = []
        if change.is_incomplete or is_after_loss:
            self._keys.clear()
            self._copies.clear()
            events.append(AllBlocksCleared())
        if change.is_incomplete:  # what was left out may be the end of something listed
            return events
        events += [self._announce(run) for run in _runs(change.stored)]
        return events + self._withdraw(change.removed)

    def _announce(self, run: list[Stored]) -> BlockStored:
        sequence, first, last = run[0].sequence, run[0].column, run[-1].column
        chain = self._chain(sequence, last + 1)
        for stored in run:
            self._keys[stored.block] = key = chain[stored.column]
            self._copies[stored.block[0], key] += 1
        group = run[0].block[0]
        spec = self._groups[group]
        return BlockStored(
            block_hashes=[self._hash(key) for key in chain[first : last + 1]],
            parent_block_hash=self._hash(chain[first - 1]) if first else None,
            token_ids=_tokens(sequence, first * self._block_size, (last + 1) * self._block_size),
            block_size=self._block_size,
            group_idx=group,
            kv_cache_spec_kind=_KINDS[spec.kind],
            kv_cache_spec_sliding_window=spec.window,
        )

    def _chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Keys of at least so many leading blocks."""
        chain = self._chains.setdefault(sequence, [])
        if len(chain) < num_blocks:
            tokens = _tokens(sequence, len(chain) * self._block_size, num_blocks * self._block_size)
            parent = chain[-1] if chain else None
            chain += block_keys(tokens, sequence.request.namespace, self._block_size, parent=parent)
        return chain

    def _withdraw(self, removed: list[Block]) -> list[BlockRemoved]:
        gone: dict[int, list[BlockHash]] = {}
        for block in removed:
            key = self._keys.pop(block, None)
            if key is None:
                continue
            name = (block[0], key)
            self._copies[name] -= 1
            if not self._copies[name]:
                del self._copies[name]
                gone.setdefault(block[0], []).append(self._hash(key))
        return [BlockRemoved(block_hashes=hashes, group_idx=group) for group, hashes in gone.items()]

    def _hash(self, key: bytes) -> BlockHash:
        return int.from_bytes(key[-8:], "big") if self._as_ints else key


def _runs(stored: list[Stored]) -> list[list[Stored]]:
    """Blocks that follow each other in one sequence and group; runs that begin earlier in their sequence first.

    Whoever stored a block's parent stored it in a run that begins before the block does, so parents come first.
    """
    runs: list[list[Stored]] = []
    for one in sorted(stored, key=lambda s: (s.block[0], s.sequence.order, s.column)):
        last = runs[-1][-1] if runs else None
        follows = last is not None and last.sequence is one.sequence and last.block[0] == one.block[0]
        if follows and last is not None and last.column + 1 == one.column:
            runs[-1].append(one)
        else:
            runs.append([one])
    return sorted(runs, key=lambda run: run[0].column)


def _tokens(sequence: Sequence, start: int, stop: int) -> list[int]:
    prompt = sequence.request.prompt_ids
    output = sequence.output[max(start - len(prompt), 0) : max(stop - len(prompt), 0)]
    return [*prompt[start:stop], *output]
