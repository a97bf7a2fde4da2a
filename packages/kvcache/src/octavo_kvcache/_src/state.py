"""The cache as a value: which arrays there are, what each entry means, and the empty cache.

Knows shapes and invariants; knows no operation. Everything about one block is the same index of several arrays, because
XLA updates a separate array in place where it would copy a packed one.

A node of the prefix tree is one full block of tokens in every KV group, and shares its id with its blocks: node `i` owns
block `i` of each group. Node 0 is the reserved one: it stands for "none", is never handed out and never changes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys

WAYS: Final = 16
"""Blocks a bucket of the index holds."""

UNINDEXED: Final = -1
"""`slot` of a block that no prefix leads to."""


class Counters(NamedTuple):
    """Where the scalars of a cache stand; one array, because every donated array costs a microsecond at the jit's boundary."""

    num_free: Int32[Array, ""]
    num_evictable: Int32[Array, ""]
    clock: Int32[Array, ""]
    num_stored: Int32[Array, ""]
    num_removed: Int32[Array, ""]


class CacheState(NamedTuple):
    """Everything a cache remembers. Treat it as opaque; `audit` says whether it is sound.

    Attributes:
        tokens: Token ids of each indexed block.
        refcount: Sequences that lease the block.
        generation: Times the block was handed out.
        parent: Block before it in its prefix; 0 for the first block of a prefix.
        depth: Blocks before it in its prefix.
        slot: Where the index names it, `bucket * WAYS + way`, or `UNINDEXED`.
        last_used: Clock when a lease on it last ended.
        namespace: Tree the block belongs to.
        index_tag: Upper lane of the key in each slot of the index.
        index_block: Block in each slot; 0 where the slot is empty.
        free: A stack of free blocks; entries from `num_free` on mean nothing.
        block_table: Blocks each sequence leases, in order; 0 beyond `held`.
        held: Blocks each sequence leases.
        committed: Leading blocks of each sequence that are indexed.
        sealed: Nothing more of the sequence is indexed, for want of room in a bucket.
        chain: Key of the sequence's last committed block (of its namespace before the first).
        sequence_namespace: Tree the sequence reads and extends.
        stored, removed: Events since the last drain: (group, block id, generation).
        counters: `Counters`, stacked.
    """

    tokens: Int32[Array, "blocks block_size"]
    refcount: Int32[Array, " blocks"]
    generation: Int32[Array, " blocks"]
    parent: Int32[Array, " blocks"]
    depth: Int32[Array, " blocks"]
    slot: Int32[Array, " blocks"]
    last_used: Int32[Array, " blocks"]
    namespace: UInt32[Array, "blocks 2"]
    index_tag: UInt32[Array, "buckets ways"]
    index_block: Int32[Array, "buckets ways"]
    free: Int32[Array, " blocks"]
    block_table: Int32[Array, "groups sequences max_blocks"]
    held: Int32[Array, " sequences"]
    committed: Int32[Array, " sequences"]
    sealed: Bool[Array, " sequences"]
    chain: UInt32[Array, "sequences 2"]
    sequence_namespace: UInt32[Array, "sequences 2"]
    stored: Int32[Array, "max_events 3"]
    removed: Int32[Array, "max_events 3"]
    counters: Int32[Array, " counters"]

    def read(self) -> Counters:
        """The scalars by name."""
        return Counters(*self.counters)

    def write(self, **new: Int32[Array, ""]) -> CacheState:
        """The same cache with some scalars replaced."""
        return self._replace(counters=jnp.stack(self.read()._replace(**new)))


def num_nodes(spec: CacheSpec) -> int:
    """Nodes of the tree, the reserved one included.

    Every sequence holds as many blocks in one group as in another, so the smallest pool bounds them all; what larger pools
    have beyond it stays free for ever.
    """
    return min(spec.num_blocks)


def num_buckets(spec: CacheSpec) -> int:
    """Buckets of the index: a power of two, so that at most a quarter to a half of the slots is in use."""
    return 1 << max(0, (num_nodes(spec) * 4 // WAYS - 1).bit_length())


def empty(spec: CacheSpec, max_events: int) -> CacheState:
    """No sequences, nothing cached, every block free."""
    nodes, buckets, sequences = num_nodes(spec), num_buckets(spec), spec.max_sequences
    counters = jnp.zeros(len(Counters._fields), jnp.int32).at[0].set(nodes - 1)
    return CacheState(
        tokens=jnp.zeros((nodes, spec.block_size), jnp.int32),
        refcount=jnp.zeros(nodes, jnp.int32),
        generation=jnp.zeros(nodes, jnp.int32),
        parent=jnp.zeros(nodes, jnp.int32),
        depth=jnp.zeros(nodes, jnp.int32),
        slot=jnp.full(nodes, UNINDEXED, jnp.int32),
        last_used=jnp.zeros(nodes, jnp.int32),
        namespace=jnp.zeros((nodes, 2), jnp.uint32),
        index_tag=jnp.zeros((buckets, WAYS), jnp.uint32),
        index_block=jnp.zeros((buckets, WAYS), jnp.int32),
        free=jnp.arange(nodes, dtype=jnp.int32)[::-1],
        block_table=jnp.zeros((spec.groups, sequences, spec.max_blocks), jnp.int32),
        held=jnp.zeros(sequences, jnp.int32),
        committed=jnp.zeros(sequences, jnp.int32),
        sealed=jnp.zeros(sequences, bool),
        chain=keys.root_key(jnp.zeros((sequences, 2), jnp.uint32)),
        sequence_namespace=jnp.zeros((sequences, 2), jnp.uint32),
        stored=jnp.zeros((max_events, 3), jnp.int32),
        removed=jnp.zeros((max_events, 3), jnp.int32),
        counters=counters,
    )
