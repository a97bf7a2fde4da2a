"""`ReferenceAttention`: the shortest correct paged attention, in float32. The oracle of every other backend.

Knows block tables and slots. Knows nothing of speed: every token gathers all KV its row's table names, at a cost of
`tokens * max_blocks * block_size` rows of K and V, whatever is in use.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec

KV = Shaped[Array, "layers two blocks block_size kv_heads head_dim"]


class ReferenceAttention:
    """An `octavo_core.seams.AttentionBackend` that computes in float32 and stores in the group's dtype.

    KV is one array: layer, K or V, block, offset in the block, head, element. What lies beyond a row's context may be anything,
    NaN included.
    """

    layout_id: Final = "reference-v1:block,layer,kv,offset,head,dim"

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> KV:
        """Zeroed memory for the blocks of one KV group.

        Raises:
            NotImplementedError: For a group that is not full attention.
        """
        if spec.kind != "full":
            raise NotImplementedError(f"ReferenceAttention serves groups of kind 'full', got '{spec.kind}'")
        shape = (len(spec.layers), 2, num_blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        return jnp.zeros(shape, jnp.dtype(spec.dtype))

    def write(
        self,
        kv: KV,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> KV:
        """Store K and V of the step's tokens; slot −1 stores nothing."""
        blocks, block_size = kv.shape[2:4]
        slots = jnp.where(slot_mapping < 0, blocks * block_size, slot_mapping)
        rows = jnp.stack([k, v]).astype(kv.dtype)
        return kv.at[layer, :, slots // block_size, slots % block_size].set(rows.swapaxes(0, 1), mode="drop")

    def attend(
        self, kv: KV, layer: int, q: Float[Array, "tokens q_heads head_dim"], batch: AttentionBatch, *, scale: float
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention of each token over its row's KV up to its own position."""
        row = jnp.searchsorted(batch.query_start[1:], jnp.arange(len(q)), side="right")
        row = jnp.minimum(row, len(batch.context_len) - 1)
        kv_heads = kv.shape[4]

        def one(q: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
            keys, values = kv[layer][:, batch.block_table[row]].astype(jnp.float32).reshape(2, -1, *kv.shape[4:])
            visible = jnp.arange(len(keys)) < jnp.minimum(position + 1, batch.context_len[row])
            # Stale memory may hold NaN, and NaN times a zero weight is NaN: clear it before it meets a product.
            keys, values = (jnp.where(visible[:, None, None], x, 0) for x in (keys, values))
            heads = q.astype(jnp.float32).reshape(kv_heads, -1, q.shape[-1])
            scores = jnp.einsum("hgd,khd->hgk", heads, keys, precision="highest") * scale
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            return jnp.einsum("hgk,khd->hgd", weights, values, precision="highest").reshape(q.shape)

        return lax.map(lambda xs: one(*xs), (q, row, batch.positions)).astype(q.dtype)

    def gather(self, kv: KV, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block as contiguous bytes."""
        blocks = jnp.moveaxis(kv[:, :, block_ids], 2, 0)
        return lax.bitcast_convert_type(blocks, jnp.uint8).reshape(len(block_ids), -1)

    def scatter(self, kv: KV, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> KV:
        """The inverse of `gather`; id −1 stores nothing."""
        layers, two, blocks, *inner = kv.shape
        raw = data.reshape(len(block_ids), layers, two, *inner, kv.dtype.itemsize)
        values = lax.bitcast_convert_type(raw, kv.dtype).reshape(len(block_ids), layers, two, *inner)
        ids = jnp.where(block_ids < 0, blocks, block_ids)
        return kv.at[:, :, ids].set(jnp.moveaxis(values, 0, 2), mode="drop")
