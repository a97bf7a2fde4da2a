"""The cache as a value: which arrays there are, what each entry means, and the empty cache.

Knows shapes and invariants; knows no operation. Everything about one block is the same index of several arrays, because
XLA updates a separate array in place where it would copy a packed one.

A *node* of the prefix tree is one full block of tokens in every KV group. In *whole* groups (full attention, MLA latent) a
sequence holds every block from its first on, and node `i` owns block `i` of each. *Side* groups (sliding window, recurrent state)
have pools of their own: a node names its block there, or none, since those blocks come and go while the node stays.
Node 0 is the reserved one: it stands for "none", is never handed out and never changes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.specs import CacheSpec
from octavo_kvcache._src import keys
from octavo_kvcache._src.change import Change, change

WAYS: Final = 16
"""Blocks a bucket of the index holds."""

UNINDEXED: Final = -1
"""`slot` of a block that no prefix leads to."""

HOLD: Final = 1 << 16
"""What a lease of no sequence adds to `leases` of the block it ends at, besides the 1 it adds to every block of its path."""

_SCALARS: Final = 5


class Counters(NamedTuple):
    """The scalars of a tree; one array, because every donated array costs a microsecond at the jit's boundary.

    Attributes:
        num_free: Blocks on the free list.
        clock: Ends of leases so far.
        num_stored, num_removed: Events since the last drain.
        floor: Stamp of the block evicted last.
        used: Blocks of each tenant, leased and cached.
        evictable: Cached blocks of each tenant that nobody leases.
    """

    num_free: Int32[Array, ""]
    clock: Int32[Array, ""]
    num_stored: Int32[Array, ""]
    num_removed: Int32[Array, ""]
    floor: Int32[Array, ""]
    used: Int32[Array, " tenants"]
    evictable: Int32[Array, " tenants"]

    @property
    def num_evictable(self) -> Int32[Array, ""]:
        """Cached blocks that nobody leases, whoever's they are."""
        return jnp.sum(self.evictable, dtype=jnp.int32)


class Side(NamedTuple):
    """The pool of a group whose sequences hold their last few blocks only. Block 0 is reserved.

    Attributes:
        node_block: Block of each node; 0 where there is none.
        owner: Node of each block; 0 for blocks that are free or not yet findable.
        refcount, generation: As in the tree; a lease of no sequence adds `HOLD` to the first.
        free: A stack; entries from `counts[0]` on mean nothing.
        counts: Free blocks, and blocks with an owner that nobody leases.
    """

    node_block: Int32[Array, " nodes"]
    owner: Int32[Array, " side_blocks"]
    refcount: Int32[Array, " side_blocks"]
    generation: Int32[Array, " side_blocks"]
    free: Int32[Array, " side_blocks"]
    counts: Int32[Array, "2"]


class RadixState(NamedTuple):
    """The tree of prefixes, its index and the pool its nodes come from. Treat it as opaque; `audit` says whether it is sound.

    Attributes:
        tokens: Token ids of each indexed block.
        first: Mark of the first of them and the namespace: looking for children reads it for every block.
        leases: Leases on the block in the low 16 bits, and in the high ones those of no sequence that end there: pins and allocations by
            hand. One array, because most operations change both.
        lent: Times the block was lent and taken back: odd while it is lent.
        generation: Times the block was handed out.
        parent: Block before it in its prefix; 0 for the first block of a prefix.
        depth: Blocks before it in its prefix.
        slot: Where the index names it, `bucket * WAYS + way`, or `UNINDEXED`.
        stamp: What the eviction policy remembers of it; never below that of a descendant.
        namespace: Tree the block belongs to.
        tenant: Whose share it counts against.
        index_tag: Upper lane of the key in each slot of the index.
        index_block: Block in each slot; 0 where the slot is empty.
        free: A stack of free blocks; entries from `num_free` on mean nothing.
        stored: Events since the last drain: (group, block id, generation, sequence, column).
        removed: The same: (group, block id, generation).
        counters: `Counters`, flattened.
        sides: The side groups, in order.
    """

    tokens: Int32[Array, "nodes block_size"]
    first: Int32[Array, " nodes"]
    leases: Int32[Array, " nodes"]
    lent: Int32[Array, " nodes"]
    generation: Int32[Array, " nodes"]
    parent: Int32[Array, " nodes"]
    depth: Int32[Array, " nodes"]
    slot: Int32[Array, " nodes"]
    stamp: Int32[Array, " nodes"]
    namespace: UInt32[Array, "nodes 2"]
    tenant: Int32[Array, " nodes"]
    index_tag: UInt32[Array, "buckets ways"]
    index_block: Int32[Array, "buckets ways"]
    free: Int32[Array, " nodes"]
    stored: Int32[Array, "max_events 5"]
    removed: Int32[Array, "max_events 3"]
    counters: Int32[Array, " counters"]
    sides: tuple[Side, ...]

    @property
    def num_tenants(self) -> int:
        """Tenants with a share of their own; all are one where nobody has a quota."""
        return (self.counters.shape[0] - _SCALARS) // 2

    def read(self) -> Counters:
        """The scalars by name."""
        tenants = self.num_tenants
        shares = self.counters[_SCALARS:]
        num_free, clock, num_stored, num_removed, floor = self.counters[:_SCALARS]
        return Counters(num_free, clock, num_stored, num_removed, floor, shares[:tenants], shares[tenants:])

    def write(self, **new: Int32[Array, "..."]) -> RadixState:
        """The same tree with some scalars replaced."""
        *scalars, used, evictable = self.read()._replace(**new)
        return self._replace(counters=jnp.concatenate([jnp.stack(scalars), used, evictable]))

    def changed(self, changes: dict[str, list[Change]], *, counters: Int32[Array, " counters"]) -> RadixState:
        """The same tree with other counters and with changes to its arrays, made where they lie."""
        return self._replace(counters=counters, **change(self._asdict(), changes))

    @property
    def refcount(self) -> Int32[Any, " nodes"]:
        """Leases on each block."""
        return self.leases & (HOLD - 1)

    @property
    def holds(self) -> Int32[Any, " nodes"]:
        """Leases of no sequence that end at each block."""
        return self.leases >> 16

    @property
    def is_indexed(self) -> Bool[Any, " nodes"]:
        """Blocks a prefix leads to."""
        return self.slot != UNINDEXED


class Sequences(NamedTuple):
    """What each sequence leases.

    Attributes:
        block_table: Blocks each leases, in order; 0 beyond `held`, and in side groups for blocks given up. The first axis has an entry
            for each KV group, and one more in front, of nodes, where no group is whole.
        held: Blocks of tokens each has room for.
        committed: Leading blocks of each that are indexed.
        sealed: Nothing more of the sequence is indexed, for want of room in a bucket.
        chain: Key of the sequence's last committed block (of its namespace before the first).
        namespace: Tree the sequence reads and extends.
        tenant: Whose share its blocks count against.
        prompt_len: Tokens each was admitted with.
        tail: Block of which the first tokens are the sequence's next ones, leased until its copy is planned; 0 for none.
    """

    block_table: Int32[Array, "tables sequences max_blocks"]
    held: Int32[Array, " sequences"]
    committed: Int32[Array, " sequences"]
    sealed: Bool[Array, " sequences"]
    chain: UInt32[Array, "sequences 2"]
    namespace: UInt32[Array, "sequences 2"]
    tenant: Int32[Array, " sequences"]
    prompt_len: Int32[Array, " sequences"]
    tail: Int32[Array, " sequences"]


class CacheState(NamedTuple):
    """Everything a cache remembers: the tree, and what sequences lease of it."""

    radix: RadixState
    sequences: Sequences


class Layout(NamedTuple):
    """How the groups of a spec lie in the state. Static.

    Attributes:
        whole: Tables of whole groups; the first of them is the path of nodes. Never empty.
        side: Tables of side groups.
        reach: For each side group, blocks before the current one that it looks back to.
        offset: Tables before that of group 0: 1 where the path is no group's.
    """

    whole: tuple[int, ...]
    side: tuple[int, ...]
    reach: tuple[int, ...]
    offset: int


def layout_of(spec: CacheSpec) -> Layout:
    """The layout of a spec's groups."""
    offset = 0 if spec.whole_groups else 1
    return Layout(spec.whole_groups or (0,), tuple(g + offset for g in spec.side_groups), spec.reaches, offset)


def num_nodes(spec: CacheSpec) -> int:
    """Nodes of the tree, the reserved one included.

    Every sequence holds as many blocks in one whole group as in another, so the smallest pool bounds them all; what larger pools
    have beyond it stays free for ever. Where no group is whole a node costs no KV: there are enough for every sequence to be as long
    as it may, and for four prefixes of each block.
    """
    if spec.whole_groups:
        return min(spec.num_blocks[g] for g in spec.whole_groups)
    return 1 + spec.max_blocks * spec.max_sequences + 4 * max(spec.num_blocks)


def num_buckets(spec: CacheSpec) -> int:
    """Buckets of the index: a power of two, so that at most a quarter to a half of the slots is in use."""
    return 1 << max(0, (num_nodes(spec) * 4 // WAYS - 1).bit_length())


def empty_radix(spec: CacheSpec, *, max_events: int = 1024, num_tenants: int = 1) -> RadixState:
    """Nothing cached, every block free.

    Args:
        spec: Sizes; `max_sequences` does not matter here.
        max_events: Events of each kind kept between two drains.
        num_tenants: Tenants whose blocks are counted apart.
    """
    nodes, buckets = num_nodes(spec), num_buckets(spec)
    zeros = [jnp.zeros(nodes, jnp.int32) for _ in range(7)]
    return RadixState(
        tokens=jnp.zeros((nodes, spec.block_size), jnp.int32),
        first=zeros[0],
        leases=zeros[1],
        lent=zeros[6],
        generation=zeros[2],
        parent=zeros[3],
        depth=zeros[4],
        slot=jnp.full(nodes, UNINDEXED, jnp.int32),
        stamp=zeros[5],
        namespace=jnp.zeros((nodes, 2), jnp.uint32),
        tenant=jnp.zeros(nodes, jnp.int32),
        index_tag=jnp.zeros((buckets, WAYS), jnp.uint32),
        index_block=jnp.zeros((buckets, WAYS), jnp.int32),
        free=jnp.arange(nodes, dtype=jnp.int32)[::-1],
        stored=jnp.zeros((max_events, 5), jnp.int32),
        removed=jnp.zeros((max_events, 3), jnp.int32),
        counters=jnp.zeros(_SCALARS + 2 * num_tenants, jnp.int32).at[0].set(nodes - 1),
        sides=tuple(_empty_side(spec.num_blocks[table - layout_of(spec).offset], nodes) for table in layout_of(spec).side),
    )


def _empty_side(blocks: int, nodes: int) -> Side:
    owner, refcount, generation = (jnp.zeros(blocks, jnp.int32) for _ in range(3))
    free = jnp.arange(blocks, dtype=jnp.int32)[::-1]
    return Side(jnp.zeros(nodes, jnp.int32), owner, refcount, generation, free, jnp.array([blocks - 1, 0], jnp.int32))


def empty(spec: CacheSpec, max_events: int, num_tenants: int) -> CacheState:
    """No sequences, nothing cached, every block free."""
    sequences, layout = spec.max_sequences, layout_of(spec)
    return CacheState(
        empty_radix(spec, max_events=max_events, num_tenants=num_tenants),
        Sequences(
            block_table=jnp.zeros((layout.offset + spec.groups, sequences, spec.max_blocks), jnp.int32),
            held=jnp.zeros(sequences, jnp.int32),
            committed=jnp.zeros(sequences, jnp.int32),
            sealed=jnp.zeros(sequences, bool),
            chain=keys.root_key(jnp.zeros((sequences, 2), jnp.uint32)),
            namespace=jnp.zeros((sequences, 2), jnp.uint32),
            tenant=jnp.zeros(sequences, jnp.int32),
            prompt_len=jnp.zeros(sequences, jnp.int32),
            tail=jnp.zeros(sequences, jnp.int32),
        ),
    )
