"""Prefix sums and selections written for XLA on CPU: few instructions, so that they compile and run fast at these sizes.

XLA unrolls a generic scan into hundreds of slices; comparing all pairs of some dozens is one fused loop.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped, UInt32

_WORD = 32
_LANES = 16


def prefix_sum(x: Any) -> Any:
    """Inclusive sums along the last axis of int32 or uint32, wrapping.

    A product with a triangle of ones in each run of 32, and again over the runs' totals: integer products are exact, and one of a few
    vectorised loops that XLA calls on a CPU.
    """
    n = x.shape[-1]
    runs = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % _WORD)]).reshape(*x.shape[:-1], -1, _WORD)
    within = (runs.astype(jnp.int32) @ np.tri(_WORD, dtype=np.int32).T).astype(x.dtype)
    if n <= _WORD:
        return within[..., 0, :n]
    total = within[..., -1]
    before = prefix_sum(total) - total
    return (within + before[..., None]).reshape(*x.shape[:-1], -1)[..., :n]


def first_true(mask: Bool[Array, "*n last"]) -> Int32[Array, "*n"]:
    """Index of the first true entry along the last axis, its length where there is none. A plain minimum: `argmax` reduces pairs, slowly."""
    n = mask.shape[-1]
    return jnp.min(jnp.where(mask, np.arange(n, dtype=np.int32), np.int32(n)), axis=-1)


def count_true(mask: Bool[Array, "*n last"]) -> Int32[Array, "*n"]:
    """True entries along a short last axis, as an integer product."""
    return mask.astype(jnp.int32) @ np.ones(mask.shape[-1], np.int32)


def rank_in(end: Int32[Array, " runs"], j: Int32[Array, " items"]) -> Int32[Array, " items"]:
    """The run each item falls in, where run `r` covers `end[r-1] <= j < end[r]`; the number of runs for items beyond the last."""
    return jnp.sum(end <= j[:, None], axis=1, dtype=jnp.int32)


def some_set(mask: Bool[Array, " n"], size: int) -> tuple[Int32[Array, " size"], Int32[Array, ""]]:
    """Indices of up to `size` set entries in a fixed order of their own, padded with 0, and how many are set in all.

    Packs the mask into words, sums their population counts, finds the word of each wanted entry by bisection and the bit in it by
    halving: no pass over `mask` but the packing. Bit `b` of word `w` is entry `b * words + w`, so that packing combines long rows.

    Source: rank and select on bit vectors (Jacobson 1989), without the tables.
    """
    word = _fold([part.astype(jnp.uint32) << np.uint32(b) for b, part in enumerate(_parts(mask, _WORD))], jnp.bitwise_or)
    count = lax.population_count(word).astype(jnp.int32)
    end = prefix_sum(count)
    j = jnp.arange(size, dtype=jnp.int32)
    at = _bisect(end, j)
    bit = _select(word[at], j - (end[at] - count[at]))
    return jnp.where(j < end[-1], bit * word.shape[0] + at, 0), end[-1]


def count_set(mask: Bool[Array, " n"]) -> Int32[Array, ""]:
    """How many entries are set."""
    some = _fold([part.astype(jnp.int32) for part in _parts(mask, _LANES)], jnp.add)
    return jnp.sum(_fold(_parts(some, _LANES), jnp.add), dtype=jnp.int32)


def _parts(x: Shaped[Array, " n"], parts: int) -> list[Shaped[Array, " n_of_part"]]:
    """Equal parts, the last padded with zeros; the barrier keeps the padding out of the loop that reads them."""
    odd = -x.shape[0] % parts
    rows = (lax.optimization_barrier(jnp.pad(x, (0, odd))) if odd else x).reshape(parts, -1)
    return [rows[i] for i in range(parts)]


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


def _select(word: UInt32[Array, " size"], nth: Int32[Array, " size"]) -> Int32[Array, " size"]:
    """Position of the `nth` set bit (from 0) of each word."""
    position = jnp.zeros_like(nth)
    for half in (16, 8, 4, 2, 1):
        below = lax.population_count(word & np.uint32((1 << half) - 1)).astype(jnp.int32)
        above = nth >= below
        nth, position = jnp.where(above, nth - below, nth), jnp.where(above, position + half, position)
        word = jnp.where(above, word >> half, word)
    return position
