"""Chunks of prompts on Hopper: rows with several new tokens, each over its context, at the speed of the matrix units.

New tokens are cut into tiles of one row; a tile's matrix rows are token * group + head, so that all query heads of a KV head share the KV
they read. Thread blocks stay and take tile after tile, those with the longest context first.

Roles in a thread block: one warpgroup issues copies, two compute 64 matrix rows each on the same KV.

Source: FlashAttention-3 (Shah et al. 2024).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from octavo_kernels._src import mosaic
from octavo_kernels._src.hopper_copy import Steps, copy_steps, observe
from octavo_kernels._src.hopper_tiles import COMPUTE_WARPGROUPS, TILE_Q_ROWS, PrefillConfig, Tiles
from octavo_kernels._src.mosaic import FLOOR, LOG2E, MASKED, WARPGROUP_ROWS, WGMMA

COPY_WARPGROUP = COMPUTE_WARPGROUPS


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def prefill(
    q: BFloat16[Array, "tokens heads group head_dim"],
    kv: dict[str, Array],
    table: Int32[Array, "rows max_blocks"],
    tiles: Tiles,
    sinks: Float32[Array, "heads group"] | None,
    config: PrefillConfig,
    interpret: Any = None,
) -> BFloat16[Array, "tokens heads group head_dim"]:
    """Answers of the tokens of long rows; other tokens get anything.

    Args:
        q: Queries.
        kv: Pools of a layer, as `hopper_decode.partial_results` takes them.
        table: Block ids of the rows.
        tiles: From `cut`.
        sinks: Where the configuration has them.
        config: What to compile.
        interpret: Pallas's own argument.

    Cost: each tile reads the KV it can see once; 4 * head_dim FLOPs per query head and visible token.
    """
    packed, out = (len(tiles.about), config.kv_heads, config.tile_q * config.group), config.head_dim
    queries = q[tiles.token]
    queries = queries.transpose(0, 2, 1, 3, 4).reshape(*packed, out)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, TILE_Q_ROWS - packed[2]), (0, 0)))

    inputs = dict(kv) if sinks is None else {**kv, "sink": _by_row(sinks, config)}
    names = tuple(inputs)

    def octavo_prefill(q: Any, table: Any, about: Any, count: Any, *rest: Any) -> None:
        _body(config, q, dict(zip(names, rest, strict=False)), table, about, count, *rest[len(names) :])

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
    answers = run(queries, table, tiles.about, tiles.num_tiles, *inputs.values())
    answers = answers[:, :, : packed[2]].reshape(packed[0], config.kv_heads, config.tile_q, config.group, out)
    return answers[tiles.tile, :, tiles.offset]


def _by_row(sinks: Float32[Array, "heads group"], config: PrefillConfig) -> Float32[Array, "heads rows"]:
    """The sink of each matrix row, in units of log 2."""
    rows = jnp.tile(sinks * LOG2E, (1, config.tile_q))
    return jnp.pad(rows, ((0, 0), (0, TILE_Q_ROWS - rows.shape[1])))


class _Item(NamedTuple):
    """One tile and KV head; `number` of this thread block's items, `position` of its first query."""

    number: jax.Array
    tile: jax.Array
    position: jax.Array
    steps: Steps


def _body(
    config: PrefillConfig, q: Any, kv: dict[str, Any], table: Any, about: Any, count: Any, out: Any, scratch: dict[str, Any]
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == COPY_WARPGROUP)
    def _copy() -> None:
        plgpu.set_max_registers(mosaic.COPY_REGISTERS, action="decrease")
        _copy_items(config, q, kv, table, about, count, scratch)

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


def _copy_items(config: PrefillConfig, q: Any, kv: dict[str, Any], table: Any, about: Any, count: Any, at: dict[str, Any]) -> None:
    def item(s: _Item) -> None:
        buffer = lax.rem(s.number, jnp.int32(config.query_buffers))

        @pl.when(s.number >= config.query_buffers)
        def _() -> None:
            plgpu.barrier_wait(at["q_free"].at[buffer])

        plgpu.copy_gmem_to_smem(q.at[s.tile, s.steps.head], at["q"].at[buffer], at["q_full"].at[buffer])
        if config.sinks:
            plgpu.copy_gmem_to_smem(kv["sink"].at[s.steps.head], at["sink"].at[buffer], at["q_full"].at[buffer])
        copy_steps(config, s.steps, kv, table, at)

    items, steps = _each_item(config, about, count, item)
    observe(at["q_free"], items, config.query_buffers)
    observe(at["k_free"], steps, config.stages)
    observe(at["v_free"], steps, config.stages)


def _compute_items(config: PrefillConfig, about: Any, count: Any, out: Any, at: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")
    rows = pl.ds(pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), WARPGROUP_ROWS)

    def item(s: _Item) -> None:
        buffer = lax.rem(s.number, jnp.int32(config.query_buffers))
        plgpu.barrier_wait(at["q_full"].at[buffer])
        column = WGMMA.reduce(1)
        top, total = mosaic.filled((WARPGROUP_ROWS,), FLOOR, column), mosaic.filled((WARPGROUP_ROWS,), 0.0, column)
        if config.sinks:
            top, total = plgpu.layout_cast(at["sink"].at[buffer, rows][...], column), total + 1.0
        acc = tuple(mosaic.filled((WARPGROUP_ROWS, size), 0.0, WGMMA) for _, size in mosaic.parts(config.head_dim))
        queries = at["q"].at[buffer, rows]
        open_steps = jnp.int32(0)
        if config.window is None:
            open_steps = jnp.minimum(lax.div(s.position + 1, jnp.int32(config.tile_kv)), s.steps.num_tiles)
        state = lax.fori_loop(0, open_steps, lambda i, x: _step(config, s, i, queries, at, x, masked=False), (acc, top, total))
        acc, _, total = lax.fori_loop(
            open_steps, s.steps.num_tiles, lambda i, x: _step(config, s, i, queries, at, x, masked=True), state
        )
        if config.is_narrow:
            plgpu.barrier_arrive(at["q_free"].at[buffer])
            plgpu.wait_smem_to_gmem(0)
        target = at["out"].at[wg] if config.is_narrow else queries
        for part, (begin, size) in zip(acc, mosaic.parts(config.head_dim), strict=True):
            answer = part * mosaic.down(1.0 / jnp.where(total > 0, total, 1.0), part.shape)
            mosaic.columns(target, begin, size)[...] = answer.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(target, out.at[s.tile, s.steps.head, rows])
        if not config.is_narrow:
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(at["q_free"].at[buffer])

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
    state: tuple[Any, ...],
    *,
    masked: bool,
) -> tuple[Any, ...]:
    """One tile of KV."""
    acc, top, total = state
    shape = (WARPGROUP_ROWS, config.tile_kv)
    stage = lax.rem(s.steps.before + i, jnp.int32(config.stages))
    ahead = (s.steps.first + i) * config.tile_kv
    oldest = jnp.int32(0) if config.window is None else jnp.maximum(s.position + 1 - config.window, 0)

    scores = _logits(config, s, _products(config, queries, stage, at), ahead, masked=masked)
    new_top = jnp.maximum(top, scores.max(axis=1))
    fade = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - mosaic.down(new_top, shape))
    total = total * fade + weights.sum(axis=1)
    acc = tuple(part * mosaic.down(fade, part.shape) for part in acc)
    if config.has_scales:
        plgpu.barrier_wait(at["v_full"].at[stage])
        weights = _scaled(s, weights, mosaic.by_column(at["v_scale"].at[stage]), ahead, oldest, masked=masked)
    low = weights.astype(jnp.bfloat16)
    if config.take_turns:
        acc, total, new_top, low = lax.optimization_barrier((acc, total, new_top, low))
        plgpu.barrier_arrive(at["turn"])
    values = at["v"].at[stage]
    if config.has_scales:
        _widen(config, values, at["wide_v"], at, *((oldest - ahead, s.steps.context - ahead) if masked else ()))
        plgpu.barrier_arrive(at["v_free"].at[stage])
        values = at["wide_v"]
    else:
        plgpu.barrier_wait(at["v_full"].at[stage])
        if masked:
            _clear(config, s, ahead, oldest, stage, at)
    if config.take_turns:
        plgpu.barrier_wait(at["turn"])
    spill = at["spill"].at[lax.axis_index("wg")] if config.interpreted else None
    acc = mosaic.weighted_sums(acc, low, values, spill, interpreted=config.interpreted)
    if not config.has_scales:
        plgpu.barrier_arrive(at["v_free"].at[stage])
    return acc, new_top, total


def _products(config: PrefillConfig, queries: Any, stage: jax.Array, at: dict[str, Any]) -> jax.Array:
    """Queries times keys; of FP8 ones, which go through `wide_k`, times their scales."""
    shape = (WARPGROUP_ROWS, config.tile_kv)
    keys = at["k"].at[stage]
    plgpu.barrier_wait(at["k_full"].at[stage])
    if config.has_scales:
        _widen(config, keys, at["wide_k"], at)
        scores = mosaic.products(queries, at["wide_k"], shape)
        scores = scores * mosaic.across(mosaic.by_column(at["k_scale"].at[stage]), shape)  # read late: it takes registers
        plgpu.commit_smem()  # the scale has been read, so a copy may overwrite it
        plgpu.barrier_arrive(at["k_free"].at[stage])
        return scores
    meanwhile = functools.partial(_turn, at) if config.take_turns else None
    scores = mosaic.products(queries, keys, shape, meanwhile=meanwhile)
    plgpu.barrier_arrive(at["k_free"].at[stage])
    return scores


def _scaled(s: _Item, weights: jax.Array, scale: jax.Array, ahead: jax.Array, oldest: jax.Array, *, masked: bool) -> jax.Array:
    """Weights times the scales of their values; of what no query sees, 0, whatever its scale is."""
    weights = weights * mosaic.across(scale, weights.shape)
    if masked:
        token = mosaic.index(weights.shape, 1) + ahead
        weights = jnp.where((token >= oldest) & (token < s.steps.context), weights, 0.0)
    return weights


def _widen(config: PrefillConfig, narrow: Any, wide: Any, at: dict[str, Any], *seen: jax.Array) -> None:
    """Both compute warpgroups widen a tile, and meet; rows outside [first, stop) of `seen` become zeros.

    What was in `wide` has been used by both: they met since, over the other of K and V.
    """
    _divide(config, at, lambda begin, *piece: mosaic.widen(*piece, *(x - begin for x in seen)), narrow, wide)


def _divide(config: PrefillConfig, at: dict[str, Any], visit: Any, *tiles: Any) -> None:
    """Each compute warpgroup visits half of a tile, told its first row, and meets the other; a tile of one slice is left to the first."""
    wg, width = lax.axis_index("wg"), config.head_dim // COMPUTE_WARPGROUPS
    row: Any = 0
    column: Any = 0
    if config.tile_kv > WARPGROUP_ROWS:
        row, width = pl.multiple_of(wg * WARPGROUP_ROWS, WARPGROUP_ROWS), config.head_dim
    elif width >= mosaic.SLICE:
        column = pl.multiple_of(wg * width, mosaic.SLICE)
    is_whole = width < mosaic.SLICE

    @pl.when(wg == 0 if is_whole else wg < COMPUTE_WARPGROUPS)
    def _() -> None:
        at = pl.ds(row, WARPGROUP_ROWS), pl.ds(column, config.head_dim if is_whole else width)
        visit(row, *(tile.at[at] for tile in tiles))

    plgpu.commit_smem()  # of one who visited nothing too: what it has read, a copy may overwrite
    plgpu.barrier_arrive(at["ready"])
    plgpu.barrier_wait(at["ready"])


def _logits(config: PrefillConfig, s: _Item, scores: jax.Array, ahead: jax.Array, *, masked: bool) -> jax.Array:
    """Scaled and capped products in units of log 2, hidden ones masked."""
    scores = mosaic.logits(scores, config.scale, config.soft_cap)
    if masked:
        query = s.position + lax.div(mosaic.index(scores.shape, 0) + lax.axis_index("wg") * WARPGROUP_ROWS, jnp.int32(config.group))
        token = mosaic.index(scores.shape, 1) + ahead
        visible = token <= query
        if config.window is not None:
            visible = visible & (token > query - config.window)
        scores = jnp.where(visible & (token < s.steps.context), scores, MASKED)
    return scores


def _clear(config: PrefillConfig, s: _Item, ahead: jax.Array, oldest: jax.Array, stage: jax.Array, at: dict[str, Any]) -> None:
    """Zero what no query of the tile can see."""
    first, stop = oldest - ahead, s.steps.context - ahead

    @pl.when((stop < config.tile_kv) | (first > 0))
    def _() -> None:
        _divide(config, at, lambda begin, piece: mosaic.clear_hidden(piece, first - begin, stop - begin), at["v"].at[stage])
