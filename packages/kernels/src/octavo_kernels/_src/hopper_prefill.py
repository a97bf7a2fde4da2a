"""Chunks of prompts on Hopper: rows with several new tokens, each over its context, at the speed of the matrix units.

New tokens are cut into tiles of one row; a tile's matrix rows are token * group + head, so that all query heads of a KV head share the KV
they read. Thread blocks stay and take tile after tile, those with the longest context first.

Roles in a thread block: one warpgroup issues copies, two compute 64 matrix rows each on the same KV.

Source: FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32

from octavo_core.seams import AttentionBatch
from octavo_kernels._src import mosaic
from octavo_kernels._src.hopper_copy import Steps, copy_steps, observe
from octavo_kernels._src.mosaic import FLOOR, LOG2E, MASKED, WARPGROUP_ROWS, WGMMA
from octavo_kernels._src.query_tiles import query_tiles

COMPUTE_WARPGROUPS = 2
COPY_WARPGROUP = COMPUTE_WARPGROUPS
QUERY_BUFFERS = 2
TILE_Q_ROWS = COMPUTE_WARPGROUPS * WARPGROUP_ROWS


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Shapes and choices a prefill kernel is compiled for.

    Attributes:
        group: Query heads of a KV head, at most 128.
        kv_heads, head_dim, block_size: Of the pool.
        tile_kv: KV tokens of one step; whole blocks.
        stages: Steps of KV in shared memory.
        num_ctas: Thread blocks, one per multiprocessor.
        scale, soft_cap, window: Of the scores.
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

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape = (self.stages, self.tile_kv, self.head_dim)
        spill = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.tile_kv)
        full = plgpu.Barrier(num_arrivals=self.tile_blocks, num_barriers=self.stages)
        free = plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self.stages)
        return {
            "q": mosaic.tiled((QUERY_BUFFERS, TILE_Q_ROWS, self.head_dim), jnp.bfloat16),
            "k": mosaic.tiled(shape, jnp.bfloat16),
            "v": mosaic.tiled(shape, jnp.bfloat16),
            "out": mosaic.tiled((COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.head_dim), jnp.bfloat16),
            "spill": mosaic.tiled(spill, jnp.bfloat16) if self.interpreted else None,
            "q_full": plgpu.Barrier(num_barriers=QUERY_BUFFERS),
            "q_free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=QUERY_BUFFERS),
            "k_full": full,
            "v_full": full,
            "k_free": free,
            "v_free": free,
            "cleared": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
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


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def prefill(
    q: BFloat16[Array, "tokens kv_heads group head_dim"],
    k: BFloat16[Array, "blocks kv_heads block_size head_dim"],
    v: BFloat16[Array, "blocks kv_heads block_size head_dim"],
    table: Int32[Array, "rows max_blocks"],
    tiles: Tiles,
    config: PrefillConfig,
    interpret: Any = None,
) -> BFloat16[Array, "tokens kv_heads group head_dim"]:
    """Answers of the tokens of long rows; other tokens get anything.

    Cost: each tile reads the KV it can see once; 4 * head_dim FLOPs per query head and visible token.
    """
    packed, out = (len(tiles.about), config.kv_heads, config.tile_q * config.group), config.head_dim
    queries = q[tiles.token]
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(*packed, out)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, TILE_Q_ROWS - packed[2]), (0, 0)))

    def octavo_prefill(*refs: Any) -> None:
        _body(config, *refs)

    run = plgpu.kernel(
        octavo_prefill,
        out_type=jax.ShapeDtypeStruct(queries.shape, jnp.bfloat16),
        scratch_types=[config.scratch()],
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    answers = run(queries, k, v, table, tiles.about, tiles.num_tiles)
    answers = answers[:, :, : packed[2]].reshape(packed[0], config.kv_heads, config.tile_q, config.group, out)
    return answers[tiles.tile, :, tiles.offset]


class _Item(NamedTuple):
    """One tile and KV head; `number` of this thread block's items, `position` of its first query."""

    number: jax.Array
    tile: jax.Array
    position: jax.Array
    steps: Steps


def _body(
    config: PrefillConfig, q: Any, k: Any, v: Any, table: Any, about: Any, count: Any, out: Any, scratch: dict[str, Any]
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == COPY_WARPGROUP)
    def _copy() -> None:
        plgpu.set_max_registers(mosaic.COPY_REGISTERS, action="decrease")
        _copy_items(config, q, k, v, table, about, count, scratch)

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(mosaic.COMPUTE_REGISTERS, action="increase")
        _compute_items(config, about, count, out, scratch)


def _each_item(config: PrefillConfig, about: Any, count: Any, visit: Any) -> tuple[jax.Array, jax.Array]:
    """Call `visit` with each item of this thread block; answers its items and steps."""
    cta, ctas = lax.axis_index("cta"), jnp.int32(config.num_ctas)
    total = count[0] * config.kv_heads
    items = jnp.where(total > cta, lax.div(total - cta - 1, ctas) + 1, 0)

    def one(number: jax.Array, before: jax.Array) -> jax.Array:
        index = cta + number * ctas
        rank, head = lax.div(index, jnp.int32(config.kv_heads)), lax.rem(index, jnp.int32(config.kv_heads))
        row, position, queries, context, tile = (about[rank, i] for i in range(5))
        first = jnp.int32(0)
        if config.window is not None:
            first = lax.div(jnp.maximum(position + 1 - config.window, 0), jnp.int32(config.tile_kv))
        stop = lax.div(jnp.minimum(position + queries, context) + (config.tile_kv - 1), jnp.int32(config.tile_kv))
        steps = jnp.maximum(stop - first, 0)
        visit(_Item(number, tile, position, Steps(row, head, context, first, steps, before)))
        return before + steps

    steps = lax.fori_loop(0, items, one, jnp.int32(0))
    return items, steps


def _copy_items(config: PrefillConfig, q: Any, k: Any, v: Any, table: Any, about: Any, count: Any, at: dict[str, Any]) -> None:
    def item(s: _Item) -> None:
        buffer = lax.rem(s.number, jnp.int32(QUERY_BUFFERS))

        @pl.when(s.number >= QUERY_BUFFERS)
        def _() -> None:
            plgpu.barrier_wait(at["q_free"].at[buffer])

        plgpu.copy_gmem_to_smem(q.at[s.tile, s.steps.head], at["q"].at[buffer], at["q_full"].at[buffer])
        copy_steps(config, s.steps, k, v, table, at)

    items, steps = _each_item(config, about, count, item)
    observe(at["q_free"], items, QUERY_BUFFERS)
    observe(at["k_free"], steps, config.stages)
    observe(at["v_free"], steps, config.stages)


def _compute_items(config: PrefillConfig, about: Any, count: Any, out: Any, at: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")
    rows = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

    def item(s: _Item) -> None:
        buffer = lax.rem(s.number, jnp.int32(QUERY_BUFFERS))
        plgpu.barrier_wait(at["q_full"].at[buffer])
        state = (
            mosaic.filled((WARPGROUP_ROWS, config.head_dim), 0.0, WGMMA),
            mosaic.filled((WARPGROUP_ROWS,), FLOOR, WGMMA.reduce(1)),
            mosaic.filled((WARPGROUP_ROWS,), 0.0, WGMMA.reduce(1)),
        )
        queries = at["q"].at[buffer, rows]
        open_steps = jnp.int32(0)
        if config.window is None:
            open_steps = jnp.minimum(lax.div(s.position + 1, jnp.int32(config.tile_kv)), s.steps.num_tiles)
        state = lax.fori_loop(0, open_steps, lambda i, x: _step(config, s, i, queries, at, x, masked=False), state)
        acc, _, total = lax.fori_loop(
            open_steps, s.steps.num_tiles, lambda i, x: _step(config, s, i, queries, at, x, masked=True), state
        )
        plgpu.barrier_arrive(at["q_free"].at[buffer])
        acc = acc * mosaic.down(1.0 / jnp.where(total > 0, total, 1.0), acc.shape)
        plgpu.wait_smem_to_gmem(0)
        at["out"].at[wg][...] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(at["out"].at[wg], out.at[s.tile, s.steps.head, rows])

    if config.take_turns:
        pl.when(wg == 1)(lambda: _turn(at))
    _each_item(config, about, count, item)
    if config.take_turns:
        pl.when(wg == 0)(lambda: _turn(at))
    plgpu.wait_smem_to_gmem(0)


def _turn(at: dict[str, Any]) -> None:
    """Meet the other compute warpgroup."""
    plgpu.barrier_arrive(at["turn"])
    plgpu.barrier_wait(at["turn"])


def _step(
    config: PrefillConfig,
    s: _Item,
    i: jax.Array,
    queries: Any,
    at: dict[str, Any],
    state: tuple[jax.Array, ...],
    *,
    masked: bool,
) -> tuple[jax.Array, ...]:
    """One tile of KV."""
    acc, top, total = state
    wg = lax.axis_index("wg")
    shape = (WARPGROUP_ROWS, config.tile_kv)
    stage = lax.rem(s.steps.before + i, jnp.int32(config.stages))
    ahead = (s.steps.first + i) * config.tile_kv
    oldest = jnp.int32(0) if config.window is None else jnp.maximum(s.position + 1 - config.window, 0)

    plgpu.barrier_wait(at["k_full"].at[stage])
    meanwhile = functools.partial(_turn, at) if config.take_turns else None
    scores = mosaic.product(queries, mosaic.transposed(at["k"].at[stage]), shape, meanwhile=meanwhile)
    plgpu.barrier_arrive(at["k_free"].at[stage])
    scores = _logits(config, s, scores, ahead, masked=masked)
    new_top = jnp.maximum(top, scores.max(axis=1))
    fade = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - mosaic.down(new_top, shape))
    total = total * fade + weights.sum(axis=1)
    acc = acc * mosaic.down(fade, acc.shape)
    low = weights.astype(jnp.bfloat16)
    if config.take_turns:
        acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
        plgpu.barrier_arrive(at["turn"])
    plgpu.barrier_wait(at["v_full"].at[stage])
    if masked:
        _clear(config, s, ahead, oldest, stage, at)
    if config.take_turns:
        plgpu.barrier_wait(at["turn"])
    spill = at["spill"].at[wg] if config.interpreted else None
    acc = mosaic.weighted_sum(acc, low, at["v"].at[stage], spill, interpreted=config.interpreted)
    plgpu.barrier_arrive(at["v_free"].at[stage])
    return acc, new_top, total


def _logits(config: PrefillConfig, s: _Item, scores: jax.Array, ahead: jax.Array, *, masked: bool) -> jax.Array:
    """Scaled and capped products in units of log 2, hidden ones masked."""
    if config.soft_cap is None:
        scores = scores * (config.scale * LOG2E)
    else:
        scores = jnp.tanh(scores * (config.scale / config.soft_cap)) * (config.soft_cap * LOG2E)
    if masked:
        query = s.position + lax.div(mosaic.index(scores.shape, 0) + lax.axis_index("wg") * WARPGROUP_ROWS, jnp.int32(config.group))
        token = mosaic.index(scores.shape, 1) + ahead
        visible = token <= query
        if config.window is not None:
            visible = visible & (token > query - config.window)
        scores = jnp.where(visible & (token < s.steps.context), scores, MASKED)
    return scores


def _clear(config: PrefillConfig, s: _Item, ahead: jax.Array, oldest: jax.Array, stage: jax.Array, at: dict[str, Any]) -> None:
    """Zero what no query of the tile can see, each compute warpgroup its part, and meet."""
    wg = lax.axis_index("wg")
    parts = config.tile_kv // WARPGROUP_ROWS

    @pl.when((ahead + config.tile_kv > s.steps.context) | (ahead < oldest))
    def _() -> None:
        for part in range(parts):

            @pl.when(wg == part % COMPUTE_WARPGROUPS)
            def _(part: int = part) -> None:
                begin = part * WARPGROUP_ROWS
                tile = at["v"].at[stage, pl.ds(begin, WARPGROUP_ROWS)]
                mosaic.clear_hidden(tile, oldest - ahead - begin, s.steps.context - ahead - begin)

        plgpu.barrier_arrive(at["cleared"])
        plgpu.barrier_wait(at["cleared"])
