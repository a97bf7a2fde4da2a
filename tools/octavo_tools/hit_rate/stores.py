"""Prefix caches as simulators: what they hold, not what blocks contain.

Knows one sequence at a time: it is matched, its missing blocks are filed, and it ends, before the next one comes. While it runs its own
path is leased and stays. A prompt that is longer than the pool files as many leading blocks as fit.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from typing import Protocol

from octavo_tools.hit_rate.policies import NEW, Policy, Stamp, Use
from octavo_tools.hit_rate.trace import Prompt

URGENT_TOKENS = 4_096
"""Traces carry no priorities: prompts up to this long have priority 1, others 0."""


class PrefixStore(Protocol):
    """A cache as a replay sees it."""

    def match(self, prompt: Prompt) -> int:
        """Leading tokens of the prompt that need not be computed. Changes nothing a later answer depends on."""

    def insert(self, prompt: Prompt) -> None:
        """The sequence that was matched last has run and ended: its prompt's blocks are held now, as far as they fit."""


class WholePrompts:
    """Finds a prompt only if the same whole prompt came before; prompts share nothing. Least recently used first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._room, self._block_size = num_blocks, block_size
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()

    def match(self, prompt: Prompt) -> int:
        """All or nothing."""
        return prompt.prompt_len if self._name(prompt) in self._held else 0

    def insert(self, prompt: Prompt) -> None:
        """Make room for a copy of the prompt; one that is larger than the pool is not held."""
        name, size = self._name(prompt), -(-prompt.prompt_len // self._block_size)
        self._room += self._held.pop(name, 0)
        while self._held and self._room < size:
            self._room += self._held.popitem(last=False)[1]
        if size <= self._room:
            self._held[name] = size
            self._room -= size

    def _name(self, prompt: Prompt) -> tuple[int, int]:
        return (prompt.path[-1] if prompt.path else -1), prompt.prompt_len


class BlockChain:
    """A set of block keys in one queue: blocks join it when their sequence ends, the deepest first, and leave at its other end."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._queue: OrderedDict[int, None] = OrderedDict()

    def match(self, prompt: Prompt) -> int:
        """Full blocks up to the first that is absent."""
        return _leading(prompt.keys, self._queue) * self._block_size

    def insert(self, prompt: Prompt) -> None:
        """Move the path to the young end."""
        for key in reversed(prompt.keys[: self._num_blocks]):
            self._queue[key] = None
            self._queue.move_to_end(key)
        while len(self._queue) > self._num_blocks:
            self._queue.popitem(last=False)


class StampedTree:
    """Blocks with stamps, smallest (stamp, -depth) first out.

    A heap has an entry for every stamp a block ever had; entries that are no longer true are skipped.
    """

    def __init__(self, num_blocks: int, lifetime: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.clock = self.floor = 0
        self.stamps: dict[int, Stamp] = {}
        self._lifetime = lifetime
        self._heap: list[tuple[Stamp, int, int]] = []
        self._valued: deque[tuple[int, int, int]] = deque()

    def stamp(self, key: int, depth: int, stamp: Stamp) -> None:
        """Hold a block under a stamp."""
        if self.stamps.get(key) != stamp:
            self.stamps[key] = stamp
            heapq.heappush(self._heap, (stamp, -depth, key))
            if self._lifetime is not None and stamp[0]:
                self._valued.append((stamp[1], -depth, key))

    def make_room(self, path: Collection[int]) -> None:
        """Evict until the absent blocks of a path fit; none of the path itself goes."""
        self._expire()
        leased, aside = set(path), []
        surplus = len(self.stamps) + sum(key not in self.stamps for key in leased) - self.num_blocks
        while surplus > 0:
            entry = heapq.heappop(self._heap)
            rank, _, key = entry
            if key not in self.stamps or self._rank(self.stamps[key]) != rank:
                continue
            if key in leased:
                aside.append(entry)
                continue
            self.floor = self.stamps.pop(key)[1]
            surplus -= 1
        for entry in aside:
            heapq.heappush(self._heap, entry)

    def _rank(self, stamp: Stamp) -> Stamp:
        """A stamp as eviction sees it now: its value counts only while it is fresh."""
        expired = self._lifetime is not None and stamp[1] < self.clock - self._lifetime
        return (0, stamp[1]) if expired else stamp

    def _expire(self) -> None:
        """Put blocks whose value has just ceased to count where they belong now."""
        while self._valued and self._rank((1, self._valued[0][0]))[0] == 0:
            time, depth, key = self._valued.popleft()
            if self.stamps.get(key, NEW)[1] == time:
                heapq.heappush(self._heap, ((0, time), depth, key))


class RadixStore(StampedTree):
    """A tree of blocks from which leaves go in the order of a policy.

    Args:
        num_blocks: Of the pool.
        block_size: In tokens.
        policy: Which leaf goes.
        keep_tails: Also hold a prompt's last, partial block, as a leaf that fills a block of the pool, and reuse tokens of
            the block where a prompt leaves the tree, by copy-on-write. Off, only full blocks are held and found.
    """

    def __init__(self, num_blocks: int, block_size: int, policy: Policy, *, keep_tails: bool = False) -> None:
        super().__init__(num_blocks, policy.lifetime)
        self._block_size, self._policy, self._keep_tails = block_size, policy, keep_tails
        self._tail_lens: dict[int, int] = {}

    def match(self, prompt: Prompt) -> int:
        """Full blocks up to the first that is absent, and with tails the tokens of that one that are held."""
        blocks = _leading(prompt.keys, self.stamps)
        return blocks * self._block_size + (self._tail_match(prompt, blocks) if self._keep_tails else 0)

    def insert(self, prompt: Prompt) -> None:
        """Evict what is needed, file the path, stamp it."""
        path = self._path(prompt)
        self.clock += 1
        is_new = any(key not in self.stamps for key in path)
        self.make_room(path)
        urgent = prompt.prompt_len <= URGENT_TOKENS
        use = Use(self.clock, self.floor, is_new, len(path), prompt.output_len, priority=int(urgent))
        for depth, key in enumerate(path):
            self.stamp(key, depth, self._policy.touch(self.stamps.get(key, NEW), use))

    def _path(self, prompt: Prompt) -> Sequence[int]:
        """What to hold of a prompt. A partial block's key is its full one's complement, since a full one may stand beside it."""
        if not self._keep_tails or not prompt.tail_len or len(prompt.keys) >= self.num_blocks:
            return prompt.keys[: self.num_blocks]
        tail = ~prompt.tail_key
        held_len = self._tail_lens[tail] if tail in self.stamps else 0
        self._tail_lens[tail] = max(held_len, prompt.tail_len)
        return [*prompt.keys, tail]

    def _tail_match(self, prompt: Prompt, blocks: int) -> int:
        """Tokens held of the block after the first `blocks`."""
        is_tail = blocks == len(prompt.keys)
        key, wanted = (prompt.tail_key, prompt.tail_len) if is_tail else (prompt.keys[blocks], self._block_size)
        if is_tail and wanted and key in self.stamps:
            return wanted
        return min(wanted, self._tail_lens[~key]) if wanted and ~key in self.stamps else 0


def _leading(keys: Sequence[int], held: Collection[int]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))
