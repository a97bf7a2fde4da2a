"""The best any cache could do that knew the future.

What is computed. A request needs its path: the blocks of its prompt, or as many leading ones as the pool has. Before it runs some are held;
those are its hits. When it has run, its whole path has been in the pool together with what was kept of the rest. Blocks
that nobody loads are never there. Of all ways to choose what is kept, `FarthestNextUse` has the most hits in full blocks.

Why. Between two uses of a block, either it is kept over all requests in between, which is a hit at the second, or it is not. So choosing what to
keep is choosing intervals, each of which takes one place at every request strictly inside it, where the pool has
`num_blocks` minus the request's own path to give. Going through the requests in order and dropping, whenever there are too
many, the interval that ends last, keeps as many intervals as can be kept: in any other choice the dropped interval can be
exchanged for one that ends earlier without breaking a later limit. The path rule costs nothing: every use of a block uses
its ancestors, so an ancestor's next use is never later than its descendant's, and with the deepest first among equals only
leaves go. Every cache that holds full blocks, verifies prefixes and keeps a running sequence's path is thus bounded
by it: whole prompts, chains and trees, under any policy.

`ToldWhetherAgain` knows less: whether a block will be used again, not when. It shows how much of the optimum is knowledge of
times, which no rule that looks back has; it is a mark, not a bound.

What the optimum does not bound: tokens of partial blocks. A cache that reuses those may find up to one block more per request.
"""

from __future__ import annotations

from octavo_tools.hit_rate.stores import StampedTree, _leading
from octavo_tools.hit_rate.trace import Prompt, Trace

NEVER = 1 << 60


class FarthestNextUse(StampedTree):
    """Belady's rule on paths: the block whose next use is farthest goes first. Must be given the trace's prompts, in order."""

    def __init__(self, num_blocks: int, trace: Trace) -> None:
        super().__init__(num_blocks)
        self._block_size = trace.block_size
        self._next_uses = next_uses(trace)

    def match(self, prompt: Prompt) -> int:
        """Full blocks up to the first that is absent."""
        return _leading(prompt.keys, self.stamps) * self._block_size

    def insert(self, prompt: Prompt) -> None:
        """Evict what is needed and file the path, stamped with its next uses."""
        path = prompt.keys[: self.num_blocks]
        self.make_room(path)
        for depth, (key, at) in enumerate(zip(path, self._next_uses[self.clock], strict=False)):
            self.stamp(key, depth, (0, -at))
        self.clock += 1


class ToldWhetherAgain(FarthestNextUse):
    """Least recently used first, those blocks before all others that the trace never uses again."""

    def insert(self, prompt: Prompt) -> None:
        """Evict what is needed and file the path, stamped with whether it comes back, then with the time."""
        path = prompt.keys[: self.num_blocks]
        self.make_room(path)
        for depth, (key, at) in enumerate(zip(path, self._next_uses[self.clock], strict=False)):
            self.stamp(key, depth, (int(at < NEVER), self.clock))
        self.clock += 1


def next_uses(trace: Trace) -> list[list[int]]:
    """For every block of every prompt, which later prompt has it next, or `NEVER`."""
    coming: dict[int, int] = {}
    found = []
    for at in range(len(trace.prompts) - 1, -1, -1):
        keys = trace.prompts[at].keys
        found.append([coming.get(key, NEVER) for key in keys])
        coming.update(dict.fromkeys(keys, at))
    return found[::-1]
