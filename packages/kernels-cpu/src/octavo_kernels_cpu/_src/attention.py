"""Paged attention in C++: one layout, written and read in place.

Knows the seam and the shapes of the pools; the arithmetic is in `csrc/attention.h`.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec
from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import call

BITS: Final = {"float32": jnp.float32, "bfloat16": jnp.uint16}
MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 24
"""Query heads to a KV head."""


class Pools(NamedTuple):
    """KV memory of one group, an entry a layer; see `csrc/attention.h` for what lies where.

    Attributes:
        k: Feature by feature.
        v: Token by token.
    """

    k: tuple[Shaped[Array, "blocks kv_heads *block"], ...]
    v: tuple[Shaped[Array, "blocks kv_heads *block"], ...]


class CpuAttention:
    """`octavo_core.seams.AttentionBackend` in C++.

    Each token's answer is computed in an order that depends on its own context alone: it is the same to the last bit in a step of
    one row, of many, and in any chunk of a prompt.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.layout_id = "cpu-kd-vt-1"

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> Pools:
        """Zeroed memory.

        Raises:
            NotImplementedError: For groups other than plain full attention, other element types, and sizes that vectors do not divide.
        """
        if spec.kind != "full":
            raise NotImplementedError(f"cpu attention serves full attention, this group is '{spec.kind}'")
        if spec.dtype not in BITS:
            raise NotImplementedError(f"cpu attention stores {' and '.join(BITS)}; this group wants {spec.dtype}")
        if spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM or spec.block_size % 16:
            raise NotImplementedError(
                f"cpu attention wants heads of a multiple of 16, at most {MAX_HEAD_DIM}, and blocks of a multiple of 16; "
                f"these are {spec.head_dim} and {spec.block_size}"
            )
        pair = (2,) if spec.dtype == "bfloat16" else ()
        size, dim = spec.block_size, spec.head_dim
        shapes = ((dim // len((0, *pair)), size, *pair), (size // len((0, *pair)), dim, *pair))
        k, v = (tuple(jnp.zeros((num_blocks, spec.kv_heads, *shape), BITS[spec.dtype]) for _ in spec.layers) for shape in shapes)
        return Pools(k, v)

    def write(
        self,
        kv: Pools,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> Pools:
        """Store K and V of the step's tokens, in place where the pools are donated. Cost: the bytes written."""
        pools = kv.k[layer], kv.v[layer]
        shapes = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)
        wide = (k.astype(jnp.float32), v.astype(jnp.float32), slot_mapping)
        new = call(
            self._library, "write", shapes, *wide, *pools, aliases={3: 0, 4: 1},
            bf16=_is_bf16(kv), block_size=_block_size(kv), head_dim=k.shape[2],
        )  # fmt: skip
        replaced = ((*old[:layer], x, *old[layer + 1 :]) for old, x in zip(kv, new, strict=True))
        return Pools(*replaced)

    def attend(
        self, kv: Pools, layer: int, q: Float[Array, "tokens q_heads head_dim"], batch: AttentionBatch, *, scale: float
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention; pads come out as zeros. Cost: each row reads the KV it sees once for every 24 of its query rows."""
        if q.shape[1] // kv.k[layer].shape[1] > MAX_GROUP:
            raise NotImplementedError(f"cpu attention serves at most {MAX_GROUP} query heads to a KV head")
        wide: Float32[Array, "..."] = q.astype(jnp.float32)
        lengths = (batch.query_start, batch.context_len, batch.block_table, batch.num_rows)
        out = call(
            self._library, "attend", jax.ShapeDtypeStruct(q.shape, jnp.float32), wide, kv.k[layer], kv.v[layer], *lengths,
            bf16=_is_bf16(kv), block_size=_block_size(kv), scale=float(scale),
        )  # fmt: skip
        return out.astype(q.dtype)

    def gather(self, kv: Pools, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block: K then V of layer 0, of layer 1, … An id outside the pool answers zeros."""
        parts = [x.at[block_ids].get(mode="fill", fill_value=0) for x in _by_layer(kv)]
        return jnp.concatenate([lax.bitcast_convert_type(p, jnp.uint8).reshape(len(block_ids), -1) for p in parts], axis=1)

    def scatter(self, kv: Pools, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Pools:
        """The inverse of `gather`; id −1 stores nothing."""
        target = jnp.where(block_ids < 0, kv.k[0].shape[0], block_ids)
        new, first = [], 0
        for x in _by_layer(kv):
            size = math.prod(x.shape[1:]) * x.dtype.itemsize
            part = data[:, first : first + size].reshape(len(block_ids), *x.shape[1:], x.dtype.itemsize)
            new.append(x.at[target].set(lax.bitcast_convert_type(part, x.dtype), mode="drop"))
            first += size
        return Pools(tuple(new[::2]), tuple(new[1::2]))


def _is_bf16(kv: Pools) -> int:
    return int(kv.k[0].dtype == jnp.uint16)


def _block_size(kv: Pools) -> int:
    return int(kv.k[0].shape[3])


def _by_layer(kv: Pools) -> list[Any]:
    return [x for pair in zip(kv.k, kv.v, strict=True) for x in pair]
