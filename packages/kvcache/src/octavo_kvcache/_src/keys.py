"""64-bit keys of prefixes as two uint32 lanes: a chain over blocks.

The chain is `key[i] = key[i-1] * FACTOR + fingerprint[i]` modulo 2^32 in each lane. Fingerprints are computed for a whole prompt at once;
the chain itself is two multiplications a block, which a compiled loop (`loops`) does in less time than any scan takes. Not
cryptographic: who relies on a key compares tokens and parent as well. All but `prefix_keys` take NumPy arrays too, for the audit.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from octavo_kvcache._src.loops import peek, peek_row, poke_row

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

    Source: multilinear hashing (Carter and Wegman 1979).
    """
    mixed = _mix(tokens.astype(np.uint32) + _SALT[0])
    multipliers = _multipliers(tokens.shape[-1])
    lanes = [(mixed * multipliers[:, lane]).sum(axis=-1, dtype=np.uint32) for lane in (0, 1)]
    sums = np.stack(lanes, axis=-1) if isinstance(tokens, np.ndarray) else jnp.stack(lanes, axis=-1)
    return _mix(sums + (sums[:, ::-1] >> 7))


def fingerprint_one(tokens: Int32[Array, "rows block_size"], row: Int32[Array, ""]) -> tuple[UInt32[Array, ""], UInt32[Array, ""]]:
    """The fingerprint of one row, computed one token after another, for loops over blocks of whatever size."""
    multipliers = jnp.asarray(_multipliers(tokens.shape[1]))

    def add(place: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        mixed = _mix(peek(tokens, row, place).astype(jnp.uint32) + _SALT[0])
        return sums[0] + mixed * peek(multipliers, place, 0), sums[1] + mixed * peek(multipliers, place, 1)

    low, high = lax.fori_loop(0, tokens.shape[1], add, (jnp.uint32(0), jnp.uint32(0)))
    return _mix(low + (high >> 7)), _mix(high + (low >> 7))


def root_key(namespace: UInt32[Any, "*n 2"]) -> UInt32[Any, "*n 2"]:
    """The key before the first block: a tree of its own for each namespace."""
    return _mix(namespace + _SALT) + namespace[..., ::-1] * FACTOR


def first_mark(token: Int32[Any, "*n"], namespace: UInt32[Any, "*n 2"]) -> Int32[Any, "*n"]:
    """Mark of blocks that begin with this token in this tree; others rarely have the same."""
    return mark(token, (namespace[..., 0].astype(np.int32), namespace[..., 1].astype(np.int32)))


def mark(token: Int32[Any, "*n"], space: tuple[Int32[Any, "*n"], Int32[Any, "*n"]]) -> Int32[Any, "*n"]:
    """The same, with the namespace as it is noted."""
    return token ^ (space[0] + space[1] * FACTOR[0].astype(np.int32))


def prefix_keys(namespace: UInt32[Array, " 2"], prints: UInt32[Array, "blocks 2"]) -> UInt32[Array, "blocks 2"]:
    """The keys of a prefix after each of its blocks."""

    def extend(block: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, key = carry
        key = key * FACTOR + peek_row(prints, block)
        return poke_row(keys, key, block), key

    return lax.fori_loop(0, prints.shape[0], extend, (jnp.zeros_like(prints), root_key(namespace)))[0]


def address(key: UInt32[Any, "*n 2"], buckets: int) -> tuple[Int32[Any, "*n"], UInt32[Any, "*n"]]:
    """Bucket and tag of a key; `buckets` is a power of two."""
    low, high = _mix(key[..., 0]), _mix(key[..., 1])
    return (low & np.uint32(buckets - 1)).astype(np.int32), high ^ (low >> 16)
