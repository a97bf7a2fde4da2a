"""Portable paged attention in plain XLA: the embedded CPU default, and what every machine without a kernel runs.

Knows one KV layout and two loops: rows with one new token go through in tiles of rows, longer rows in tiles of queries. Both
visit only tiles of KV that some row can see, by loops whose trip counts are data, so one compiled shape serves every
context length. Does not know buckets, sampling or where blocks come from.

Why bfloat16 is stored as its uint16 bits: XLA:CPU widens a bfloat16 scatter's whole operand to float32 and back, which
copies the pool at every step (measured: 1.2 s against 0.5 ms for 30 layers of 1,400 blocks). Bits pass through untouched, and
widening them to float32 is one shift. FP8 is stored as bits too, with scales that logits and weights are multiplied by (`fp8`).

Source: online softmax after Milakov and Gimelshein (2018), tiled as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec
from octavo_kernels._src.fp8 import BITS, from_bits
from octavo_kernels._src.pools import Pools, gather_blocks, new_pools, scatter_blocks, write_pools
from octavo_kernels._src.query_tiles import query_tiles

TILE_KV_TOKENS = 256
TILE_ROWS = 8
TILE_Q = 128
GROUP_LANES = 4
MASKED = -1e30
INT_MAX = 2**31 - 1


class _Stored(NamedTuple):
    """One layer's K or V; `scale` is None unless the elements have scales."""

    pool: Shaped[Array, "blocks kv_heads block_size head_dim"]
    scale: Float32[Array, "blocks kv_heads block_size"] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the pool."""
        return self.pool.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Of the pool."""
        return self.pool.dtype

    def load(self, ids: Int32[Array, "..."]) -> Float32[Array, "..."]:
        """Blocks as float32, unscaled; ids are inside the pool."""
        return from_bits(self.pool.at[ids].get(mode="promise_in_bounds"))

    def scaled(self, x: Float32[Array, "..."], of: Callable[[Array], Array]) -> Float32[Array, "..."]:
        """Logits or weights times the scales of their tokens, which `of` picks and shapes."""
        return x if self.scale is None else x * of(self.scale)


class _Rules(NamedTuple):
    """What scores go through: `scale` first, then the cap; `window` says which are seen, `sink` is a score beside them."""

    scale: float
    window: int | None
    softcap: float | None
    sink: Float32[Array, "kv_heads group"] | None

    def oldest(self, seen: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The first token that the last of `seen` tokens sees."""
        return jnp.zeros_like(seen) if self.window is None else jnp.maximum(seen - self.window, 0)

    def capped(self, scores: Float32[Array, "..."]) -> Float32[Array, "..."]:
        """Scaled scores through the cap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def sink_lanes(self, lanes: int) -> Float32[Array, "kv_heads lanes"] | None:
        """The sinks, padded to so many query heads a KV head."""
        return None if self.sink is None else jnp.pad(self.sink, ((0, 0), (0, lanes - self.sink.shape[1])))

    def sink_queries(self, tile_q: int) -> Float32[Array, "kv_heads group_queries"] | None:
        """The sinks, repeated for so many queries."""
        return None if self.sink is None else jnp.repeat(self.sink, tile_q, axis=1)


class XlaAttention:
    """`octavo_core.seams.AttentionBackend` in XLA operations.

    Args:
        tile_kv_tokens: KV tokens visited at once; rounded up to whole blocks.
        tile_q: Queries of one row visited at once.
    """

    def __init__(self, *, tile_kv_tokens: int = TILE_KV_TOKENS, tile_q: int = TILE_Q) -> None:
        self._tile_kv_tokens = tile_kv_tokens
        self._tile_q = tile_q
        self.layout_id = "xla-bhsd-1"

    def init_kv(self, spec: KVGroupSpec, num_blocks: int) -> Pools:
        """Zeroed memory.

        Raises:
            NotImplementedError: For a group of recurrent state, or an element type other than float32, bfloat16 and FP8.
        """
        if spec.kind == "state":
            raise NotImplementedError(f"xla attention serves attention, this group is '{spec.kind}'")
        if spec.dtype not in ("float32", *BITS):
            raise NotImplementedError(f"xla attention stores float32, {', '.join(BITS)}; this group wants {spec.dtype}")
        return new_pools(spec, num_blocks, BITS.get(spec.dtype, spec.dtype))

    def write(
        self,
        kv: Pools,
        layer: int,
        k: Float[Array, "tokens kv_heads head_dim"],
        v: Float[Array, "tokens kv_heads head_dim"],
        slot_mapping: Int32[Array, " tokens"],
    ) -> Pools:
        """Store K and V of the step's tokens. Cost: the bytes written."""
        return write_pools(kv, layer, k, v, slot_mapping)

    def attend(
        self,
        kv: Pools,
        layer: int,
        q: Float[Array, "tokens q_heads head_dim"],
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float32[Array, " q_heads"] | None = None,
    ) -> Float[Array, "tokens q_heads head_dim"]:
        """Causal attention. Cost: each row reads the KV it can see once (longer rows once per `tile_q` queries)."""
        k = _Stored(kv.k[layer], kv.k_scale[layer] if kv.k_scale else None)
        v = _Stored(kv.v[layer], kv.v_scale[layer] if kv.v_scale else None) if kv.v else k
        tokens, q_heads, head_dim = q.shape
        kv_heads, block_size = k.shape[1], k.shape[2]
        tile_blocks = -(-self._tile_kv_tokens // block_size)
        table = _pad_to(_inside(batch.block_table, k.shape[0]), 1, tile_blocks)
        grouped = q.reshape(tokens, kv_heads, q_heads // kv_heads, head_dim)
        sink = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, -1)
        rules = _Rules(scale, window, softcap, sink)
        out = self._single_rows(k, v, grouped, batch, table, tile_blocks, rules)
        out = self._long_rows(k, v, grouped, batch, table, tile_blocks, rules, out)
        return out.reshape(tokens, q_heads, head_dim).astype(q.dtype)

    def _single_rows(
        self,
        k: _Stored,
        v: _Stored,
        q: Float[Array, "tokens kv_heads group head_dim"],
        batch: AttentionBatch,
        table: Int32[Array, "rows padded_blocks"],
        tile_blocks: int,
        rules: _Rules,
    ) -> Float32[Array, "tokens kv_heads group head_dim"]:
        """Rows below `num_single`, `TILE_ROWS` at a time; other rows of the last tile come out as zeros."""
        tokens, kv_heads, group, head_dim = q.shape
        rows = table.shape[0]
        tile = min(TILE_ROWS, rows)
        seen = jnp.where(jnp.arange(rows) < batch.num_single, batch.context_len, 0)
        seen, table = _pad_to(seen, 0, tile), _pad_to(table, 0, tile)
        lanes = group + -group % GROUP_LANES
        wide = jnp.pad(q[: min(rows, tokens)].astype(jnp.float32) * rules.scale, ((0, 0), (0, 0), (0, lanes - group), (0, 0)))
        q = _pad_to(wide, 0, tile)
        tile_tokens = tile_blocks * k.shape[2]
        start = _nothing((tile, kv_heads, lanes), head_dim, rules.sink_lanes(lanes))

        def row_tile(j: Int32[Array, ""], out: Float32[Array, "..."]) -> Float32[Array, "..."]:
            q_tile = lax.dynamic_slice_in_dim(q, j * tile, tile)
            seen_tile = lax.dynamic_slice_in_dim(seen, j * tile, tile)
            oldest_tile = rules.oldest(seen_tile)

            def kv_tile(i: Int32[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, acc = state
                ids = lax.dynamic_slice(table, (j * tile, i * tile_blocks), (tile, tile_blocks))
                index = _token_index(i, tile_blocks, k.shape[2])[None]
                visible = (index < seen_tile[:, None, None]) & (index >= oldest_tile[:, None, None])
                k_tile = k.load(ids)
                v_tile = jnp.where(visible[:, :, None, :, None], v.load(ids), 0.0)
                scores = k.scaled(jnp.einsum("rkgd,rnktd->rnkgt", q_tile, k_tile), lambda s: s[ids][:, :, :, None])
                scores = jnp.where(visible[:, :, None, None, :], rules.capped(scores), MASKED)
                new_top = jnp.maximum(top, scores.max((1, 4)))
                weights = jnp.exp(scores - new_top[:, None, :, :, None])
                fade = jnp.exp(top - new_top)
                scaled = v.scaled(weights, lambda s: jnp.where(visible[:, :, None], s[ids], 0.0)[:, :, :, None])
                update = jnp.einsum("rnkgt,rnktd->rnkgd", scaled, v_tile).sum(1)
                return new_top, total * fade + weights.sum((1, 4)), acc * fade[..., None] + update

            first = jnp.min(jnp.where(seen_tile > 0, oldest_tile, INT_MAX)) // tile_tokens
            trips = (jnp.max(seen_tile) + tile_tokens - 1) // tile_tokens
            _, total, acc = lax.fori_loop(first, trips, kv_tile, start)
            return lax.dynamic_update_slice_in_dim(out, _normalise(acc, total)[:, :, :group], j * tile, 0)

        out = jnp.zeros((max(q.shape[0], tokens), kv_heads, group, head_dim))
        trips = (batch.num_single + tile - 1) // tile
        return lax.fori_loop(0, trips, row_tile, out)[:tokens]

    def _long_rows(
        self,
        k: _Stored,
        v: _Stored,
        q: Float[Array, "tokens kv_heads group head_dim"],
        batch: AttentionBatch,
        table: Int32[Array, "rows padded_blocks"],
        tile_blocks: int,
        rules: _Rules,
        out: Float32[Array, "tokens kv_heads group head_dim"],
    ) -> Float32[Array, "tokens kv_heads group head_dim"]:
        """Rows from `num_single` on, one tile of queries at a time, in flat order: what a tile writes beyond its row, the next overwrites."""
        tokens, kv_heads, group, head_dim = q.shape
        tile_q, tile_tokens = min(self._tile_q, tokens), tile_blocks * k.shape[2]
        item_row, item_tile, num_items = query_tiles(batch, tokens, tile_q)
        compute = jnp.float32 if k.dtype == jnp.float32 else jnp.bfloat16
        q = jnp.pad((q.astype(jnp.float32) * rules.scale).astype(compute), ((0, tile_q), (0, 0), (0, 0), (0, 0)))
        out = jnp.pad(out, ((0, tile_q), (0, 0), (0, 0), (0, 0)))
        start = _nothing((kv_heads, group * tile_q), head_dim, rules.sink_queries(tile_q))

        def item(w: Int32[Array, ""], out: Float32[Array, "..."]) -> Float32[Array, "..."]:
            row, ahead = item_row[w], item_tile[w] * tile_q
            first, last, seen = batch.query_start[row], batch.query_start[row + 1], batch.context_len[row]
            position = seen - (last - first) + ahead + jnp.arange(tile_q)
            q_tile = lax.dynamic_slice_in_dim(q, first + ahead, tile_q).transpose(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
            limit = jnp.tile(jnp.minimum(position + 1, seen), group)[:, None]
            oldest, first_seen = rules.oldest(limit), rules.oldest(position[0] + 1)

            def kv_tile(i: Int32[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                top, total, acc = state
                ids = lax.dynamic_slice(table, (row, i * tile_blocks), (1, tile_blocks))[0]
                index = _token_index(i, tile_blocks, k.shape[2])
                live = ((index < seen) & (index >= first_seen))[:, None]
                k_tile = _by_head(k.load(ids).astype(compute))
                v_tile = _by_head(jnp.where(live[..., None], v.load(ids), 0.0).astype(compute))
                scores = jnp.einsum("kmd,ktd->kmt", q_tile, k_tile, preferred_element_type=jnp.float32)
                scaled = rules.capped(k.scaled(scores, lambda s: _by_head(s[ids])[:, None]))
                scores = jnp.where((index.reshape(-1) < limit) & (index.reshape(-1) >= oldest), scaled, MASKED)
                new_top = jnp.maximum(top, scores.max(-1))
                weights = jnp.exp(scores - new_top[..., None])
                fade = jnp.exp(top - new_top)
                shares = v.scaled(weights, lambda s: _by_head(jnp.where(live, s[ids], 0.0))[:, None]).astype(compute)
                acc = acc * fade[..., None] + jnp.einsum("kmt,ktd->kmd", shares, v_tile, preferred_element_type=jnp.float32)
                return new_top, total * fade + weights.sum(-1), acc

            trips = (jnp.minimum(position[0] + tile_q, seen) + tile_tokens - 1) // tile_tokens
            _, total, acc = lax.fori_loop(first_seen // tile_tokens, trips, kv_tile, start)
            result = _normalise(acc, total).reshape(kv_heads, group, tile_q, head_dim).transpose(2, 0, 1, 3)
            return lax.dynamic_update_slice_in_dim(out, result, first + ahead, 0)

        return lax.fori_loop(0, num_items, item, out)[:tokens]

    def gather(self, kv: Pools, block_ids: Int32[Array, " ids"]) -> UInt8[Array, "ids block_bytes"]:
        """All layers of each block: K then V of layer 0, of layer 1, … An id outside the pool answers zeros."""
        return gather_blocks(kv, block_ids)

    def scatter(self, kv: Pools, block_ids: Int32[Array, " ids"], data: UInt8[Array, "ids block_bytes"]) -> Pools:
        """The inverse of `gather`; id −1 stores nothing."""
        return scatter_blocks(kv, block_ids, data)


def _inside(table: Int32[Array, "rows max_blocks"], num_blocks: int) -> Int32[Array, "rows max_blocks"]:
    """An id outside the pool becomes the reserved block, which holds zeros: never clipped onto a block in use."""
    return jnp.where((table >= 0) & (table < num_blocks), table, 0)


def _by_head(x: Shaped[Array, "blocks kv_heads block_size *rest"]) -> Shaped[Array, "kv_heads tokens *rest"]:
    """Consecutive blocks as one stretch of tokens for each KV head."""
    return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _pad_to(x: Shaped[Array, "..."], axis: int, multiple: int) -> Shaped[Array, "..."]:
    short = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, short if a == axis else 0) for a in range(x.ndim)]) if short else x


def _token_index(tile: Int32[Array, ""], tile_blocks: int, block_size: int) -> Int32[Array, "tile_blocks block_size"]:
    first = tile * tile_blocks * block_size
    return first + jnp.arange(tile_blocks * block_size, dtype=jnp.int32).reshape(tile_blocks, block_size)


def _nothing(
    shape: tuple[int, ...], head_dim: int, sink: Float32[Array, "..."] | None
) -> tuple[Float32[Array, "..."], Float32[Array, "..."], Float32[Array, "..."]]:
    """Maximum, sum of weights and weighted sum before any token: of nothing, or of a sink, which weighs 1 and gives nothing."""
    acc = jnp.zeros((*shape, head_dim))
    if sink is None:
        return jnp.full(shape, MASKED), jnp.zeros(shape), acc
    return jnp.broadcast_to(sink, shape), jnp.ones(shape), acc


def _normalise(acc: Float32[Array, "... head_dim"], total: Float32[Array, "..."]) -> Float32[Array, "... head_dim"]:
    return acc / jnp.where(total > 0, total, 1.0)[..., None]
