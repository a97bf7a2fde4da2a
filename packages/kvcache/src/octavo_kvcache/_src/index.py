"""The bucketed table from keys to blocks.

A bucket is one row of `WAYS` slots; a block remembers its slot, so removal clears it without a search and leaves no tombstone. At most
one block stands in a bucket under a given tag, which makes a look-up deterministic. The table proposes; the
caller verifies, because equal tags do not prove equal prefixes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_kvcache._src.loops import peek
from octavo_kvcache._src.state import BLOCK, SPACE_HIGH, SPACE_LOW, TAG, WAYS, RadixState


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
    namespace: UInt32[Array, " 2"],
) -> Probe:
    """Look all keys up at once and compare what is found with what was asked for."""
    slots = radix.buckets[bucket]
    block = jnp.max(jnp.where(slots[:, TAG] == tag.astype(jnp.int32)[:, None], slots[:, BLOCK], 0), axis=1)
    space = namespace.astype(jnp.int32)
    equal = jnp.all(radix.tokens[block] == tokens, axis=1)
    equal &= (radix.columns[SPACE_LOW, block] == space[0]) & (radix.columns[SPACE_HIGH, block] == space[1])
    return Probe(block, (block > 0) & equal)


def look(radix: RadixState, bucket: Int32[Array, ""], tag: Int32[Array, ""]) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
    """The block filed under one key, 0 for none; and the first vacant way of its bucket, `WAYS` for none."""

    def one(way: Array, seen: tuple[Array, Array]) -> tuple[Array, Array]:
        found, vacant = seen
        block = peek(radix.buckets, bucket, BLOCK, way)
        found = jnp.where((peek(radix.buckets, bucket, TAG, way) == tag) & (block > 0), block, found)
        return found, jnp.where((block == 0) & (vacant == WAYS), way, vacant)

    return lax.fori_loop(0, WAYS, one, (jnp.int32(0), jnp.int32(WAYS)))
