"""`ReferenceAttention`: the shortest correct paged attention, in float32. The oracle of every other backend.

Knows block tables and slots. Knows nothing of speed: every token gathers all KV its row's table names, at a cost of
`tokens * max_blocks * block_size` rows of K and V, whatever is in use.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec
from octavo_kernels._src.fp8 import FP8, quantise

Elements = Shaped[Array, "layers vectors blocks block_size kv_heads head_dim"]


class ScaledKV(NamedTuple):
    """FP8 elements and what they are to be multiplied by."""

    elements: Elements
    scale: Float32[Array, "layers vectors blocks block_size kv_heads"]


KV = Elements | ScaledKV


class ReferenceAttention:
    """An `octavo_core.seams.AttentionBackend` that computes in float32 and stores in the group's dtype.

    KV is one array: layer, K or V (one entry where a latent is both), block, offset in the block, head, element; FP8 has a second one of
    scales. What lies outside a token's view may be anything, NaN included.
    """

    layout_id: Final = "reference-v1:block,layer,kv,offset,head,dim"

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> KV:
        """Zeroed memory for the blocks of one KV group.

        Raises:
            NotImplementedError: For a group of recurrent state.
        """
        if spec.kind == "state":
            raise NotImplementedError(f"ReferenceAttention serves attention, this group is '{spec.kind}'")
        vectors = 1 if spec.kind == "latent" else 2
        shape = (len(spec.layers), vectors, num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        elements = jnp.zeros(shape, jnp.dtype(spec.dtype))
        return ScaledKV(elements, jnp.zeros(shape[:-1], jnp.float32)) if spec.dtype in FP8 else elements

    def write(
        self,
        kv: KV,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> KV:
        """Store K and V of the step's tokens; slot −1 stores nothing."""
        vectors, blocks, block_size = _parts(kv)[0].shape[1:4]
        slots = jnp.where(slot_mapping < 0, blocks * block_size, slot_mapping)
        rows = jnp.stack([k, v][:vectors])

        def put(memory: Array, new: Array) -> Array:
            at = memory.at[layer, :, slots // block_size, slots % block_size]
            return at.set(new.astype(memory.dtype).swapaxes(0, 1), mode="drop")

        if not isinstance(kv, ScaledKV):
            return put(kv, rows)
        elements, scale = quantise(rows, kv.elements.dtype)
        return ScaledKV(put(kv.elements, elements), put(kv.scale, scale))

    def attend(
        self,
        kv: KV,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float32[Array, " q_heads"] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of each token over its row's KV up to its own position."""
        row = jnp.searchsorted(batch.query_start[1:], jnp.arange(len(q)), side="right")
        row = jnp.minimum(row, len(batch.context_len) - 1)
        kv_heads = _parts(kv)[0].shape[4]
        sink = jnp.full(q.shape[1], -jnp.inf) if sinks is None else sinks.astype(jnp.float32)

        def one(q: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
            keys, values = _blocks(kv, layer, batch.block_table[row])
            index = jnp.arange(len(keys))
            visible = index < jnp.minimum(position + 1, batch.context_len[row])
            if window is not None:
                visible &= index > position - window
            # Stale memory may hold NaN, and NaN times a zero weight is NaN: clear it before it meets a product.
            keys, values = (jnp.where(visible[:, None, None], x, 0) for x in (keys, values))
            heads = q.astype(jnp.float32).reshape(kv_heads, -1, q.shape[-1])
            scores = jnp.einsum("hgd,khd->hgk", heads, keys, precision="highest") * scale
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.concatenate([jnp.where(visible, scores, -1e30), sink.reshape(kv_heads, -1, 1)], axis=-1)
            weights = jax.nn.softmax(scores, axis=-1)[..., :-1]
            return jnp.einsum("hgk,khd->hgd", weights, values, precision="highest").reshape(q.shape)

        return lax.map(lambda xs: one(*xs), (q, row, batch.positions)).astype(q.dtype)

    def gather(self, kv: KV, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block as contiguous bytes."""
        blocks = [jnp.moveaxis(part[:, :, block_ids], 2, 0) for part in _parts(kv)]
        return jnp.concatenate([lax.bitcast_convert_type(x, jnp.uint8).reshape(len(block_ids), -1) for x in blocks], axis=1)

    def scatter(self, kv: KV, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> KV:
        """The inverse of `gather`; id −1 stores nothing."""
        new, first = [], 0
        for part in _parts(kv):
            layers, vectors, blocks, *inner = part.shape
            size = layers * vectors * math.prod(inner) * part.dtype.itemsize
            wide = [part.dtype.itemsize] if part.dtype.itemsize > 1 else []
            raw = data[:, first : first + size].reshape(len(block_ids), layers, vectors, *inner, *wide)
            values = jnp.moveaxis(lax.bitcast_convert_type(raw, part.dtype), 0, 2)
            new.append(part.at[:, :, jnp.where(block_ids < 0, blocks, block_ids)].set(values, mode="drop"))
            first += size
        return ScaledKV(*new) if isinstance(kv, ScaledKV) else new[0]


def _parts(kv: KV) -> tuple[Array, ...]:
    return tuple(kv) if isinstance(kv, ScaledKV) else (kv,)


def _blocks(kv: KV, layer: int, ids: Int32[Array, " ids"]) -> Float32[Array, "two context kv_heads head_dim"]:
    """K and V of these blocks, one after the other, in float32; a latent is both."""
    elements = _parts(kv)[0]
    wide = elements[layer][:, ids].astype(jnp.float32)
    if isinstance(kv, ScaledKV):
        wide = wide * kv.scale[layer][:, ids][..., None]
    wide = wide.reshape(wide.shape[0], -1, *elements.shape[4:])
    return jnp.broadcast_to(wide, (2, *wide.shape[1:]))
