"""FP8 KV: how a vector becomes 8-bit elements and one scale.

The scale belongs to a token and a KV head, so what is stored of a token depends on nothing else: not on its chunk, its neighbours or
its block. It need not make the greatest element the greatest value: anywhere in the octave above that, other elements meet other values,
and the best of 32 scales leaves two thirds of the squared error. Attention never widens a vector by its scale: a logit is multiplied by its key's, a probability by its value's, which is one
multiplication a token instead of `head_dim`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

FP8: Final = ("float8_e4m3fn", "float8_e5m2")
"""Element types that are stored with scales."""
BITS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "int8"}
"""Integers that stand for the bits of a floating type, one each."""
_FLOATS: Final = {bits: name for name, bits in BITS.items()}
SCALE_BYTES: Final = 4
SCALES: Final = 32
"""Tried for each vector, evenly over a factor of 2: beyond that elements round as before."""
_STEPS: Final = tuple(2 ** (i / SCALES) for i in range(SCALES))


def quantise(
    x: Float[Array, "*vectors head_dim"], dtype: Any
) -> tuple[Float[Array, "*vectors head_dim"], Float32[Array, "*vectors"]]:
    """Elements and scales: `elements * scale` is `x`, each element rounded to `dtype`. Of `SCALES` scales the one that rounds best.

    The same vector gives the same bytes among any others, whatever is compiled: no decision rests on a sum of floats.
    """
    wide, limit = x.astype(jnp.float32), float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    greatest = jnp.max(jnp.abs(wide), axis=-1)
    # A scale below float32's normal numbers would be taken for zero.
    greatest = jnp.where(greatest >= limit * 2.0**-126, greatest, limit)
    scale = greatest / limit * jnp.asarray(_STEPS, jnp.float32)[_best_step(wide / greatest[..., None], dtype)]
    return jnp.clip(wide / scale[..., None], -limit, limit).astype(dtype), scale


def _best_step(x: Float32[Array, "*vectors head_dim"], dtype: Any) -> Int32[Array, "*vectors"]:
    """Which of `_STEPS` times the smallest scale leaves the least squared error, of vectors whose greatest element is 1.

    Distances to the nearest element are integers, so that their sum is exact in every order. Elements below `dtype`'s normal numbers
    count as if it had no smallest: they are 15,000 times smaller than the greatest.
    """
    about = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    drop = 23 - about.nmant
    top = 2 * math.frexp(float(about.max))[0]
    steps = jnp.asarray(_STEPS, jnp.float32)
    parts = jnp.abs(x).reshape(*x.shape[:-1], math.gcd(x.shape[-1], 8), -1, 1)
    bits = lax.bitcast_convert_type(parts * (top / steps), jnp.int32)
    low = bits & ((1 << drop) - 1)
    smaller = jnp.minimum(127 - (bits >> 23) + drop - 11, 31)
    distance = lax.shift_right_logical(jnp.minimum(low, (1 << drop) - low), smaller)
    # In two parts: XLA on a CPU makes a chain of kernels of one long sum.
    error = (distance * distance).sum(-3).sum(-2).astype(jnp.float32) * steps**2
    # Bits of floats that are not negative are in their order: the lowest ones give way to the number of the scale.
    ranked = (lax.bitcast_convert_type(error, jnp.int32) & -SCALES) | jnp.arange(SCALES)
    return jnp.min(ranked, axis=-1) & (SCALES - 1)


def floating(dtype: Any) -> str:
    """Name of the floating type that elements stored as `dtype` are of."""
    name = jnp.dtype(dtype).name
    return _FLOATS.get(name, name)


def to_bits(x: Float[Array, "..."], dtype: Any) -> Shaped[Array, "..."]:
    """Store as `dtype`: a floating type, or the integer of `BITS` that stands for one."""
    name = floating(dtype)
    return x.astype(dtype) if name == jnp.dtype(dtype).name else lax.bitcast_convert_type(x.astype(name), dtype)


def from_bits(x: Shaped[Array, "..."]) -> Float32[Array, "..."]:
    """The inverse, in float32."""
    name = floating(x.dtype)
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return (x if name == x.dtype.name else lax.bitcast_convert_type(x, jnp.dtype(name))).astype(jnp.float32)


def token_bytes(kv_heads: int, head_dim: int, dtype: str) -> int:
    """Bytes of K and V of one token in one layer, scales included."""
    scales = SCALE_BYTES if dtype in FP8 else 0
    return 2 * kv_heads * (head_dim * jnp.dtype(dtype).itemsize + scales)
