"""The bucketed table from keys to blocks: look many keys up at once, enter many, remove many.

A bucket is one row of `WAYS` slots; a block remembers its slot, so removal clears it without a search and leaves no tombstone. At most
one block stands in a bucket under a given tag, which makes a look-up deterministic. The table proposes; the
caller verifies, because equal tags do not prove equal prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_kvcache._src.scan import count_true, first_true, prefix_sum
from octavo_kvcache._src.state import UNINDEXED, WAYS, RadixState


class Probe(NamedTuple):
    """What the index says of some keys.

    Attributes:
        block: The block filed under the key, whoever it may be; 0 for none.
        same: Its tokens and namespace are the ones asked for. Its parent is still to be compared.
    """

    block: Int32[Array, " keys"]
    same: Bool[Array, " keys"]


def probe(
    radix: RadixState,
    bucket: Int32[Array, " keys"],
    tag: UInt32[Array, " keys"],
    tokens: Int32[Array, "keys block_size"],
    namespace: UInt32[Array, "keys 2"],
) -> Probe:
    """Look all keys up at once and compare what is found with what was asked for."""
    blocks = radix.index_block[bucket]
    block = jnp.max(jnp.where(radix.index_tag[bucket] == tag[:, None], blocks, 0), axis=1)
    equal = jnp.all(radix.tokens[block] == tokens, axis=1) & jnp.all(radix.namespace[block] == namespace, axis=1)
    return Probe(block, (block > 0) & equal)


def room(
    radix: RadixState, bucket: Int32[Array, " keys"], new: Bool[Array, " keys"]
) -> tuple[Bool[Array, " keys"], Int32[Array, " keys"]]:
    """Which of the `new` keys fit in their buckets, and their ways; keys of one bucket get different ways, in order."""
    peers = (bucket[:, None] == bucket[None, :]) & new[None, :]
    rank = count_true(jnp.tril(peers, -1))
    vacant = radix.index_block[bucket] == 0
    chosen = vacant & (prefix_sum(vacant.astype(jnp.int32)) == rank[:, None] + 1)
    way = first_true(chosen)
    return new & (way < WAYS), jnp.minimum(way, WAYS - 1)


def enter(
    radix: RadixState,
    new: Bool[Array, " keys"],
    block: Int32[Array, " keys"],
    bucket: Int32[Array, " keys"],
    way: Int32[Array, " keys"],
    tag: UInt32[Array, " keys"],
) -> RadixState:
    """File the `new` blocks in slots that `room` found."""
    row, at = jnp.where(new, bucket, radix.index_block.shape[0]), jnp.where(new, block, radix.slot.shape[0])
    return radix._replace(
        index_tag=radix.index_tag.at[row, way].set(tag, mode="drop"),
        index_block=radix.index_block.at[row, way].set(block, mode="drop"),
        slot=radix.slot.at[at].set(bucket * WAYS + way, mode="drop"),
    )


def remove(radix: RadixState, gone: Bool[Array, " keys"], block: Int32[Array, " keys"]) -> RadixState:
    """Strike the `gone` blocks from the index."""
    slot = radix.slot[block]
    row, at = jnp.where(gone, slot // WAYS, radix.index_block.shape[0]), jnp.where(gone, block, radix.slot.shape[0])
    return radix._replace(
        index_block=radix.index_block.at[row, slot % WAYS].set(0, mode="drop"),
        slot=radix.slot.at[at].set(UNINDEXED, mode="drop"),
    )
