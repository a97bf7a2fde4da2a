"""KV memory as one pair of pools a layer, [blocks, kv_heads, block_size, head_dim]: writing, and carrying blocks away as bytes.

Knows slots, blocks and scales. Knows nothing of attention, nor of why a backend stores the element type it does: an integer type stands for
the bits of a floating one (`fp8.BITS`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from octavo_core.specs import KVGroupSpec
from octavo_kernels._src.fp8 import FP8, floating, quantise, to_bits

Pool = Shaped[Array, "blocks kv_heads block_size head_dim"]
Scales = Float32[Array, "blocks kv_heads block_size"]


class Pools(NamedTuple):
    """KV memory of one group, an entry a layer.

    Attributes:
        k, v: Elements; `v` is empty where a latent is both.
        k_scale, v_scale: What elements of a token and head are to be multiplied by; empty unless they are FP8.
    """

    k: tuple[Pool, ...]
    v: tuple[Pool, ...]
    k_scale: tuple[Scales, ...] = ()
    v_scale: tuple[Scales, ...] = ()


def new_pools(spec: KVGroupSpec, num_blocks: int, dtype: Any) -> Pools:
    """Zeroed memory of elements stored as `dtype`."""
    shape = (num_blocks, spec.kv_heads, spec.block_size, spec.head_dim)
    value_layers = () if spec.kind == "latent" else spec.layers
    k, v = (tuple(jnp.zeros(shape, dtype) for _ in layers) for layers in (spec.layers, value_layers))
    if spec.dtype not in FP8:
        return Pools(k, v)
    k_scale, v_scale = (tuple(jnp.zeros(shape[:3], jnp.float32) for _ in layers) for layers in (spec.layers, value_layers))
    return Pools(k, v, k_scale, v_scale)


def write_pools(
    kv: Pools,
    layer: int,
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    slot_mapping: Int32[Array, " tokens"],
) -> Pools:
    """Store K and V of the step's tokens; of a latent K alone. Cost: the bytes written."""
    num_blocks, _, block_size, _ = kv.k[layer].shape
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size

    def put(pools: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        if not pools:
            return pools
        new = pools[layer].at[block, :, offset].set(to_bits(x, pools[layer].dtype), mode="drop")
        return (*pools[:layer], new, *pools[layer + 1 :])

    if not kv.k_scale:
        return Pools(put(kv.k, k), put(kv.v, v))
    vectors = jnp.stack([k, v] if kv.v else [k])
    elements, scale = quantise(vectors, floating(kv.k[layer].dtype))
    return Pools(put(kv.k, elements[0]), put(kv.v, elements[-1]), put(kv.k_scale, scale[0]), put(kv.v_scale, scale[-1]))


def gather_blocks(kv: Pools, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
    """All layers of each block: K then V (then their scales) of layer 0, of layer 1, … An id outside the pool answers zeros."""
    parts = [x.at[block_ids].get(mode="fill", fill_value=0) for x in _by_layer(kv)]
    return jnp.concatenate([lax.bitcast_convert_type(p, jnp.uint8).reshape(len(block_ids), -1) for p in parts], axis=1)


def scatter_blocks(kv: Pools, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Pools:
    """The inverse of `gather_blocks`; id −1 stores nothing."""
    target = jnp.where(block_ids < 0, kv.k[0].shape[0], block_ids)
    new, first = [], 0
    for x in _by_layer(kv):
        size = math.prod(x.shape[1:]) * x.dtype.itemsize
        wide = (x.dtype.itemsize,) if x.dtype.itemsize > 1 else ()
        values = lax.bitcast_convert_type(data[:, first : first + size].reshape(len(block_ids), *x.shape[1:], *wide), x.dtype)
        new.append(x.at[target].set(values, mode="drop"))
        first += size
    rest = iter([tuple(new[i :: len(new) // len(kv.k)]) for i in range(len(new) // len(kv.k))])
    return Pools(*(next(rest) if kind else () for kind in kv))


def _by_layer(kv: Pools) -> Sequence[Array]:
    """Every pool: of layer 0, of layer 1, …"""
    return [x for pools in zip(*(kind for kind in kv if kind), strict=True) for x in pools]
