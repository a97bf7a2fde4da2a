"""Prefix sums and selections written for XLA on CPU: few instructions, so that they compile and run fast at these sizes.

XLA unrolls a generic scan into hundreds of slices; comparing all pairs of some dozens is one fused loop.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

_WORD = 32


def prefix_sum(x: Any) -> Any:
    """Inclusive sums along the last axis of int32 or uint32, wrapping."""
    n = x.shape[-1]
    if n <= 4 * _WORD:
        return jnp.sum(jnp.where(np.tri(n, dtype=bool), x[..., None, :], 0), axis=-1, dtype=x.dtype)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % _WORD)])
    within = prefix_sum(padded.reshape(*x.shape[:-1], -1, _WORD))
    total = within[..., -1]
    before = prefix_sum(total) - total
    return (within + before[..., None]).reshape(padded.shape)[..., :n]


def rank_in(end: Int32[Array, " runs"], j: Int32[Array, " items"]) -> Int32[Array, " items"]:
    """The run each item falls in, where run `r` covers `end[r-1] <= j < end[r]`; the number of runs for items beyond the last."""
    return jnp.sum(end <= j[:, None], axis=1, dtype=jnp.int32)


def first_set(mask: Bool[Array, " n"], size: int) -> tuple[Int32[Array, " size"], Int32[Array, ""]]:
    """Indices of the first `size` set entries, padded with 0, and how many are set in all.

    Descends from counts per 1,024 entries to counts per 32 to entries: no pass over `mask` but one sum.
    """
    bits = jnp.pad(mask, (0, -mask.shape[0] % _WORD**2)).reshape(-1, _WORD, _WORD)
    per_word = jnp.sum(bits, axis=2, dtype=jnp.int32)
    per_page = jnp.sum(per_word, axis=1)
    end = prefix_sum(per_page)
    j = jnp.arange(size, dtype=jnp.int32)
    page = jnp.minimum(rank_in(end, j), end.shape[0] - 1)
    word, left = _descend(per_word[page], j - (end - per_page)[page])
    bit, _ = _descend(bits[page, word].astype(jnp.int32), left)
    return jnp.where(j < end[-1], (page * _WORD + word) * _WORD + bit, 0), end[-1]


def _descend(
    counts: Int32[Array, "items 32"], nth: Int32[Array, " items"]
) -> tuple[Int32[Array, " items"], Int32[Array, " items"]]:
    """Which of 32 children holds the `nth` set entry (from 0), and which of that child's it is."""
    end = prefix_sum(counts)
    child = jnp.minimum(jnp.sum(end <= nth[:, None], axis=1, dtype=jnp.int32), _WORD - 1)
    before = jnp.take_along_axis(end - counts, child[:, None], axis=1, mode="clip")[:, 0]
    return child, nth - before
