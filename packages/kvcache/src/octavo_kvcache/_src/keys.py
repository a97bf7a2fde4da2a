"""64-bit keys of prefixes as two uint32 lanes: a chain over blocks, computed for a whole prompt at once.

The chain is `key[i] = key[i-1] * FACTOR + fingerprint[i]` modulo 2^32 in each lane: a first-order recurrence, which an associative
scan computes (Blelloch 1990, "Prefix sums and their applications"). Not cryptographic: who relies on a key compares
tokens and parent as well. All but `chain` take NumPy arrays too, for the audit.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from octavo_core.native import each, is_kernel
from octavo_kvcache._src.scan import prefix_sum

FACTOR: Final = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)
_SALT: Final = np.array([0x243F6A88, 0x85A308D3], np.uint32)


def _mix(x: Any) -> Any:
    """The 32-bit finaliser of MurmurHash3 (Appleby), a bijection in which every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _multipliers(block_size: int) -> np.ndarray:
    index = np.arange(2 * block_size, dtype=np.uint32).reshape(block_size, 2)
    return _mix((index + np.uint32(1)) * np.uint32(0x9E3779B9)) | np.uint32(1)


def fingerprint(tokens: Int32[Any, "blocks block_size"]) -> UInt32[Any, "blocks 2"]:
    """Two lanes per block of tokens: two sums of the mixed tokens with odd multipliers, modulo 2^32.

    Source: multilinear hashing (Carter and Wegman 1979), as an integer matrix product.
    """
    if is_kernel():
        factors = _multipliers(tokens.shape[-1]).T

        def of_block(i: Array) -> Array:
            mixed = _mix(tokens[i].astype(np.uint32) + _SALT[0])
            return jnp.stack([jnp.sum(mixed * factor, dtype=jnp.uint32) for factor in factors])

        sums = each(tokens.shape[0], of_block)
        return _mix(sums + (sums[:, ::-1] >> 7))
    mixed = _mix(tokens.astype(np.uint32) + _SALT[0])
    sums = (mixed.astype(np.int32) @ _multipliers(tokens.shape[-1]).view(np.int32)).astype(np.uint32)
    return _mix(sums + (sums[:, ::-1] >> 7))


def root_key(namespace: UInt32[Any, "*n 2"]) -> UInt32[Any, "*n 2"]:
    """The key before the first block: a tree of its own for each namespace."""
    return _mix(namespace + _SALT) + namespace[..., ::-1] * FACTOR


def first_mark(token: Int32[Any, "*n"], namespace: UInt32[Any, "*n 2"]) -> Int32[Any, "*n"]:
    """Mark of blocks that begin with this token in this tree; others rarely have the same."""
    return (token.astype(np.uint32) ^ (namespace[..., 0] + namespace[..., 1] * FACTOR[0])).astype(np.int32)


def prefix_keys(namespace: UInt32[Array, " 2"], prints: UInt32[Array, "blocks 2"]) -> UInt32[Array, "blocks 2"]:
    """`chain` of one run that begins a prefix."""
    powers, inverses = _powers(prints.shape[0])
    sums = prefix_sum((prints * inverses[:-1]).T).T
    return sums * powers[:-1] + root_key(namespace) * powers[1:]


def chain(
    first: Int32[Array, " blocks"], before: UInt32[Array, "blocks 2"], prints: UInt32[Array, "blocks 2"]
) -> UInt32[Array, "blocks 2"]:
    """The key of each block, where the blocks of several prefixes follow one another in runs.

    `first` is the index of the first block of a block's run, `before` the key before the run. Dividing fingerprint `i` by `FACTOR**i`
    turns the recurrence into one prefix sum, from which the sum before the run is subtracted.
    """
    powers, inverses = _powers(prints.shape[0])
    scaled = prints * inverses[:-1]
    sums = prefix_sum(scaled.T).T
    within = sums - (sums - scaled)[first]
    place = jnp.arange(prints.shape[0], dtype=jnp.int32)
    return within * powers[:-1] + before * jnp.asarray(powers)[place - first + 1]


def _powers(n: int) -> tuple[np.ndarray, np.ndarray]:
    """FACTOR**i and its inverse modulo 2^32, i = 0..n."""
    inverse = np.array([pow(int(factor), -1, 1 << 32) for factor in FACTOR], np.uint32)
    up, down = (np.cumprod(np.broadcast_to(f, (n, 2)), axis=0, dtype=np.uint32) for f in (FACTOR, inverse))
    one = np.ones((1, 2), np.uint32)
    return np.concatenate([one, up]), np.concatenate([one, down])


def address(key: UInt32[Any, "blocks 2"], buckets: int) -> tuple[Int32[Any, " blocks"], UInt32[Any, " blocks"]]:
    """Bucket and tag of a key; `buckets` is a power of two."""
    low, high = _mix(key[:, 0]), _mix(key[:, 1])
    return (low & np.uint32(buckets - 1)).astype(np.int32), high ^ (low >> 16)
