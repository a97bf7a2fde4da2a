"""A radix tree over token ids whose edges are token lists.

Knows prefixes, locks and recency; verifies every token, because its edges are the tokens. A match splits an edge where the prompt
leaves it, so looking changes the tree, though not what it holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

import numpy as np

SharedLen = Callable[[Sequence[int], int, Sequence[int]], int]
"""From tokens, a place in them and an edge to how many tokens agree from that place on."""


def shared_by_slice(tokens: Sequence[int], at: int, edge: Sequence[int]) -> int:
    """Compare lists whole, then halve: no Python code per token."""
    most = min(len(edge), len(tokens) - at)
    if tokens[at : at + most] == (edge if most == len(edge) else edge[:most]):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        equal = tokens[at + low : at + middle] == edge[low:middle]
        low, high = (middle, high) if equal else (low, middle)
    return low


def shared_by_loop(tokens: Sequence[int], at: int, edge: Sequence[int]) -> int:
    """Compare token by token, as SGLang does at page size 1."""
    shared = 0
    for left, right in zip(tokens[at:], edge, strict=False):
        if left != right:
            break
        shared += 1
    return shared


class Node:
    """An edge and what hangs below it.

    Attributes:
        edge: Tokens from the parent to here.
        ids: One id per page of the edge.
        lock_count: Uses of this node or of one below it; above 0 it stays.
        last_used: Count of operations at the last match or insert through here.
    """

    __slots__ = ("children", "edge", "ids", "last_used", "lock_count", "parent")

    def __init__(self, edge: list[int], ids: np.ndarray, parent: Node | None, last_used: int) -> None:
        self.edge, self.ids, self.parent, self.last_used = edge, ids, parent, last_used
        self.children: dict[Hashable, Node] = {}
        self.lock_count = 0


class RadixTree:
    """Token tree with least-recently-used eviction of whole leaves.

    Args:
        page_size: Tokens per id; prompts are cut to a multiple of it and edges are split only there. 1 gives an id per token.
        shared_len: How tokens are compared with an edge.

    Source: the design of SGLang's RadixCache; ids are NumPy arrays in place of tensors.
    """

    def __init__(self, page_size: int, shared_len: SharedLen = shared_by_slice) -> None:
        self.block_size = page_size
        self._shared_len = shared_len
        self._root = Node([], np.zeros(0, np.int64), None, 0)
        self._num_ids = self._clock = 0

    def __len__(self) -> int:
        return self._num_ids

    def match(self, tokens: Sequence[int]) -> np.ndarray:
        """Ids of the longest held prefix."""
        return self.match_node(tokens)[0]

    def match_node(self, tokens: Sequence[int]) -> tuple[np.ndarray, Node]:
        """Ids of the longest held prefix, and the node it ends at, which can be locked."""
        node, _, path = self._walk(tokens)
        return (np.concatenate(path) if path else self._root.ids), node

    def insert(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """File the full pages of a prompt, one id each; answers how many leading pages were held already and kept their ids."""
        size = self.block_size
        pages = len(tokens) // size
        if len(block_ids) != pages:
            raise ValueError(f"wanted {pages} block ids, one for each full page, got {len(block_ids)}")
        node, at, _ = self._walk(tokens)
        if at < pages * size:
            edge = list(tokens[at : pages * size])
            node.children[self._first(edge, 0)] = Node(edge, np.array(block_ids[at // size :], np.int64), node, self._clock)
        self._num_ids += pages - at // size
        return at // size

    def lock(self, node: Node) -> None:
        """Keep a node and all above it until `unlock`."""
        self._count(node, 1)

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        self._count(node, -1)

    def evict(self, count: int) -> list[int]:
        """Drop leaves, least recently used first, until `count` ids are free or no leaf may go; whole leaves, so often more."""
        gone: list[int] = []
        leaves = [(node.last_used, id(node), node) for node in self._leaves()]
        heapq.heapify(leaves)
        while leaves and len(gone) < count:
            node = heapq.heappop(leaves)[2]
            gone.extend(node.ids.tolist())
            parent = node.parent
            assert parent is not None
            del parent.children[self._first(node.edge, 0)]
            if parent.parent is not None and not parent.children and not parent.lock_count:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        self._num_ids -= len(gone)
        return gone

    def _walk(self, tokens: Sequence[int]) -> tuple[Node, int, list[np.ndarray]]:
        """Follow a prompt as far as it is held, stamping and splitting; where that ends, tokens passed, ids passed."""
        self._clock += 1
        tokens = tokens if isinstance(tokens, list) else list(tokens)
        size, node, at, path = self.block_size, self._root, 0, []
        end = len(tokens) // size * size
        while at < end and (child := node.children.get(self._first(tokens, at))) is not None:
            shared = self._shared_len(tokens, at, child.edge) // size * size
            node = child if shared == len(child.edge) else self._split(child, shared)
            node.last_used = self._clock
            path.append(node.ids)
            at += shared
        return node, at, path

    def _split(self, child: Node, shared: int) -> Node:
        """Cut an edge in two; answers the new upper node. A lock below holds it too."""
        pages, parent = shared // self.block_size, child.parent
        assert parent is not None
        upper = Node(child.edge[:shared], child.ids[:pages], parent, child.last_used)
        upper.lock_count = child.lock_count
        parent.children[self._first(upper.edge, 0)] = upper
        child.edge, child.ids, child.parent = child.edge[shared:], child.ids[pages:], upper
        upper.children[self._first(child.edge, 0)] = child
        return upper

    def _first(self, tokens: Sequence[int], at: int) -> Hashable:
        """What a node's children are found by: their first page."""
        return tokens[at] if self.block_size == 1 else tuple(tokens[at : at + self.block_size])

    def _count(self, node: Node | None, by: int) -> None:
        while node is not None:
            node.lock_count += by
            node = node.parent

    def _leaves(self) -> list[Node]:
        """Leaves that may go."""
        found, todo = [], list(self._root.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            if not node.children and not node.lock_count:
                found.append(node)
        return found
