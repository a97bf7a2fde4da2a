"""The bucketed table from keys to blocks: look many keys up at once, find room for many.

A bucket is one row of `WAYS` slots; a block remembers its slot, so removal clears it without a search and leaves no tombstone. At most
one block stands in a bucket under a given tag, which makes a look-up deterministic. The table proposes; the
caller verifies, because equal tags do not prove equal prefixes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from octavo_core.native import each, is_kernel
from octavo_kvcache._src.scan import count_true, nth_set
from octavo_kvcache._src.state import WAYS, RadixState

_BITS: Final = np.uint32(1) << np.arange(WAYS, dtype=np.uint32)


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
    equal = same_rows(radix.tokens, block, tokens) & same_rows(radix.namespace, block, namespace)
    return Probe(block, (block > 0) & equal)


def same_rows(
    array: Shaped[Array, "rows width"], row: Int32[Array, " keys"], wanted: Shaped[Array, "keys width"]
) -> Bool[Array, " keys"]:
    """Whether these rows of an array are the ones wanted."""
    if is_kernel():
        return each(row.shape[0], lambda i: jnp.all(array[row[i]] == wanted[i]))
    return jnp.all(array[row] == wanted, axis=1)


def room(
    radix: RadixState, bucket: Int32[Array, " keys"], new: Bool[Array, " keys"]
) -> tuple[Bool[Array, " keys"], Int32[Array, " keys"]]:
    """Which of the `new` keys fit in their buckets, and their ways; keys of one bucket get different ways, in order."""
    j = jnp.arange(bucket.shape[0], dtype=jnp.int32)
    rank = each(bucket.shape[0], lambda i: count_true((bucket == bucket[i]) & new & (j < i)))
    vacant = jnp.sum(jnp.where(radix.index_block[bucket] == 0, _BITS, 0), axis=1, dtype=jnp.uint32)
    fits = new & (rank < lax.population_count(vacant).astype(jnp.int32))
    return fits, jnp.where(fits, nth_set(vacant, rank), WAYS - 1)
