"""Filing full blocks in the index, or finding that equal ones are filed already.

Three loops over a list of blocks, parent first, each of which XLA compiles to machine code (`loops`): note what the blocks hold, decide where
each is filed, keep the books. A block is either *known* (an equal prefix is in the index) or *new*. It *fails* when its bucket is full or holds
another prefix under the same tag; then nothing after it in its sequence is filed either, because a child without a findable
parent could never be found. Knows no sequences: callers move their leases to the canonical blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_kvcache._src import index, keys, pool
from octavo_kvcache._src.loops import peek, poke, settled
from octavo_kvcache._src.state import (
    BLOCK,
    DEPTH,
    FIRST,
    FREE,
    GENERATION,
    LEASES,
    NUM_FREE,
    NUM_STORED,
    PARENT,
    SLOT,
    SPACE_HIGH,
    SPACE_LOW,
    STAMP,
    TAG,
    UNINDEXED,
    WAYS,
    RadixState,
    Side,
)

_FAILED = -1
"""In place of a parent: it could not be filed."""


class Work(NamedTuple):
    """The list. What stands from `length` on means nothing.

    Attributes:
        own: The block that holds each one's KV, leased once and private.
        base: Where a run of blocks that follow one another begins, the canonical block before it, 0 for none; elsewhere −1.
        row: Who files it, for events; −1 nobody.
        column: Blocks before it in its prefix.
        length: How many there are.
    """

    own: Int32[Array, " work"]
    base: Int32[Array, " work"]
    row: Int32[Array, " work"]
    column: Int32[Array, " work"]
    length: Int32[Array, ""]


def note(
    radix: RadixState,
    work: Work,
    blocks: Int32[Array, "rows block_size"],
    source: Int32[Array, " work"],
    before: UInt32[Array, "work 2"],
    namespace: UInt32[Array, "work 2"],
) -> tuple[RadixState, UInt32[Array, "work 2"]]:
    """Note what blocks hold. Of a private block that means nothing, so that it may be noted before it is known whether it can be filed.

    Args:
        radix: The tree.
        work: The list.
        blocks: Tokens.
        source: Which of them each block holds.
        before: Key before each one's run.
        namespace: Of each.

    Returns:
        The tree, and the keys.
    """
    spaces = namespace.astype(jnp.int32)

    def one(n: Array, carry: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
        tokens, columns, chain, low, high = carry
        own, at, begins, space = (
            peek(work.own, n),
            peek(source, n),
            peek(work.base, n) >= 0,
            (peek(spaces, n, 0), peek(spaces, n, 1)),
        )
        more = keys.fingerprint_one(blocks, at)
        low = jnp.where(begins, peek(before, n, 0), low) * keys.FACTOR[0] + more[0]
        high = jnp.where(begins, peek(before, n, 1), high) * keys.FACTOR[1] + more[1]
        first = keys.mark(peek(blocks, at, 0), space)
        values = ((FIRST, first), (DEPTH, peek(work.column, n)), (STAMP, 0), (SPACE_LOW, space[0]), (SPACE_HIGH, space[1]))
        for field, value in values:
            columns = poke(columns, value, field, own)
        tokens = lax.fori_loop(0, tokens.shape[1], lambda place, t: poke(t, peek(blocks, at, place), own, place), tokens)
        return tokens, columns, poke(poke(chain, low, n, 0), high, n, 1), low, high

    none = jnp.uint32(0)
    start = (radix.tokens, radix.columns, jnp.zeros_like(before), none, none)
    tokens, columns, chain, _, _ = lax.fori_loop(0, work.length, one, start)
    return radix._replace(tokens=tokens, columns=columns), chain


class _Place(NamedTuple):
    """What the index says of a block: the canonical block, 0 where it fails; and its slot to be written, which and what."""

    block: Int32[Array, ""]
    way: Int32[Array, ""]
    tag: Int32[Array, ""]
    filed: Int32[Array, ""]


def file(
    radix: RadixState, work: Work, chain: UInt32[Array, "work 2"], leases: int = 1
) -> tuple[RadixState, Int32[Array, " work"]]:
    """File blocks that are noted. Where one is known, its own block is freed and its one lease goes to the canonical block.

    Args:
        radix: The tree.
        work: The blocks.
        chain: Their keys.
        leases: What stands for the one lease on each.

    Returns:
        The tree, and the canonical block of each; 0 where it could not be filed, and beyond the last.
    """
    radix, block = _decide(radix, work, chain)
    return _keep_books(radix, work, block, leases), block


def _decide(radix: RadixState, work: Work, chain: UInt32[Array, "work 2"]) -> tuple[RadixState, Int32[Array, " work"]]:
    buckets, tags = keys.address(chain, radix.buckets.shape[0])
    tags = tags.astype(jnp.int32)

    def one(n: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        index, columns, block, parent = carry
        own, base, bucket, tag = peek(work.own, n), peek(work.base, n), peek(buckets, n), peek(tags, n)
        parent = jnp.where(base >= 0, base, parent)
        seen = radix._replace(buckets=index, columns=columns)
        place = settled(lambda: _place(seen, own, parent, bucket, tag), n)
        index = poke(poke(index, place.tag, bucket, TAG, place.way), place.filed, bucket, BLOCK, place.way)
        slot = jnp.where(place.block == own, bucket * WAYS + place.way, UNINDEXED)
        columns = poke(poke(columns, parent, PARENT, own), slot, SLOT, own)
        return index, columns, poke(block, place.block, n), jnp.where(place.block > 0, place.block, _FAILED)

    start = (radix.buckets, radix.columns, jnp.zeros_like(work.own), jnp.int32(0))
    index, columns, block, _ = lax.fori_loop(0, work.length, one, start)
    return radix._replace(buckets=index, columns=columns), block


def _place(
    radix: RadixState, own: Int32[Array, ""], parent: Int32[Array, ""], bucket: Int32[Array, ""], tag: Int32[Array, ""]
) -> _Place:
    columns, fits = radix.columns, parent != _FAILED
    found, vacant = index.look(radix, bucket, tag)
    known = (found > 0) & (peek(columns, PARENT, found) == parent) & _same_owner(radix, found, own)
    for column in (SPACE_LOW, SPACE_HIGH):
        known &= peek(columns, column, found) == peek(columns, column, own)
    known = _same_tokens(radix, found, own, known)
    new = (found == 0) & (vacant < WAYS) & fits & ((parent == 0) | _same_owner(radix, jnp.maximum(parent, 0), own))
    way = jnp.minimum(vacant, WAYS - 1)
    return _Place(
        jnp.where(known, found, jnp.where(new, own, 0)),
        way,
        jnp.where(new, tag, peek(radix.buckets, bucket, TAG, way)),
        jnp.where(new, own, peek(radix.buckets, bucket, BLOCK, way)),
    )


def _keep_books(radix: RadixState, work: Work, block: Int32[Array, " work"], leases: int) -> RadixState:
    """Move leases to canonical blocks, free what is not canonical, count, and tell of what is new."""

    def one(n: Array, radix: RadixState) -> RadixState:
        own, canonical = peek(work.own, n), peek(block, n)
        new, known = canonical == own, (canonical > 0) & (canonical != own)
        found = jnp.where(known, canonical, 0)

        def read() -> tuple[Array, ...]:
            fields = peek(radix.columns, LEASES, found), peek(radix.columns, GENERATION, own)
            return *fields, jnp.asarray(pool.tenant_of(radix, own), jnp.int32)

        others, generation, tenant = settled(read, own)
        own_leases = jnp.where(known, 0, jnp.where(new, 1, leases))
        freed, columns = known.astype(jnp.int32), poke(radix.columns, own_leases, LEASES, own)
        columns = poke(columns, others + freed, LEASES, found)
        columns = poke(columns, own, FREE, peek(radix.counters, NUM_FREE))  # counts if it is freed
        radix = pool.log(radix._replace(columns=columns), NUM_STORED, 0, own, generation, peek(work.row, n), peek(work.column, n))
        woken = jnp.where(others == 0, freed, 0)
        return pool.count(radix, tenant, free=freed, used=-freed, evictable=-woken, stored=new.astype(jnp.int32))

    return lax.fori_loop(0, work.length, one, radix)


def _same_tokens(radix: RadixState, block: Int32[Array, ""], other: Int32[Array, ""], asked: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether two blocks have the same tokens, if that is asked: one token after another, since a row may be long."""

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        place, _ = carry
        return place + 1, peek(radix.tokens, block, place) == peek(radix.tokens, other, place)

    size = radix.tokens.shape[1]
    return lax.while_loop(lambda c: c[1] & (c[0] < size), one, (jnp.int32(0), asked))[1]


def _same_owner(radix: RadixState, block: Int32[Array, ""], other: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether two blocks are of the same tenant: what one may lose must not lead to another's blocks."""
    return jnp.asarray(pool.tenant_of(radix, block) == pool.tenant_of(radix, other))


def adopt(
    radix: RadixState, number: int, work: Work, node: Int32[Array, " work"], own: Int32[Array, " work"]
) -> tuple[RadixState, Int32[Array, " work"]]:
    """Give nodes the blocks that sequences hold in a side group, or sequences the blocks that nodes have already.

    Args:
        radix: The tree, with the blocks filed.
        number: Which side group.
        work: What was filed.
        node: The canonical block of each; 0 where it could not be filed.
        own: Block of each in that group, leased once; 0 where it was given up, or where nothing was filed.

    Returns:
        The tree, and the block each holds now.
    """
    side = radix.sides[number]
    has = (node > 0) & (own > 0)
    vacant = has & (side.node_block[node] == 0)
    node_block = side.node_block.at[jnp.where(vacant, node, side.node_block.shape[0])].set(own, mode="drop")
    kept = jnp.where(has, node_block[node], own)
    installed, lost, blocks = vacant & (kept == own), has & (kept != own), side.owner.shape[0]
    refcount = side.refcount.at[jnp.where(lost, own, blocks)].set(0, mode="drop")
    side = side._replace(
        node_block=node_block,
        owner=side.owner.at[jnp.where(installed, own, blocks)].set(node, mode="drop"),
        refcount=refcount.at[jnp.where(lost, kept, blocks)].add(1, mode="drop"),
    )
    side = count_idle(pool.give_back_side(side, lost, own))
    radix = pool.log_all(radix, NUM_STORED, installed, 1 + number, own, side.generation[own], work.row, work.column)
    return radix._replace(sides=(*radix.sides[:number], side, *radix.sides[number + 1 :])), kept


def count_idle(side: Side) -> Side:
    """Count the blocks with an owner that nobody leases."""
    idle = jnp.sum((side.owner > 0) & (side.refcount == 0), dtype=jnp.int32)
    return side._replace(counts=side.counts.at[1].set(idle))
