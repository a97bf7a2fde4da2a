"""KV memory as one pair of pools a layer, [blocks, kv_heads, block_size, head_dim]: writing, and carrying blocks away as bytes.

Knows slots and blocks. Knows nothing of attention, nor of why a backend stores the element type it does: an unsigned integer type stands for
the bits of a floating one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from octavo_core.specs import KVGroupSpec

Pool = Shaped[Array, "blocks kv_heads block_size head_dim"]


class Pools(NamedTuple):
    """KV memory of one group."""

    k: tuple[Pool, ...]
    v: tuple[Pool, ...]


def new_pools(spec: KVGroupSpec, num_blocks: int, dtype: Any) -> Pools:
    """Zeroed memory."""
    shape = (num_blocks, spec.kv_heads, spec.block_size, spec.head_dim)
    k, v = ([jnp.zeros(shape, dtype) for _ in spec.layers] for _ in range(2))
    return Pools(tuple(k), tuple(v))


def write_pools(
    kv: Pools,
    layer: int,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> Pools:
    """Store K and V of the step's tokens. Cost: the bytes written."""
    num_blocks, _, block_size, _ = kv.k[layer].shape
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    new_k = kv.k[layer].at[block, :, offset].set(_stored(k, kv.k[layer].dtype), mode="drop")
    new_v = kv.v[layer].at[block, :, offset].set(_stored(v, kv.v[layer].dtype), mode="drop")
    return Pools(_replace(kv.k, layer, new_k), _replace(kv.v, layer, new_v))


def gather_blocks(kv: Pools, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
    """All layers of each block: K then V of layer 0, of layer 1, … An id outside the pool answers zeros."""
    parts = [x.at[block_ids].get(mode="fill", fill_value=0) for pair in zip(kv.k, kv.v, strict=True) for x in pair]
    return jnp.concatenate([lax.bitcast_convert_type(p, jnp.uint8).reshape(len(block_ids), -1) for p in parts], axis=1)


def scatter_blocks(kv: Pools, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Pools:
    """The inverse of `gather_blocks`; id −1 stores nothing."""
    layers, dtype = len(kv.k), kv.k[0].dtype
    target = jnp.where(block_ids < 0, kv.k[0].shape[0], block_ids)
    parts = data.reshape(len(block_ids), layers, 2, *kv.k[0].shape[1:], dtype.itemsize)
    values = lax.bitcast_convert_type(parts, dtype)
    new_k = tuple(x.at[target].set(values[:, i, 0], mode="drop") for i, x in enumerate(kv.k))
    new_v = tuple(x.at[target].set(values[:, i, 1], mode="drop") for i, x in enumerate(kv.v))
    return Pools(new_k, new_v)


def _stored(x: Float[Array, "..."], dtype: Any) -> Shaped[Array, "..."]:
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) if dtype == jnp.uint16 else x.astype(dtype)


def _replace(layers: tuple[Array, ...], layer: int, value: Array) -> tuple[Array, ...]:
    return (*layers[:layer], value, *layers[layer + 1 :])
