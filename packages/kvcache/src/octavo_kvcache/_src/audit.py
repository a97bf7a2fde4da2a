"""Checking a cache's books on the host: every invariant that the operations rely on, recomputed from scratch.

Written with NumPy and loops, on purpose: it shares no code with the operations but the key functions and the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys
from octavo_kvcache._src.state import HOLD, WAYS, CacheState, Layout, RadixState, Sequences, Side, layout_of, num_nodes


def audit(cache: CacheState | RadixState, spec: CacheSpec) -> list[str]:
    """What is wrong with a cache, or with a tree alone, one line each; empty when the books are right.

    Cost: host time linear in the pool; for tests and incident reports, not for the step loop.
    """
    host: Any = jax.device_get(cache)
    if isinstance(host, RadixState):
        return [*_audit_pool(host, num_nodes(spec), _leases_by_hand(host)), *_audit_index(host), *_audit_tree(host)]
    layout = layout_of(spec)
    problems = list(_audit_tables(host, layout, spec))
    if problems:
        return problems
    radix, sequences = host
    found = [*_audit_pool(radix, num_nodes(spec), _leases(radix, sequences, layout)), *_audit_index(radix), *_audit_tree(radix)]
    for number, table in enumerate(layout.side):
        found += _audit_side(f"side group {number}", radix, number, _side_leases(radix.sides[number], sequences, table))
    return [*found, *_audit_sequences(radix, sequences, layout)]


def _leases(radix: RadixState, sequences: Sequences, layout: Layout) -> np.ndarray:
    """Leases on each block: of sequences, those on blocks to copy included, and by hand."""
    nodes = len(radix.leases)
    path = np.bincount(sequences.block_table[layout.whole[0]].ravel(), minlength=nodes)
    leases = path + np.bincount(sequences.tail, minlength=nodes)
    leases[0] = 0
    return leases + _leases_by_hand(radix)


def _leases_by_hand(radix: RadixState) -> np.ndarray:
    """Leases of no sequence on each block: those that end there or at a descendant."""
    ends = radix.holds + radix.lent % 2
    leases = np.zeros(len(ends), np.int64)
    for block in np.flatnonzero(ends).tolist():
        path, at = [block], block
        while radix.is_indexed[at] and (at := int(radix.parent[at])) and at not in path:
            path.append(at)
        leases[path] += ends[block]
    return leases


def _side_leases(side: Side, sequences: Sequences, table: int) -> np.ndarray:
    blocks = len(side.refcount)
    leases = np.bincount(sequences.block_table[table].ravel(), minlength=blocks)
    leases += np.bincount(side.node_block[sequences.tail], minlength=blocks)
    leases[0] = 0
    return leases


def _audit_tables(cache: CacheState, layout: Layout, spec: CacheSpec) -> Iterator[str]:
    sequences, nodes = cache.sequences, num_nodes(spec)
    table = np.asarray(sequences.block_table)
    if np.any((sequences.held < 0) | (sequences.held > spec.max_blocks)):
        yield f"held outside 0..{spec.max_blocks}: {sequences.held}"
    whole = table[list(layout.whole)]
    if np.any((whole < 0) | (whole >= nodes)) or np.any((sequences.tail < 0) | (sequences.tail >= nodes)):
        yield "a block table names a block outside the pool"
    if np.any(whole != whole[0]):
        yield "block tables differ between whole groups"
    inside = np.arange(spec.max_blocks) < np.asarray(sequences.held)[:, None]
    if np.any((whole[0] > 0) != inside):
        yield "a block table is not filled exactly as far as its sequence holds blocks"
    for number, at in enumerate(layout.side):
        blocks = len(cache.radix.sides[number].refcount)
        if np.any((table[at] < 0) | (table[at] >= blocks)) or np.any((table[at] > 0) & ~inside):
            yield f"the table of side group {number} names a block outside its pool or beyond its sequence"


def _audit_pool(radix: RadixState, nodes: int, leases: np.ndarray) -> Iterator[str]:
    counters = radix.read()
    free, indexed, leased = radix.free[: counters.num_free], radix.is_indexed, radix.refcount > 0
    if len(set(free.tolist())) != len(free) or np.any((free < 1) | (free >= nodes)):
        return (yield f"the free list repeats a block or leaves the pool: {free}")
    is_free = np.zeros(nodes, bool)
    is_free[free] = True
    for name, mask in (("leased", leased), ("cached", indexed)):
        if np.any(is_free & mask):
            yield f"{name} blocks stand on the free list: {np.flatnonzero(is_free & mask)}"
    lost = np.flatnonzero(~is_free & ~indexed & ~leased)
    if lost.tolist() != [0]:
        yield f"lost blocks (neither free, cached nor leased) besides block 0: {lost}"
    if np.any(radix.holds < 0) or np.any(leases != radix.refcount):
        yield f"reference counts differ from the leases held at {np.flatnonzero(leases != radix.refcount)}"
    for name, mask, counted in (("used", ~is_free, counters.used), ("evictable", indexed & ~leased, counters.evictable)):
        mask[0] = False
        count = np.bincount(radix.tenant[mask], minlength=radix.num_tenants)
        if count.tolist() != counted.tolist():
            yield f"blocks {name} by tenants are {counted}, counted {count}"


def _audit_side(name: str, radix: RadixState, number: int, leases: np.ndarray) -> Iterator[str]:
    side = radix.sides[number]
    free = side.free[: side.counts[0]]
    is_free = np.zeros(len(side.free), bool)
    is_free[free] = True
    if len(set(free.tolist())) != len(free) or is_free[0]:
        yield f"{name}: the free list repeats a block or holds block 0: {free}"
    if np.any(is_free & ((side.refcount > 0) | (side.owner > 0))):
        yield f"{name}: leased or owned blocks stand on the free list"
    lost = np.flatnonzero(~is_free & (side.refcount == 0) & (side.owner == 0))
    if lost.tolist() != [0]:
        yield f"{name}: lost blocks besides block 0: {lost}"
    if np.any(leases != side.refcount % HOLD) or np.any(side.refcount < 0):
        yield f"{name}: reference counts differ from the leases held at {np.flatnonzero(leases != side.refcount)}"
    held = side.owner[side.refcount >= HOLD]
    if np.any(held == 0) or np.any(radix.refcount[held] == 0):
        yield f"{name}: a block is leased by hand whose node is not"
    idle = int(np.sum((side.owner > 0) & (side.refcount == 0)))
    if idle != side.counts[1]:
        yield f"{name}: {side.counts[1]} blocks are said to be evictable, counted {idle}"
    owned = {int(node): int(block) for node, block in enumerate(side.node_block) if block}
    if owned != {int(node): block for block, node in enumerate(side.owner.tolist()) if node}:
        yield f"{name}: nodes and blocks disagree about who owns what"
    if any(not radix.is_indexed[node] for node in owned):
        yield f"{name}: a node without a prefix owns a block"


def _audit_index(radix: RadixState) -> Iterator[str]:
    flat = np.asarray(radix.index_block).ravel()
    filed = {int(block): at for at, block in enumerate(flat) if block}
    if len(filed) != np.count_nonzero(flat):
        yield "a block is filed twice in the index"
    known = {int(block): int(radix.slot[block]) for block in np.flatnonzero(radix.is_indexed)}
    if filed != known:
        yield f"index and slots disagree: {sorted(set(filed.items()) ^ set(known.items()))}"
    for bucket, (tags, blocks) in enumerate(zip(radix.index_tag, radix.index_block, strict=True)):
        used = tags[blocks > 0].tolist()
        if len(set(used)) != len(used):
            yield f"bucket {bucket} holds a tag twice"


def block_keys(radix: RadixState) -> dict[int, np.ndarray]:
    """Key of each indexed block whose ancestors are indexed, computed parent first."""
    prints = keys.fingerprint(np.asarray(radix.tokens))
    result: dict[int, np.ndarray] = {}
    indexed = np.flatnonzero(radix.is_indexed)
    for block in sorted(indexed.tolist(), key=lambda b: int(radix.depth[b])):
        parent = int(radix.parent[block])
        before = result.get(parent) if parent else keys.root_key(np.asarray(radix.namespace[block]))
        if before is not None:
            result[block] = before * keys.FACTOR + prints[block]
    return result


def _audit_tree(radix: RadixState) -> Iterator[str]:
    known, seen = block_keys(radix), set()
    for block in np.flatnonzero(radix.is_indexed).tolist():
        parent, depth = int(radix.parent[block]), int(radix.depth[block])
        if block not in known:
            yield f"block {block} has no chain of indexed ancestors"
            continue
        bucket, tag = keys.address(known[block][None], radix.index_tag.shape[0])
        slot = int(radix.slot[block])
        if bucket[0] != slot // WAYS or tag[0] != radix.index_tag.ravel()[slot]:
            yield f"block {block} is filed under another key than its own"
        if radix.first[block] != keys.first_mark(radix.tokens[block, 0], radix.namespace[block]):
            yield f"block {block} is said to begin with another token than it does"
        content = (parent, radix.tokens[block].tobytes(), radix.namespace[block].tobytes())
        if content in seen:
            yield f"block {block} repeats a prefix that is cached already"
        seen.add(content)
        yield from _audit_parent(radix, block, parent, depth)


def _audit_parent(radix: RadixState, block: int, parent: int, depth: int) -> Iterator[str]:
    if parent == 0:
        if depth != 0:
            yield f"block {block} of depth {depth} has no parent"
        return
    if radix.depth[parent] != depth - 1 or np.any(radix.namespace[parent] != radix.namespace[block]):
        yield f"block {block} and its parent {parent} disagree about depth or namespace"
    if radix.refcount[parent] < radix.refcount[block]:
        yield f"block {block} is leased more often than its parent {parent}"
    if radix.refcount[parent] == 0 and radix.stamp[parent] < radix.stamp[block]:
        yield f"block {block} was used after its parent {parent}"


def _audit_sequences(radix: RadixState, sequences: Sequences, layout: Layout) -> Iterator[str]:
    known, path_table = block_keys(radix), sequences.block_table[layout.whole[0]]
    for row, (held, committed) in enumerate(zip(sequences.held.tolist(), sequences.committed.tolist(), strict=True)):
        blocks = path_table[row, :held].tolist()
        if len(set(blocks)) != held:
            yield f"sequence {row} holds a block twice"
        if not 0 <= committed <= held:
            yield f"sequence {row} has committed {committed} of {held} blocks"
            continue
        path = [0, *blocks[:committed]]
        for column, block in enumerate(blocks):
            indexed = bool(radix.is_indexed[block])
            if indexed != (column < committed):
                yield f"block {block} of sequence {row} is {'' if indexed else 'not '}indexed"
            elif indexed and (radix.parent[block] != path[column] or radix.depth[block] != column):
                yield f"block {block} of sequence {row} has another place in the tree"
            elif not indexed and radix.refcount[block] != 1:
                yield f"private block {block} of sequence {row} is shared"
        end = known.get(path[-1]) if committed else None
        if end is not None and np.any(end != sequences.chain[row]):
            yield f"sequence {row} continues from another key than its last block's"
        tail = int(sequences.tail[row])
        if tail and (not radix.is_indexed[tail] or radix.parent[tail] != path[-1]):
            yield f"the block sequence {row} is to copy does not go on from its prefix"
