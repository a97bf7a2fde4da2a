"""FP8 KV: how a vector becomes 8-bit elements and one scale.

The scale belongs to a token and a KV head, so what is stored of a token depends on nothing else: not on its chunk, its neighbours or
its block. Attention never widens a vector by its scale: a logit is multiplied by its key's, a probability by its value's, which is one
multiplication a token instead of `head_dim`.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Shaped

FP8: Final = ("float8_e4m3fn", "float8_e5m2")
"""Element types that are stored with scales."""
BITS: Final = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "int8"}
"""Integers that stand for the bits of a floating type, one each."""
_FLOATS: Final = {bits: name for name, bits in BITS.items()}
SCALE_BYTES: Final = 4


def quantise(
    x: Float[Array, "*vectors head_dim"], dtype: Any
) -> tuple[Float[Array, "*vectors head_dim"], Float32[Array, "*vectors"]]:
    """Elements and scales: `elements * scale` is `x`, each element rounded to `dtype`; the greatest element takes the greatest value."""
    wide, limit = x.astype(jnp.float32), float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    greatest = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(greatest > 0, greatest / limit, 1.0)
    return jnp.clip(wide / scale[..., None], -limit, limit).astype(dtype), scale


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
