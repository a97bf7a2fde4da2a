"""Checking a cache's books on the host: every invariant that the operations rely on, recomputed from scratch.

Written with NumPy and loops, on purpose: it shares no code with the operations but the key functions.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys
from octavo_kvcache._src.state import UNINDEXED, WAYS, CacheState, num_nodes


def audit(cache: CacheState, spec: CacheSpec) -> list[str]:
    """What is wrong with the cache, one line each; empty when the books are right.

    Cost: host time linear in the pool; for tests and incident reports, not for the step loop.
    """
    host: CacheState = jax.device_get(cache)
    problems = list(_audit_tables(host, spec))
    if problems:
        return problems
    return [*_audit_pool(host, spec), *_audit_index(host), *_audit_tree(host), *_audit_sequences(host)]


def _audit_tables(cache: CacheState, spec: CacheSpec) -> Iterator[str]:
    nodes, table = num_nodes(spec), np.asarray(cache.block_table)
    if np.any((cache.held < 0) | (cache.held > spec.max_blocks)):
        yield f"held outside 0..{spec.max_blocks}: {cache.held}"
    if np.any((table < 0) | (table >= nodes)):
        yield "a block table names a block outside the pool"
    if np.any(table != table[0]):
        yield "block tables differ between groups"
    inside = np.arange(spec.max_blocks) < np.asarray(cache.held)[:, None]
    if np.any((table[0] > 0) != inside):
        yield "a block table is not filled exactly as far as its sequence holds blocks"


def _audit_pool(cache: CacheState, spec: CacheSpec) -> Iterator[str]:
    nodes, counters = num_nodes(spec), cache.read()
    free, indexed, leased = cache.free[: counters.num_free], cache.slot != UNINDEXED, cache.refcount > 0
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
    leases = np.bincount(cache.block_table[0].ravel(), minlength=nodes)
    leases[0] = 0
    if np.any(leases != cache.refcount):
        yield f"reference counts differ from the leases held at {np.flatnonzero(leases != cache.refcount)}"
    idle = int(np.sum(indexed & ~leased))
    if idle != counters.num_evictable:
        yield f"num_evictable is {counters.num_evictable}, counted {idle}"


def _audit_index(cache: CacheState) -> Iterator[str]:
    flat = np.asarray(cache.index_block).ravel()
    filed = {int(block): at for at, block in enumerate(flat) if block}
    if len(filed) != np.count_nonzero(flat):
        yield "a block is filed twice in the index"
    known = {int(block): int(cache.slot[block]) for block in np.flatnonzero(cache.slot != UNINDEXED)}
    if filed != known:
        yield f"index and slots disagree: {sorted(set(filed.items()) ^ set(known.items()))}"
    for bucket, (tags, blocks) in enumerate(zip(cache.index_tag, cache.index_block, strict=True)):
        used = tags[blocks > 0].tolist()
        if len(set(used)) != len(used):
            yield f"bucket {bucket} holds a tag twice"


def block_keys(cache: CacheState) -> dict[int, np.ndarray]:
    """Key of each indexed block whose ancestors are indexed, computed parent first."""
    prints = keys.fingerprint(np.asarray(cache.tokens))
    result: dict[int, np.ndarray] = {}
    indexed = np.flatnonzero(cache.slot != UNINDEXED)
    for block in sorted(indexed.tolist(), key=lambda b: int(cache.depth[b])):
        parent = int(cache.parent[block])
        before = result.get(parent) if parent else keys.root_key(np.asarray(cache.namespace[block]))
        if before is not None:
            result[block] = before * keys.FACTOR + prints[block]
    return result


def _audit_tree(cache: CacheState) -> Iterator[str]:
    known, seen = block_keys(cache), set()
    for block in np.flatnonzero(cache.slot != UNINDEXED).tolist():
        parent, depth = int(cache.parent[block]), int(cache.depth[block])
        if block not in known:
            yield f"block {block} has no chain of indexed ancestors"
            continue
        bucket, tag = keys.address(known[block][None], cache.index_tag.shape[0])
        slot = int(cache.slot[block])
        if bucket[0] != slot // WAYS or tag[0] != cache.index_tag.ravel()[slot]:
            yield f"block {block} is filed under another key than its own"
        content = (parent, cache.tokens[block].tobytes(), cache.namespace[block].tobytes())
        if content in seen:
            yield f"block {block} repeats a prefix that is cached already"
        seen.add(content)
        yield from _audit_parent(cache, block, parent, depth)


def _audit_parent(cache: CacheState, block: int, parent: int, depth: int) -> Iterator[str]:
    if parent == 0:
        if depth != 0:
            yield f"block {block} of depth {depth} has no parent"
        return
    if cache.depth[parent] != depth - 1 or np.any(cache.namespace[parent] != cache.namespace[block]):
        yield f"block {block} and its parent {parent} disagree about depth or namespace"
    if cache.refcount[parent] < cache.refcount[block]:
        yield f"block {block} is leased more often than its parent {parent}"
    if cache.refcount[parent] == 0 and cache.last_used[parent] < cache.last_used[block]:
        yield f"block {block} was used after its parent {parent}"


def _audit_sequences(cache: CacheState) -> Iterator[str]:
    known = block_keys(cache)
    for row, (held, committed) in enumerate(zip(cache.held.tolist(), cache.committed.tolist(), strict=True)):
        blocks = cache.block_table[0, row, :held].tolist()
        if len(set(blocks)) != held:
            yield f"sequence {row} holds a block twice"
        if not 0 <= committed <= held:
            yield f"sequence {row} has committed {committed} of {held} blocks"
            continue
        path = [0, *blocks[:committed]]
        for column, block in enumerate(blocks):
            indexed = bool(cache.slot[block] != UNINDEXED)
            if indexed != (column < committed):
                yield f"block {block} of sequence {row} is {'' if indexed else 'not '}indexed"
            elif indexed and (cache.parent[block] != path[column] or cache.depth[block] != column):
                yield f"block {block} of sequence {row} has another place in the tree"
            elif not indexed and cache.refcount[block] != 1:
                yield f"private block {block} of sequence {row} is shared"
        end = known.get(path[-1]) if committed else None
        if end is not None and np.any(end != cache.chain[row]):
            yield f"sequence {row} continues from another key than its last block's"
