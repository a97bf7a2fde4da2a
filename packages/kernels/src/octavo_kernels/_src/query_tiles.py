"""Cuts the long rows of a step into tiles of queries. Knows row boundaries; knows nothing of KV."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from octavo_core.seams import AttentionBatch


def query_tiles(
    batch: AttentionBatch, tokens: int, tile_q: int
) -> tuple[Int32[Array, " items"], Int32[Array, " items"], Int32[Array, ""]]:
    """The tiles of queries of all long rows in flat order: row, index of the tile in its row, number of tiles."""
    rows = batch.context_len.shape[0]
    index = jnp.arange(rows)
    is_long: Bool[Array, " rows"] = (index >= batch.num_single) & (index < batch.num_rows)
    lengths = jnp.where(is_long, batch.query_start[1:] - batch.query_start[:-1], 0)
    ends = jnp.cumsum((lengths + tile_q - 1) // tile_q)
    item = jnp.arange(tokens // tile_q + min(rows, tokens), dtype=jnp.int32)
    row = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, rows - 1)
    begin = ends[row] - (lengths[row] + tile_q - 1) // tile_q
    return row, (item - begin).astype(jnp.int32), ends[-1].astype(jnp.int32)
