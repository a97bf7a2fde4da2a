"""Decode on Hopper: rows with one new token, each over a long context, at the speed of memory.

One thread block stays on each multiprocessor and reads an equal share of all KV of the step, whatever the lengths of its rows: the
share may start and end inside a row. Each stretch of one row and KV head in a share is a *segment*; it leaves one partial
result with its log-sum-exp, and `hopper_merge` adds these up.

Roles in a thread block: one warpgroup issues copies (TMA, one block of KV and one KV head each, at the block id it reads from the
table), two compute on alternate tiles. The query heads of a KV head are the rows of one matrix product.

Source: FlashAttention-3 (Shah et al. 2024) for the roles, FlashDecoding and Stream-K (Osama et al. 2023) for the shares.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from octavo_kernels._src import mosaic
from octavo_kernels._src.fp8 import FP8
from octavo_kernels._src.hopper_copy import Steps, copy_steps, observe
from octavo_kernels._src.hopper_shares import Segment, Shares, each_segment
from octavo_kernels._src.mosaic import FLOOR, MASKED, TILE_ROWS, WARPGROUP_ROWS, WGMMA

COMPUTE_WARPGROUPS = 2
COPY_WARPGROUP = COMPUTE_WARPGROUPS


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Shapes and choices a decode kernel is compiled for.

    Attributes:
        group: Query heads of a head, at most 64.
        kv_heads: Heads; `fold` of them read one KV head of the pool.
        head_dim, block_size, stored: Of the pool; `stored` is the name of its element type, FP8 with scales.
        tile_kv: KV tokens of one step; whole blocks.
        stages: Steps of KV in shared memory; even, because compute warpgroups take turns.
        num_ctas: Thread blocks, one per multiprocessor.
        scale, soft_cap, window: Of the scores.
        interpreted: For the interpreter (`mosaic`).
        free_too_early: Plants a fault: copies are issued before their buffer is known to be free.
    """

    group: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    tile_kv: int = 64
    stages: int = 4
    num_ctas: int = 132
    soft_cap: float | None = None
    window: int | None = None
    fold: int = 1
    stored: str = "bfloat16"
    interpreted: bool = False
    free_too_early: bool = False

    @property
    def group_rows(self) -> int:
        """Rows of a partial result: the group, in whole tiles."""
        return -(-self.group // TILE_ROWS) * TILE_ROWS

    @property
    def tile_blocks(self) -> int:
        """Blocks of a step."""
        return self.tile_kv // self.block_size

    @property
    def has_scales(self) -> bool:
        """Elements are FP8."""
        return self.stored in FP8

    @property
    def query_buffers(self) -> int:
        """Segments whose queries are in shared memory."""
        return 2 if self.head_dim <= mosaic.PART else 1

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape = (self.stages, self.tile_kv, self.head_dim)
        spill = (COMPUTE_WARPGROUPS, WARPGROUP_ROWS, self.tile_kv)
        wide = (COMPUTE_WARPGROUPS, *shape[1:])
        arrivals = self.tile_blocks * (2 if self.has_scales else 1)
        return {
            "q": mosaic.tiled((self.query_buffers, WARPGROUP_ROWS, self.head_dim), jnp.bfloat16),
            "k": mosaic.tiled(shape, self.stored, mosaic.SLICE),
            "v": mosaic.tiled(shape, self.stored, mosaic.SLICE),
            "k_scale": plgpu.SMEM(shape[:2], jnp.float32) if self.has_scales else None,
            "v_scale": plgpu.SMEM(shape[:2], jnp.float32) if self.has_scales else None,
            "wide": mosaic.tiled(wide, jnp.bfloat16) if self.has_scales else None,
            "out": mosaic.tiled((WARPGROUP_ROWS, min(self.head_dim, mosaic.PART)), jnp.float32),
            "top": plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
            "total": plgpu.SMEM((WARPGROUP_ROWS,), jnp.float32),
            "spill": mosaic.tiled(spill, jnp.bfloat16) if self.interpreted else None,
            "q_full": plgpu.Barrier(num_barriers=self.query_buffers),
            "q_free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self.query_buffers),
            "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            "v_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            "k_free": plgpu.Barrier(num_barriers=self.stages),
            "v_free": plgpu.Barrier(num_barriers=self.stages),
            "out_full": plgpu.Barrier(),
            "out_free": plgpu.Barrier(),
        }

    def smem_bytes(self) -> int:
        """Shared memory of a thread block."""
        return mosaic.smem_bytes(self.scratch())


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def partial_results(
    q: BFloat16[Array, "tokens heads group head_dim"],
    kv: dict[str, Array],
    table: Int32[Array, "rows max_blocks"],
    context_len: Int32[Array, " rows"],
    shares: Shares,
    config: DecodeConfig,
    interpret: Any = None,
) -> tuple[Float32[Array, "slots group_rows head_dim"], Float32[Array, "slots group_rows"]]:
    """One partial result a segment, at slot row * kv_heads + head + thread block; other slots hold anything.

    `kv` has a layer's pools `k` and `v` [blocks, kv_heads, block_size, head_dim]; with scales `k_scale` and `v_scale`, without the last axis.

    Cost: reads each visible K and V once; writes `group_rows * (head_dim + 1)` floats a segment.
    """
    slots = context_len.shape[0] * config.kv_heads + config.num_ctas
    queries = q[: len(context_len)].reshape(-1, config.group, config.head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, config.group_rows - config.group), (0, 0)))

    names = tuple(kv)

    def octavo_decode(q: Any, table: Any, context_len: Any, start: Any, *rest: Any) -> None:
        _body(config, q, dict(zip(names, rest, strict=False)), table, context_len, start, *rest[len(names) :])

    run = plgpu.kernel(
        octavo_decode,
        out_type=(
            jax.ShapeDtypeStruct((slots, config.group_rows, config.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((slots, config.group_rows), jnp.float32),
        ),
        scratch_types=[config.scratch()],
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(queries, table, context_len, shares.start, *kv.values())


def _body(
    config: DecodeConfig,
    q: Any,
    kv: dict[str, Any],
    table: Any,
    context_len: Any,
    start: Any,
    out: Any,
    lse: Any,
    scratch: dict[str, Any],
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == COPY_WARPGROUP)
    def _copy() -> None:
        plgpu.set_max_registers(mosaic.COPY_REGISTERS, action="decrease")
        _copy_share(config, q, kv, table, context_len, start, scratch)

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(mosaic.COMPUTE_REGISTERS, action="increase")
        _compute_share(config, context_len, start, out, lse, scratch)


def _copy_share(
    config: DecodeConfig, q: Any, kv: dict[str, Any], table: Any, context_len: Any, start: Any, at: dict[str, Any]
) -> None:
    def segment(s: Segment) -> None:
        buffer = lax.rem(s.number, jnp.int32(config.query_buffers))

        @pl.when(s.number >= config.query_buffers)
        def _() -> None:
            plgpu.barrier_wait(at["q_free"].at[buffer])

        tile = at["q"].at[buffer, pl.ds(0, config.group_rows)]
        plgpu.copy_gmem_to_smem(q.at[s.steps.row * config.kv_heads + s.steps.head], tile, at["q_full"].at[buffer])
        copy_steps(config, s.steps, kv, table, at)

    segments, steps = each_segment(config, context_len, start, segment)
    observe(at["q_free"], segments, config.query_buffers)
    observe(at["k_free"], steps, config.stages)
    observe(at["v_free"], steps, config.stages)


def _compute_share(config: DecodeConfig, context_len: Any, start: Any, out: Any, lse: Any, at: dict[str, Any]) -> None:
    wg = lax.axis_index("wg")
    cta = lax.axis_index("cta")

    def segment(s: Segment) -> None:
        buffer = lax.rem(s.number, jnp.int32(config.query_buffers))
        plgpu.barrier_wait(at["q_full"].at[buffer])
        skip = lax.rem(s.steps.before + wg, jnp.int32(2))
        state = (
            tuple(mosaic.filled((WARPGROUP_ROWS, size), 0.0, WGMMA) for _, size in mosaic.parts(config.head_dim)),
            mosaic.filled((WARPGROUP_ROWS,), FLOOR, WGMMA.reduce(1)),
            mosaic.filled((WARPGROUP_ROWS,), 0.0, WGMMA.reduce(1)),
        )
        turns = lax.div(s.steps.num_tiles - skip + 1, jnp.int32(2))
        acc, top, total = lax.fori_loop(0, turns, lambda j, x: _step(config, s.steps, skip + 2 * j, buffer, at, x), state)
        plgpu.barrier_arrive(at["q_free"].at[buffer])

        for number, part in enumerate(acc):

            @pl.when(wg == 1)
            def _hand_over(number: int = number, part: jax.Array = part) -> None:
                @pl.when((s.number >= 1) | (number > 0))
                def _() -> None:
                    plgpu.barrier_wait(at["out_free"])

                at["out"][...], at["top"][...], at["total"][...] = part, top, total
                plgpu.barrier_arrive(at["out_full"])

            @pl.when(wg == 0)
            def _finish(number: int = number, part: jax.Array = part) -> None:
                plgpu.barrier_wait(at["out_full"])
                _store(part, top, total, at)
                slot = s.steps.row * config.kv_heads + s.steps.head + cta
                rows = pl.ds(0, config.group_rows)
                target = out.at[slot, pl.ds(0, config.group_rows), pl.ds(number * mosaic.PART, part.shape[1])]
                plgpu.copy_smem_to_gmem(at["out"].at[rows], target)
                plgpu.copy_smem_to_gmem(at["top"].at[rows], lse.at[slot])
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(at["out_free"])

    segments, _ = each_segment(config, context_len, start, segment)

    @pl.when((wg == 1) & (segments > 0))
    def _observe_last() -> None:
        plgpu.barrier_wait(at["out_free"])


def _step(
    config: DecodeConfig, s: Steps, i: jax.Array, buffer: jax.Array, at: dict[str, Any], state: tuple[Any, ...]
) -> tuple[Any, ...]:
    """One tile of KV."""
    acc, top, total = state
    shape = (WARPGROUP_ROWS, config.tile_kv)
    stage = lax.rem(s.before + i, jnp.int32(config.stages))
    ahead = (s.first + i) * config.tile_kv
    oldest = 0 if config.window is None else jnp.maximum(s.context - config.window, 0)

    scores = _products(config, stage, buffer, at)
    token = mosaic.index(shape, 1) + ahead
    visible = token < s.context if config.window is None else (token < s.context) & (token >= oldest)
    scores = jnp.where(visible, mosaic.logits(scores, config.scale, config.soft_cap), MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    fade = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - mosaic.down(new_top, shape))
    total = total * fade + weights.sum(axis=1)
    acc = tuple(part * mosaic.down(fade, part.shape) for part in acc)
    return _add_values(config, acc, weights, visible, (oldest - ahead, s.context - ahead), stage, at), new_top, total


def _products(config: DecodeConfig, stage: jax.Array, buffer: jax.Array, at: dict[str, Any]) -> jax.Array:
    """Queries times keys; of FP8 ones, which go through `wide`, times their scales."""
    shape = (WARPGROUP_ROWS, config.tile_kv)
    keys = at["k"].at[stage]
    plgpu.barrier_wait(at["k_full"].at[stage])
    if not config.has_scales:
        scores = mosaic.products(at["q"].at[buffer], keys, shape)
        plgpu.barrier_arrive(at["k_free"].at[stage])
        return scores
    wide = at["wide"].at[lax.axis_index("wg")]
    plgpu.commit_smem()  # every warp is done with what was in `wide`
    mosaic.widen(keys, wide)
    scores = mosaic.products(at["q"].at[buffer], wide, shape)
    scores = scores * mosaic.across(mosaic.by_column(at["k_scale"].at[stage]), shape)  # read late: it takes registers
    plgpu.commit_smem()  # the scale has been read, so a copy may overwrite it
    plgpu.barrier_arrive(at["k_free"].at[stage])
    return scores


def _add_values(
    config: DecodeConfig,
    acc: tuple[jax.Array, ...],
    weights: jax.Array,
    visible: jax.Array,
    seen: tuple[Any, Any],
    stage: jax.Array,
    at: dict[str, Any],
) -> tuple[jax.Array, ...]:
    """Accumulators plus weighted values; rows of V outside [first, stop) of `seen` may be anything and are zeroed first."""
    wg = lax.axis_index("wg")
    values, first, stop = at["v"].at[stage], *seen
    plgpu.barrier_wait(at["v_full"].at[stage])
    if config.has_scales:
        plgpu.commit_smem()
        scale = mosaic.by_column(at["v_scale"].at[stage])
        mosaic.widen(values, at["wide"].at[wg], first, stop)
        plgpu.barrier_arrive(at["v_free"].at[stage])
        values = at["wide"].at[wg]
        weights = jnp.where(visible, weights * mosaic.across(scale, weights.shape), 0.0)
    else:
        pl.when((stop < config.tile_kv) | (first > 0))(lambda: mosaic.clear_hidden(values, first, stop))
    spill = at["spill"].at[wg] if config.interpreted else None
    acc = mosaic.weighted_sums(acc, weights.astype(jnp.bfloat16), values, spill, interpreted=config.interpreted)
    if not config.has_scales:
        plgpu.barrier_arrive(at["v_free"].at[stage])
    return acc


def _store(acc: jax.Array, top: jax.Array, total: jax.Array, at: dict[str, Any]) -> None:
    """Join both warpgroups' halves; leaves the normalised result in `out` and its log-sum-exp (base 2) in `top`."""
    column = WGMMA.reduce(1)
    other_acc = plgpu.layout_cast(at["out"][...], WGMMA)
    other_top = plgpu.layout_cast(at["top"][...], column)
    other_total = plgpu.layout_cast(at["total"][...], column)
    both = jnp.maximum(top, other_top)
    mine, other = jnp.exp2(top - both), jnp.exp2(other_top - both)
    total = total * mine + other_total * other
    some = jnp.where(total > 0, total, 1.0)
    acc = acc * mosaic.down(mine / some, acc.shape) + other_acc * mosaic.down(other / some, acc.shape)
    at["out"][...] = acc
    at["top"][...] = jnp.where(total > 0, both + jnp.log2(some), FLOOR)
    plgpu.commit_smem()
