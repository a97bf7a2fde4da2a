"""What the Hopper kernels share: three JAX versions' spellings, shared-memory tiles, and the two lines an interpreter cannot run.

Knows Pallas Mosaic GPU. Knows nothing of attention's masks, plans or block tables.

Interpreted and shipped kernels differ here and nowhere else: the interpreter takes no matrix operand from registers and no
accumulator that starts from a value, so `weighted_sum` goes through shared memory and adds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E: Final = math.log2(math.e)
MASKED: Final = -1e30
"""Score of a token nobody may see."""
FLOOR: Final = -1e20
"""Where a running maximum starts: far above `MASKED`, so that a tile without visible tokens weighs exactly 0."""

SWIZZLE_BYTES: Final = (128, 64, 32)
PART: Final = 128
"""Widest accumulator of one product, in elements; answers of wider heads are summed in parts."""
SLICE: Final = 64
"""Columns that are widened or cleared at once, where registers are few."""
TILE_ROWS: Final = 8
"""Rows of a shared-memory tile; copies between memories move multiples of it."""
WARPGROUP_ROWS: Final = 64
"""Rows of a warpgroup's matrix product."""
MAX_SMEM_BYTES: Final = 227 * 1024
"""Shared memory a thread block of Hopper can have."""
COPY_REGISTERS: Final = 40
COMPUTE_REGISTERS: Final = 232
"""Registers of a thread of the copying and of a computing warpgroup: 40 + 2 * 232 = 3 * 168, what the three start with."""
BARRIER_BYTES: Final = 8
REDUCTION_BYTES: Final = 2048
"""What Mosaic keeps for itself (its `reduction_scratch_bytes`, rounded up)."""

WGMMA: Final = plgpu.Layout.WGMMA
RUNS: Final = plgpu.Layout.WGMMA_UPCAST_4X
"""The rows of `WGMMA`, with 8 neighbours of a row in each thread: fewest addresses for what goes from shared memory to shared memory."""


def tiled(shape: tuple[int, ...], dtype: Any, width: int | None = None) -> Any:
    """Shared memory in the tiles that copies and matrix units agree on, as wide as divide `width` columns, or all."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(bytes_ for bytes_ in SWIZZLE_BYTES if (width or shape[-1]) * size % bytes_ == 0)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((TILE_ROWS, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    )


def parts(width: int) -> tuple[tuple[int, int], ...]:
    """First element and size of the parts that answers of so many elements are summed in."""
    return tuple((begin, min(PART, width - begin)) for begin in range(0, width, PART))


def columns(ref: Any, begin: int, size: int) -> Any:
    """Some columns of a matrix in shared memory."""
    rows, width = ref.shape
    return ref if size == width else ref.at[pl.ds(0, rows), pl.ds(begin, size)]


def smem_bytes(scratch: Any) -> int:
    """Bytes of shared memory of a scratch declaration, barriers and Mosaic's own included."""
    total = REDUCTION_BYTES
    for leaf in jax.tree.leaves(scratch, is_leaf=lambda x: isinstance(x, plgpu.Barrier) or hasattr(x, "shape")):
        if isinstance(leaf, plgpu.Barrier):
            total += BARRIER_BYTES * math.prod(tuple(leaf.num_barriers))  # type: ignore[arg-type]
        else:
            total += -(-math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize // 1024) * 1024
    return total


def transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory with its axes exchanged."""
    return ref.transpose((1, 0)) if hasattr(ref, "transpose") else plgpu.transpose_ref(ref, (1, 0))


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def down(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per row, repeated along the row."""
    return lax.broadcast_in_dim(x, shape, [0])


def across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """One number per column, repeated down the column."""
    return lax.broadcast_in_dim(x, shape, [1])


def by_column(ref: Any) -> jax.Array:
    """Numbers in shared memory, one per column of a product."""
    return plgpu.layout_cast(ref[...], WGMMA.reduce(0))


def widen(narrow: Any, wide: Any, first: Any = None, stop: Any = None) -> None:
    """Write elements of 8 bits as bfloat16; rows outside [first, stop), where given, as zeros. Both are in shared memory.

    Exact, and through registers: wgmma takes no two types, and a scale a token is not for it to apply.
    """

    def one(row: int, narrow: Any, wide: Any) -> None:
        values = _load(narrow, RUNS).astype(jnp.float16).astype(jnp.float32)
        if first is not None:
            number = index(values.shape, 0, RUNS) + row
            values = jnp.where((number >= first) & (number < stop), values, jnp.zeros_like(values))
        wide[...] = values.astype(jnp.bfloat16)

    _by_slice(one, narrow, wide)


def _load(ref: Any, layout: Any) -> jax.Array:
    """Before JAX 0.12 an index is asked for."""
    extra = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()
    return plgpu.load(ref, *extra, layout=layout, optimized=False)


def index(shape: tuple[int, ...], axis: int, layout: Any = WGMMA) -> jax.Array:
    """Row or column number of each element of a warpgroup's matrix."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def logits(scores: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """Products of queries and keys, scaled and capped, in units of log 2."""
    if soft_cap is None:
        return scores * (scale * LOG2E)
    return jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)


def products(
    queries: Any, keys: Any, shape: tuple[int, int], *, part: int = PART, meanwhile: Callable[[], None] | None = None
) -> jax.Array:
    """Queries times keys, `part` of their elements at a time, in a loop: unrolled, addresses of all matrices of wide ones would be kept in
    registers from step to step."""
    rows, width = queries.shape

    def run(acc: Any) -> jax.Array:
        def one(i: jax.Array, _: tuple[()]) -> tuple[()]:
            at = pl.ds(pl.multiple_of(i * part, SLICE), part)
            plgpu.wgmma(acc, queries.at[pl.ds(0, rows), at], transposed(keys.at[pl.ds(0, keys.shape[0]), at]))
            return ()

        if width <= part:
            plgpu.wgmma(acc, queries, transposed(keys))
        else:
            lax.fori_loop(0, width // part, one, ())
        if meanwhile is not None:
            meanwhile()
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))  # type: ignore[arg-type]


def weighted_sum(acc: jax.Array, weights: jax.Array, values: Any, spill: Any, *, interpreted: bool) -> jax.Array:
    """`acc + weights @ values`: weights from registers, or, interpreted, through the shared memory `spill`."""
    if interpreted:
        spill[...] = weights
        plgpu.commit_smem()

        def alone(ref: Any) -> jax.Array:
            plgpu.wgmma(ref, spill, values)
            return ref[...]

        return acc + pl.run_scoped(alone, plgpu.WGMMAAccumulatorRef(acc.shape, jnp.float32))  # type: ignore[arg-type]

    def run(ref: Any) -> None:
        plgpu.wgmma(ref, weights, values)

    return pl.run_state(run)(plgpu.WGMMAAccumulatorRef.init(acc))


def weighted_sums(
    acc: tuple[jax.Array, ...], weights: jax.Array, values: Any, spill: Any, *, interpreted: bool
) -> tuple[jax.Array, ...]:
    """`weighted_sum` of each part of the columns of `values`."""
    each = zip(acc, parts(values.shape[1]), strict=True)
    return tuple(weighted_sum(x, weights, columns(values, *part), spill, interpreted=interpreted) for x, part in each)


def clear_hidden(values: Any, first: Any, stop: jax.Array) -> None:
    """Zero the rows of a tile in shared memory outside [first, stop): stale memory may hold NaN, and NaN times 0 is NaN."""

    def one(row: int, tile: Any) -> None:
        number = index(tile.shape, 0, RUNS) + row
        loaded = _load(tile, RUNS)
        tile[...] = jnp.where((number >= first) & (number < stop), loaded, jnp.zeros_like(loaded))

    _by_slice(one, values)


def _by_slice(visit: Callable[..., None], *matrices: Any) -> None:
    """Call `visit` with a first row, then the same rows of a warpgroup and `SLICE` columns of each matrix in shared memory; then show other
    units what was written. In a loop: it takes the registers of one slice, where unrolled code would keep addresses of all."""
    rows, width = matrices[0].shape

    def one(i: jax.Array, _: tuple[()]) -> tuple[()]:
        for row in range(0, rows, WARPGROUP_ROWS):
            at = pl.ds(row, WARPGROUP_ROWS), pl.ds(pl.multiple_of(i * SLICE, SLICE), SLICE)
            visit(row, *(matrix.at[at] for matrix in matrices))
        return ()

    lax.fori_loop(0, width // SLICE, one, ())
    plgpu.commit_smem()
