"""Adds up the partial results of `hopper_decode`: log-sum-exp merge, one thread block per KV head of a row.

Knows where partial results lie and how many there are. Knows nothing of KV.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int32

from octavo_kernels._src.mosaic import FLOOR, LOG2E

LANES = 128
"""Elements merged at once, one a thread."""
THREADS = plgpu.Layout.WG_STRIDED((LANES,), 1)


@runtime_checkable
class Merged(Protocol):
    """What merging needs of a kernel's configuration."""

    @property
    def group(self) -> int:
        """Rows of an answer."""

    @property
    def group_rows(self) -> int:
        """Rows of a partial result."""

    @property
    def kv_heads(self) -> int:
        """Answers of a row."""

    @property
    def head_dim(self) -> int:
        """Elements of a row of an answer."""


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def merge(
    partial: Float[Array, "slots group_rows head_dim"],
    lse: Float32[Array, "slots group_rows"],
    rows: Int32[Array, "rows 3"],
    sinks: Float32[Array, " q_heads"] | None,
    config: Merged,
    interpret: Any = None,
    *,
    live: Int32[Array, " rows"] | None = None,
) -> BFloat16[Array, "rows kv_heads group_rows head_dim"]:
    """The answer of every row with a share; other rows, and group rows beyond the group or its live part, hold anything.

    Args:
        partial, lse: From `partial_results`.
        rows: From `share_out`.
        sinks: A logit per query head that takes weight and gives nothing.
        config: The one `partial` was made with.
        interpret: Pallas's own argument.
        live: Of each row: group rows whose answers are wanted; None: the group.
    """
    num_rows, shape = rows.shape[0], (rows.shape[0], config.kv_heads, config.group_rows, config.head_dim)
    chunks = -(-config.group * config.head_dim // LANES)
    with_sinks = sinks is not None

    def octavo_merge(*refs: Any) -> None:
        if live is None:
            _body(config, with_sinks, *refs)
            return
        wanted = refs[-2][lax.axis_index("row")] * config.head_dim
        pl.when(lax.axis_index("chunk") * LANES < wanted)(lambda: _body(config, with_sinks, *refs))

    run = plgpu.kernel(
        octavo_merge,
        out_type=jax.ShapeDtypeStruct((num_rows, config.kv_heads, config.group_rows * config.head_dim), jnp.bfloat16),
        grid=(num_rows, config.kv_heads, chunks),
        grid_names=("row", "head", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    flat = partial.reshape(partial.shape[0], -1)
    extra = [] if sinks is None else [jnp.pad(sinks * LOG2E, (0, config.group_rows - config.group))]
    extra += [] if live is None else [live]
    return run(flat, lse, rows, *extra).reshape(shape)


def _body(config: Merged, with_sinks: bool, partial: Any, lse: Any, rows: Any, *rest: Any) -> None:
    row, head, chunk = (lax.axis_index(name) for name in ("row", "head", "chunk"))
    out = rest[-1]
    before, steps, share = rows[row, 0] + head * rows[row, 1], rows[row, 1], rows[row, 2]
    item = row * config.kv_heads + head
    begin = item + lax.div(before, share)
    stop = jnp.where(steps > 0, item + lax.div(before + steps - 1, share) + 1, begin)
    lanes = pl.ds(chunk * LANES, LANES)
    group_row = lax.div(chunk * LANES, jnp.int32(config.head_dim))

    def vector(value: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((LANES,), value, jnp.float32), THREADS)

    def by_row(read: Any) -> jax.Array:
        """One number per group row, repeated over the row's elements in this chunk."""
        found = vector(read(group_row))
        if config.head_dim % LANES == 0:
            return found
        for i in range(1, max(LANES // config.head_dim, 2)):
            lane = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=THREADS)
            begin = (group_row + i) * config.head_dim - chunk * LANES
            found = jnp.where(lane >= begin, vector(read(jnp.minimum(group_row + i, config.group_rows - 1))), found)
        return found

    def one(slot: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, top, total = state
        level = by_row(lambda r: lse[slot, r])
        new_top = jnp.maximum(top, level)
        fade, weight = jnp.exp2(top - new_top), jnp.exp2(level - new_top)
        value = plgpu.layout_cast(partial.at[slot, lanes][...], THREADS).astype(jnp.float32)
        return acc * fade + value * weight, new_top, total * fade + weight

    top = by_row(lambda r: rest[0][head * config.group + r]) if with_sinks else vector(FLOOR)
    start = (vector(0.0), top, vector(1.0 if with_sinks else 0.0))
    acc, _, total = lax.fori_loop(begin, stop, one, start)
    out.at[row, head, lanes][...] = (acc / jnp.where(total > 0, total, 1.0)).astype(jnp.bfloat16)
