"""MLA on Hopper, absorbed: one stored vector a token is key and value of all query heads; single tokens and chunks of prompts in one kernel.

A tile is one or more new tokens of one row: its matrix rows are token * heads + head, at most 64. Thread blocks read equal shares of the
KV of all tiles, as decode does (`hopper_shares`), and `hopper_merge` adds up.

Roles in a thread block: one warpgroup copies, three compute. A vector of 576 elements is too wide for the accumulators of one warpgroup, so
each sums a third of the columns over all tokens. Scores are cut the other way: two warpgroups multiply queries with half the tokens of a
step each, and all three exchange maxima and weights through shared memory.

Source: FlashMLA (DeepSeek, 2025) for cutting columns and exchanging weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

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

COMPUTE_WARPGROUPS: Final = 3
COPY_WARPGROUP: Final = COMPUTE_WARPGROUPS
SCORING_WARPGROUPS: Final = 2
COPY_REGISTERS: Final = 32
COMPUTE_REGISTERS: Final = 160
"""Of a thread: 32 + 3 * 160 = 4 * 128, what the four start with."""
TOTAL: Final = SCORING_WARPGROUPS
"""First row of `exchange` that has sums of weights; maxima come before."""


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Shapes and choices the kernel is compiled for.

    Attributes:
        heads: Query heads of a head of the kernel, at most 64.
        tile_q: New tokens of a tile.
        kv_heads: Heads of the kernel; all read the same latents.
        head_dim, block_size, stored: Of the pool; `stored` is the name of its element type, FP8 with scales.
        scale, soft_cap: Of the scores.
        tile_kv: KV tokens of one step; whole blocks, whole warpgroups' rows.
        stages: Steps of KV in shared memory.
        num_ctas: Thread blocks, one per multiprocessor.
        interpreted: For the interpreter (`mosaic`).
        free_too_early: Plants a fault: copies are issued before their buffer is known to be free.
    """

    heads: int
    tile_q: int
    kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    soft_cap: float | None = None
    tile_kv: int = 64
    stages: int = 2
    num_ctas: int = 132
    stored: str = "bfloat16"
    interpreted: bool = False
    free_too_early: bool = False

    @property
    def group(self) -> int:
        """Matrix rows of a tile."""
        return self.heads * self.tile_q

    @property
    def group_rows(self) -> int:
        """Rows of a partial result: the group, in whole tiles of shared memory."""
        return -(-self.group // TILE_ROWS) * TILE_ROWS

    @property
    def fold(self) -> int:
        """Heads of the kernel that read one head of the pool."""
        return self.kv_heads

    @property
    def window(self) -> int | None:
        """Latents have none."""
        return None

    @property
    def tile_blocks(self) -> int:
        """Blocks of a step."""
        return self.tile_kv // self.block_size

    @property
    def half(self) -> int:
        """Tokens of a step whose scores one warpgroup computes."""
        return self.tile_kv // SCORING_WARPGROUPS

    @property
    def has_scales(self) -> bool:
        """Elements are FP8."""
        return self.stored in FP8

    def columns(self, mine: int) -> tuple[int, int]:
        """First column and number of columns that a compute warpgroup sums."""
        width = self.head_dim // COMPUTE_WARPGROUPS
        return mine * width, width

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        shape = (self.stages, self.tile_kv, self.head_dim)
        weights = (WARPGROUP_ROWS, self.tile_kv)
        arrivals = self.tile_blocks * (2 if self.has_scales else 1)
        return {
            "q": mosaic.tiled((WARPGROUP_ROWS, self.head_dim), jnp.bfloat16),
            "k": mosaic.tiled(shape, self.stored, mosaic.SLICE),
            "k_scale": plgpu.SMEM(shape[:2], jnp.float32) if self.has_scales else None,
            "wide": mosaic.tiled(shape[1:], jnp.bfloat16) if self.has_scales else None,
            "weights": mosaic.tiled(weights, jnp.bfloat16, self.half),
            "exchange": plgpu.SMEM((2 * SCORING_WARPGROUPS, WARPGROUP_ROWS), jnp.float32),
            "spill": mosaic.tiled((COMPUTE_WARPGROUPS, *weights), jnp.bfloat16) if self.interpreted else None,
            "q_full": plgpu.Barrier(),
            "q_free": plgpu.Barrier(),
            "k_full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
            "k_free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=self.stages),
            "met": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        }

    def smem_bytes(self) -> int:
        """Shared memory of a thread block: rows are reduced within a warp, so Mosaic's own scratch is given up."""
        return mosaic.smem_bytes(self.scratch()) - mosaic.REDUCTION_BYTES


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def latent_results(
    q: BFloat16[Array, "tiles heads group head_dim"],
    kv: dict[str, Array],
    table: Int32[Array, "rows max_blocks"],
    about: Int32[Array, "tiles 2"],
    context_len: Int32[Array, " tiles"],
    shares: Shares,
    config: LatentConfig,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "slots group_rows head_dim"], Float32[Array, "slots group_rows"]]:
    """One partial result a segment, at slot tile * kv_heads + head + thread block; other slots hold anything, and so do rows that no token has.

    Args:
        q: Queries of each tile.
        kv: A layer's pool `k` [blocks, 1, block_size, head_dim]; with scales `k_scale`, without the last axis.
        table: Block ids of the rows.
        about: Row of each tile and position of its first token.
        context_len: Tokens that the last query of each tile can see.
        shares: From `share_out` of these.
        config: What to compile.
        interpret: Pallas's own argument.

    Cost: each tile and head reads the latents it can see once; 4 * head_dim FLOPs per query head and visible token, of 64 rows of
    which some may be padding; writes `heads * head_dim` elements a segment for each token, in whole tiles of 8 rows.
    """
    slots = context_len.shape[0] * config.kv_heads + config.num_ctas
    queries = q.reshape(-1, config.group, config.head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, config.group_rows - config.group), (0, 0)))
    names = tuple(kv)

    def octavo_latent(q: Any, table: Any, about: Any, context_len: Any, start: Any, *rest: Any) -> None:
        inputs = dict(zip(names, rest, strict=False))
        _body(config, q, inputs, table, about, context_len, start, *rest[len(names) :])

    run = plgpu.kernel(
        octavo_latent,
        out_type=(
            jax.ShapeDtypeStruct((slots, config.group_rows, config.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((slots, config.group_rows), jnp.float32),
        ),
        scratch_types=[config.scratch()],
        grid=(config.num_ctas,),
        grid_names=("cta",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return run(queries, table, about, context_len, shares.start, *kv.values())


def _body(
    config: LatentConfig,
    q: Any,
    kv: dict[str, Any],
    table: Any,
    about: Any,
    context_len: Any,
    start: Any,
    out: Any,
    lse: Any,
    scratch: dict[str, Any],
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == COPY_WARPGROUP)
    def _copy() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        _copy_share(config, q, kv, table, about, context_len, start, scratch)

    for mine in range(COMPUTE_WARPGROUPS):

        @pl.when(wg == mine)
        def _compute(mine: int = mine) -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _compute_share(config, mine, about, context_len, start, out, lse, scratch)


def _copy_share(
    config: LatentConfig,
    q: Any,
    kv: dict[str, Any],
    table: Any,
    about: Any,
    context_len: Any,
    start: Any,
    at: dict[str, Any],
) -> None:
    def segment(s: Segment) -> None:
        pl.when(s.number >= 1)(lambda: plgpu.barrier_wait(at["q_free"]))
        tile = at["q"].at[pl.ds(0, config.group_rows)]
        plgpu.copy_gmem_to_smem(q.at[s.steps.row * config.kv_heads + s.steps.head], tile, at["q_full"])
        copy_steps(config, s.steps._replace(row=about[s.steps.row, 0]), kv, table, at)

    segments, steps = each_segment(config, context_len, start, segment)
    pl.when(segments > 0)(lambda: plgpu.barrier_wait(at["q_free"]))
    observe(at["k_free"], steps, config.stages)


def _compute_share(
    config: LatentConfig, mine: int, about: Any, context_len: Any, start: Any, out: Any, lse: Any, at: dict[str, Any]
) -> None:
    cut, column = config.columns(mine), WGMMA.reduce(1)

    def segment(s: Segment) -> None:
        plgpu.barrier_wait(at["q_full"])
        position = about[s.steps.row, 1]
        state = (
            mosaic.filled((WARPGROUP_ROWS, cut[1]), 0.0, WGMMA),
            mosaic.filled((WARPGROUP_ROWS,), FLOOR, column),
            mosaic.filled((WARPGROUP_ROWS,), 0.0, column),
        )
        acc, top, total = lax.fori_loop(0, s.steps.num_tiles, lambda i, x: _step(config, mine, s.steps, position, i, at, x), state)
        total = sum(_exchanged(mine, TOTAL, total, at))
        some = jnp.where(total > 0, total, 1.0)
        answer = acc * mosaic.down(1.0 / some, acc.shape)
        mosaic.columns(at["q"], *cut)[...] = answer.astype(jnp.bfloat16)  # all have met since queries were last read
        if mine == 0:
            at["exchange"][0] = jnp.where(total > 0, top + jnp.log2(some), FLOOR)
        plgpu.commit_smem()
        _meet(at)
        if mine == 0:
            slot = s.steps.row * config.kv_heads + s.steps.head + lax.axis_index("cta")
            _write(config, s.steps.context - position, out.at[slot], lse.at[slot], at)
            plgpu.barrier_arrive(at["q_free"])

    each_segment(config, context_len, start, segment)


def _write(config: LatentConfig, tokens: jax.Array, out: Any, lse: Any, at: dict[str, Any]) -> None:
    """The rows of so many tokens, in whole tiles of shared memory, whose number must be known to a copy."""
    tiles = lax.div(tokens * config.heads + (TILE_ROWS - 1), jnp.int32(TILE_ROWS))
    for count in sorted({-(-config.heads * (i + 1) // TILE_ROWS) for i in range(config.tile_q)}):
        rows = pl.ds(0, count * TILE_ROWS)

        @pl.when(tiles == count)
        def _copy(rows: Any = rows) -> None:
            plgpu.copy_smem_to_gmem(at["q"].at[rows], out.at[rows])
            plgpu.copy_smem_to_gmem(at["exchange"].at[0, rows], lse.at[rows])
            plgpu.wait_smem_to_gmem(0)


def _meet(at: dict[str, Any]) -> None:
    """Wait for the other compute warpgroups."""
    plgpu.barrier_arrive(at["met"])
    plgpu.barrier_wait(at["met"])


def _exchanged(mine: int, first: int, numbers: jax.Array, at: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """What those who score say, one number a row; `numbers` of another warpgroup are not looked at."""
    if mine < SCORING_WARPGROUPS:
        at["exchange"][first + mine] = numbers
    _meet(at)
    one, other = (plgpu.layout_cast(at["exchange"][first + i], WGMMA.reduce(1)) for i in range(SCORING_WARPGROUPS))
    return one, other


def _step(
    config: LatentConfig, mine: int, s: Steps, position: jax.Array, i: jax.Array, at: dict[str, Any], state: tuple[Any, ...]
) -> tuple[Any, ...]:
    """One tile of KV.

    Before the first meeting queries and tokens are read; between it and the second each writes what is its own: weights of its tokens, and
    zeros in the hidden rows of its columns.
    """
    acc, top, total = state
    stage = lax.rem(s.before + i, jnp.int32(config.stages))
    ahead = (s.first + i) * config.tile_kv
    latents, cut = at["k"].at[stage], config.columns(mine)
    hidden, is_scoring = s.context - ahead, mine < SCORING_WARPGROUPS

    plgpu.barrier_wait(at["k_full"].at[stage])
    scale = mosaic.by_column(at["k_scale"].at[stage, _tokens(config, mine)]) if config.has_scales and is_scoring else None
    if config.has_scales:
        mosaic.widen(mosaic.columns(latents, *cut), mosaic.columns(at["wide"], *cut), 0, hidden)
        plgpu.barrier_arrive(at["k_free"].at[stage])
        latents = at["wide"]
        _meet(at)
    scores = _scores(config, mine, latents, scale, position, ahead, s.context, at) if is_scoring else None
    here = top if scores is None else scores.max(axis=1)
    new_top = jnp.maximum(top, jnp.maximum(*_exchanged(mine, 0, here, at)))
    fade = jnp.exp2(top - new_top)
    if scores is not None:
        weights = jnp.exp2(scores - mosaic.down(new_top, scores.shape))
        total = total * fade + weights.sum(axis=1)
        if scale is not None:
            token = mosaic.index(weights.shape, 1) + mine * config.half
            weights = jnp.where(token < hidden, weights * mosaic.across(scale, weights.shape), 0.0)
        mosaic.columns(at["weights"], mine * config.half, config.half)[...] = weights.astype(jnp.bfloat16)
    if not config.has_scales:
        pl.when(hidden < config.tile_kv)(lambda: mosaic.clear_hidden(mosaic.columns(latents, *cut), 0, hidden))
    acc = acc * mosaic.down(fade, acc.shape)
    _meet(at)
    weights = plgpu.layout_cast(at["weights"][...], WGMMA)
    spill = at["spill"].at[mine] if config.interpreted else None
    acc = mosaic.weighted_sum(acc, weights, mosaic.columns(latents, *cut), spill, interpreted=config.interpreted)
    if not config.has_scales:
        plgpu.barrier_arrive(at["k_free"].at[stage])
    return acc, new_top, total


def _tokens(config: LatentConfig, mine: int) -> Any:
    """Of a step, those whose scores a warpgroup computes."""
    return pl.ds(mine * config.half, config.half)


def _scores(
    config: LatentConfig,
    mine: int,
    latents: Any,
    scale: jax.Array | None,
    position: jax.Array,
    ahead: jax.Array,
    context: jax.Array,
    at: dict[str, Any],
) -> jax.Array:
    """Scaled and capped products of queries and this warpgroup's tokens in units of log 2, hidden ones masked."""
    shape = (WARPGROUP_ROWS, config.half)
    keys = latents.at[_tokens(config, mine), pl.ds(0, config.head_dim)]
    scores = mosaic.products(at["q"], keys, shape, part=config.head_dim // COMPUTE_WARPGROUPS)
    if scale is not None:
        scores = scores * mosaic.across(scale, shape)
    query = position + lax.div(mosaic.index(shape, 0), jnp.int32(config.heads))
    token = mosaic.index(shape, 1) + (ahead + mine * config.half)
    scores = mosaic.logits(scores, config.scale, config.soft_cap)
    return jnp.where((token <= query) & (token < context), scores, MASKED)
