"""A step over MLA latents: its new tokens cut into tiles, the kernels over these, and the answers put back in order.

Knows row boundaries and how query heads are dealt to heads of the kernel. Knows nothing of how a tile is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Int32

from octavo_core.seams import AttentionBatch
from octavo_kernels._src.hopper_latent import LatentConfig, latent_results
from octavo_kernels._src.hopper_merge import merge
from octavo_kernels._src.hopper_shares import share_out
from octavo_kernels._src.query_tiles import query_tiles


class LatentTiles(NamedTuple):
    """What the tiles of a step are.

    Attributes:
        about: Row of each tile and position of its first token.
        context_len: Tokens that the last query of each tile can see.
        num_tiles: How many there are.
        token: Flat index of each query of a tile, clipped to the step.
        tile, offset: Of each flat token: where its answer lies; padding is given the last token's.
    """

    about: Int32[Array, "tiles 2"]
    context_len: Int32[Array, " tiles"]
    num_tiles: Int32[Array, ""]
    token: Int32[Array, "tiles tile_q"]
    tile: Int32[Array, " tokens"]
    offset: Int32[Array, " tokens"]


def cut_latents(batch: AttentionBatch, tokens: int, tile_q: int) -> LatentTiles:
    """Cut all rows, those of one token too, into tiles of `tile_q` tokens."""
    row, number, num_tiles = query_tiles(batch._replace(num_single=jnp.zeros_like(batch.num_single)), tokens, tile_q)
    begin, stop = batch.query_start[row], batch.query_start[row + 1]
    first = begin + number * tile_q
    queries = jnp.clip(stop - first, 0, tile_q)
    position = batch.context_len[row] - (stop - first)
    token = jnp.minimum(first[:, None] + jnp.arange(tile_q), tokens - 1)
    index = jnp.arange(tokens)
    live = jnp.arange(len(row)) < num_tiles
    tile = jnp.maximum(jnp.sum(live & (first <= index[:, None]), axis=1) - 1, 0)
    offset = jnp.clip(index - first[tile], 0, jnp.maximum(queries[tile], 1) - 1)
    parts = jnp.stack([row, position], axis=1), position + queries, num_tiles, token, tile, offset
    return LatentTiles(*(x.astype(jnp.int32) for x in parts))


def attend_latents(
    q: BFloat16[Array, "tokens q_heads head_dim"],
    pools: dict[str, Array],
    batch: AttentionBatch,
    config: LatentConfig,
    interpret: Any,
) -> BFloat16[Array, "tokens q_heads head_dim"]:
    """Weighted sums of whole latents; padding tokens get the last token's, or zeros in a step without tokens."""
    tokens, q_heads, head_dim = q.shape
    tiles = cut_latents(batch, tokens, config.tile_q)
    q = jnp.pad(q, ((0, 0), (0, config.kv_heads * config.heads - q_heads), (0, 0)))
    packed = q.reshape(tokens, config.kv_heads, config.heads, head_dim)[tiles.token].transpose(0, 2, 1, 3, 4)
    packed = packed.reshape(-1, config.kv_heads, config.group, head_dim)
    shares = share_out(tiles.context_len, tiles.num_tiles, config)
    partial, lse = latent_results(packed, pools, batch.block_table, tiles.about, tiles.context_len, shares, config, interpret)
    live = jnp.maximum(tiles.context_len - tiles.about[:, 1], 1) * config.heads
    answers = merge(partial, lse, shares.rows, None, config, interpret, live=live)[:, :, : config.group]
    answers = answers.reshape(-1, config.kv_heads, config.tile_q, config.heads, head_dim)
    return answers[tiles.tile, :, tiles.offset].reshape(tokens, -1, head_dim)[:, :q_heads]
