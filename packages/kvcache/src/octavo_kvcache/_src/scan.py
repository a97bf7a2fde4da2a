"""Prefix sums and selections written for XLA on CPU: few instructions, so that they compile and run fast at these sizes.

XLA unrolls a generic scan into hundreds of slices; comparing all pairs of some dozens is one fused loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

from octavo_core.native import each, is_kernel, loop, one_kernel, put

WORD: Final = 32
"""Entries of a packed mask in a word."""

_LANES = 16


F = TypeVar("F", bound=Callable[..., Any])


def as_kernel(function: F, entries: int, *, most: int = 1024) -> F:
    """`one_kernel` where lists are so short that XLA shares no operation on them among threads, which fails to compile in a kernel."""
    return one_kernel(function) if entries <= most else function


def prefix_sum(x: Any) -> Any:
    """Inclusive sums along the last axis of int32 or uint32, wrapping.

    A product with a triangle of ones in each run of 32, and again over the runs' totals: integer products are exact, and one of a few
    vectorised loops that XLA calls on a CPU.
    """
    n = x.shape[-1]
    if is_kernel():
        return _sums_in_turn(x)
    runs = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % WORD)]).reshape(*x.shape[:-1], -1, WORD)
    within = (runs.astype(jnp.int32) @ np.tri(WORD, dtype=np.int32).T).astype(x.dtype)
    if n <= WORD:
        return within[..., 0, :n]
    total = within[..., -1]
    before = prefix_sum(total) - total
    return (within + before[..., None]).reshape(*x.shape[:-1], -1)[..., :n]


def _sums_in_turn(x: Any) -> Any:
    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total = carry[1] + lax.dynamic_index_in_dim(x, i, x.ndim - 1)
        return lax.dynamic_update_slice_in_dim(carry[0], total, i, x.ndim - 1), total

    return loop(x.shape[-1], add, (jnp.zeros_like(x), jnp.zeros_like(x[..., :1])))[0]


def first_true(mask: Bool[Array, "*n last"]) -> Int32[Array, "*n"]:
    """Index of the first true entry along the last axis, its length where there is none. A plain minimum: `argmax` reduces pairs, slowly."""
    n = mask.shape[-1]
    return jnp.min(jnp.where(mask, np.arange(n, dtype=np.int32), np.int32(n)), axis=-1)


def count_true(mask: Bool[Array, "*n last"]) -> Int32[Array, "*n"]:
    """True entries along a short last axis, as an integer product."""
    if is_kernel():
        return jnp.sum(mask, axis=-1, dtype=jnp.int32)
    return mask.astype(jnp.int32) @ np.ones(mask.shape[-1], np.int32)


def rank_in(end: Int32[Array, " runs"], j: Int32[Array, " items"]) -> Int32[Array, " items"]:
    """The run each item falls in, where run `r` covers `end[r-1] <= j < end[r]`; the number of runs for items beyond the last."""
    if is_kernel():
        return each(j.shape[0], lambda i: count_true(end <= j[i]))
    return jnp.sum(end <= j[:, None], axis=1, dtype=jnp.int32)


def some_set(mask: Bool[Array, " n"], size: int) -> tuple[Int32[Array, " size"], Int32[Array, ""]]:
    """Indices of up to `size` set entries in a fixed order of their own, padded with 0, and how many are set in all.

    Packs the mask into words: no pass over `mask` but the packing.
    """
    return unpacked(packed(mask), size)


def packed(mask: Bool[Array, " n"]) -> UInt32[Array, " words"]:
    """The mask as bits. Bit `b` of word `w` is entry `b * words + w`, so that packing combines long rows."""
    return _fold([part.astype(jnp.uint32) << np.uint32(b) for b, part in enumerate(_parts(mask, WORD))], jnp.bitwise_or)


def lowest_of_groups(x: Int32[Array, " n"]) -> Int32[Array, " words"]:
    """The smallest of the entries that `packed` puts in one word."""
    return _fold(_parts(x, WORD, np.int32(2**31 - 1)), jnp.minimum)


def unpacked(word: UInt32[Array, " words"], size: int) -> tuple[Int32[Array, " size"], Int32[Array, ""]]:
    """Indices of up to `size` set entries of a packed mask, by word and bit, padded with 0, and how many are set in all.

    Sums the words' population counts, finds the word of each wanted entry by bisection and the bit in it by halving; in a kernel, where
    a turn of a loop costs little, one bit after another.

    Source: rank and select on bit vectors (Jacobson 1989), without the tables.
    """
    if is_kernel():
        return _unpacked_in_turn(word, size), count_packed(word)
    count = lax.population_count(word).astype(jnp.int32)
    end = prefix_sum(count)
    j = jnp.arange(size, dtype=jnp.int32)
    at = _bisect(end, j)
    bit = nth_set(word[at], j - (end[at] - count[at]))
    return jnp.where(j < end[-1], bit * word.shape[0] + at, 0), end[-1]


def _unpacked_in_turn(word: UInt32[Array, " words"], size: int) -> Int32[Array, " size"]:
    def of_word(w: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def lowest(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            left, found, num_found = carry
            bit = np.int32(WORD - 1) - lax.clz(left & (~left + np.uint32(1))).astype(jnp.int32)
            return left & (left - np.uint32(1)), put(found, (num_found,), bit * word.shape[0] + w), num_found + 1

        return lax.while_loop(lambda c: (c[0] != 0) & (c[2] < size), lowest, (word[w], *carry))[1:]

    return loop(word.shape[0], of_word, (jnp.zeros(size, jnp.int32), jnp.int32(0)))[0]


def count_packed(word: UInt32[Array, " words"]) -> Int32[Array, ""]:
    """How many entries of a packed mask are set."""
    return jnp.sum(lax.population_count(word).astype(jnp.int32), dtype=jnp.int32)


def count_set(mask: Bool[Array, " n"]) -> Int32[Array, ""]:
    """How many entries are set."""
    some = _fold([part.astype(jnp.int32) for part in _parts(mask, _LANES)], jnp.add)
    return jnp.sum(_fold(_parts(some, _LANES), jnp.add), dtype=jnp.int32)


def _parts(x: Shaped[Array, " n"], parts: int, fill: Any = 0) -> list[Shaped[Array, " n_of_part"]]:
    """Equal parts, the last ones filled up. Only those are padded, behind a barrier: padding in the loop that reads them makes it a slow one."""
    size = -(-x.shape[0] // parts)
    cut = [x[i * size : (i + 1) * size] for i in range(parts)]
    return [
        part if part.shape[0] == size else lax.optimization_barrier(jnp.pad(part, (0, size - part.shape[0]), constant_values=fill))
        for part in cut
    ]


def _fold(parts: list[Any], combine: Any) -> Any:
    """Combine arrays entry by entry, written out: XLA makes one vectorised loop of it, where it compiles a reduction to a scalar one."""
    return functools.reduce(combine, parts)


def _bisect(end: Int32[Array, " words"], j: Int32[Array, " size"]) -> Int32[Array, " size"]:
    """For each `j` the first word that ends beyond it; the last word where none does."""
    at = jnp.zeros_like(j)
    for step in (1 << k for k in reversed(range((end.shape[0] - 1).bit_length()))):
        probe = at + step
        past = (probe < end.shape[0]) & (end[jnp.minimum(probe, end.shape[0] - 1) - 1] <= j)
        at = jnp.where(past, probe, at)
    return at


def nth_set(word: UInt32[Array, " size"], nth: Int32[Array, " size"]) -> Int32[Array, " size"]:
    """Position of the `nth` set bit (from 0) of each word."""
    position = jnp.zeros_like(nth)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & np.uint32((1 << half) - 1)).astype(jnp.int32)
        above = nth >= below
        nth, position = jnp.where(above, nth - below, nth), jnp.where(above, position + half, position)
        word = jnp.where(above, word >> half, word)
    return position
