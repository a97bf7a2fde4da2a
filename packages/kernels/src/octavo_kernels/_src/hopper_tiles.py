"""What the prompt kernel of Hopper is compiled for, and how a step's long rows are cut into its tiles.

Knows shared memory and row boundaries. Knows nothing of what the kernel does with a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from octavo_core.seams import AttentionBatch
from octavo_kernels._src import mosaic
from octavo_kernels._src.fp8 import FP8
from octavo_kernels._src.mosaic import WARPGROUP_ROWS
from octavo_kernels._src.query_tiles import query_tiles

COMPUTE_WARPGROUPS = 2
TILE_Q_ROWS = COMPUTE_WARPGROUPS * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Shapes and choices a prefill kernel is compiled for.

    Attributes:
        group: Query heads of a head, at most 128.
        kv_heads: Heads; `fold` of them read one KV head of the pool.
        head_dim, block_size, stored: Of the pool; `stored` is the name of its element type, FP8 with scales.
        tile_kv: KV tokens of one step; whole blocks.
        stages: Steps of KV in shared memory.
        num_ctas: Thread blocks, one per multiprocessor.
        scale, soft_cap, window: Of the scores.
        sinks: Every query head has a score that takes weight and gives nothing.
        take_turns: One compute warpgroup multiplies while the other does its softmax.
        interpreted: For the interpreter (`mosaic`).
        free_too_early: Plants a fault: copies are issued before their buffer is known to be free.
    """

    group: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    tile_kv: int = 128
    stages: int = 2
    num_ctas: int = 132
    soft_cap: float | None = None
    window: int | None = None
    sinks: bool = False
    fold: int = 1
    stored: str = "bfloat16"
    take_turns: bool = True
    interpreted: bool = False
    free_too_early: bool = False

    @property
    def tile_q(self) -> int:
        """Tokens of a tile."""
        return TILE_Q_ROWS // self.group

    @property
    def tile_blocks(self) -> int:
        """Blocks of a step."""
        return self.tile_kv // self.block_size

    @property
    def has_scales(self) -> bool:
        """Elements are FP8."""
        return self.stored in FP8

    @property
    def is_narrow(self) -> bool:
        """Shared memory has room for the next tile's queries, and for answers beside them; else answers take their queries' place."""
        return self.head_dim <= mosaic.PART and not self.has_scales

    @property
    def query_buffers(self) -> int:
        """Tiles whose queries are in shared memory."""
        return 2 if self.is_narrow else 1

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape = (self.stages, self.tile_kv, self.head_dim)
        spill = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.tile_kv)
        out = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.head_dim)
        full = plgpu.Barrier(num_arrivals=self.tile_blocks * (2 if self.has_scales else 1), num_barriers=self.stages)
        free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self.stages)
        buffers = self.query_buffers
        return {
            "q": mosaic.tiled((buffers, TILE_Q_ROWS, self.head_dim), jnp.bfloat16),
            "sink": plgpu.SMEM((buffers, TILE_Q_ROWS), jnp.float32) if self.sinks else None,
            "k": mosaic.tiled(shape, self.stored, mosaic.SLICE),
            "v": mosaic.tiled(shape, self.stored, mosaic.SLICE),
            "k_scale": plgpu.SMEM(shape[:2], jnp.float32) if self.has_scales else None,
            "v_scale": plgpu.SMEM(shape[:2], jnp.float32) if self.has_scales else None,
            "wide_k": mosaic.tiled(shape[1:], jnp.bfloat16) if self.has_scales else None,
            "wide_v": mosaic.tiled(shape[1:], jnp.bfloat16) if self.has_scales else None,
            "out": mosaic.tiled(out, jnp.bfloat16) if self.is_narrow else None,
            "spill": mosaic.tiled(spill, jnp.bfloat16) if self.interpreted else None,
            "q_full": plgpu.Barrier(num_arrivals=2 if self.sinks else 1, num_barriers=buffers),
            "q_free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=buffers),
            "k_full": full,
            "v_full": full,
            "k_free": free,
            "v_free": free,
            "ready": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
            "turn": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        }

    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        return mosaic.smem_bytes(self.scratch())


class Tiles(NamedTuple):
    """What the tiles are.

    Attributes:
        about: Row, position of the first query, and queries of each tile; the context of the row; its own number. Longest first.
        num_tiles: How many there are.
        token: Flat index of each query of a tile, clipped to the step.
        tile, offset: Of each flat token: where its answer lies.
    """

    about: Int32[Array, "tiles 5"]
    num_tiles: Int32[Array, "1"]
    token: Int32[Array, "tiles tile_q"]
    tile: Int32[Array, " tokens"]
    offset: Int32[Array, " tokens"]


def cut(batch: AttentionBatch, tokens: int, config: PrefillConfig) -> Tiles:
    """Cut the rows from `num_single` on into tiles."""
    row, number, num_tiles = query_tiles(batch, tokens, config.tile_q)
    ahead = number * config.tile_q
    begin, stop = batch.query_start[row], batch.query_start[row + 1]
    context = batch.context_len[row]
    queries = jnp.clip(stop - begin - ahead, 0, config.tile_q)
    first = begin + ahead
    position = context - (stop - begin) + ahead
    live = jnp.arange(len(row)) < num_tiles
    order = jnp.argsort(jnp.where(live, -(position + queries), 1))
    about = jnp.stack([row, position, queries, context, jnp.arange(len(row))], axis=1)[order]
    token = jnp.minimum(first[:, None] + jnp.arange(config.tile_q), tokens - 1)
    index = jnp.arange(tokens)
    tile = jnp.maximum(jnp.sum(live & (first <= index[:, None]), axis=1) - 1, 0)
    offset = jnp.clip(index - first[tile], 0, config.tile_q - 1)
    return Tiles(*(x.astype(jnp.int32) for x in (about, num_tiles[None], token, tile, offset)))
