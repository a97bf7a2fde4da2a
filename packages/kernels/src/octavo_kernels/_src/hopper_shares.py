"""Equal shares of all KV of a step for the thread blocks that stay on the multiprocessors, and the segments of a share.

Knows lengths of rows. Knows nothing of KV, nor of who computes.

Source: Stream-K (Osama et al. 2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from octavo_kernels._src.hopper_copy import Steps


@runtime_checkable
class Shared(Protocol):
    """What sharing out needs of a kernel's configuration."""

    @property
    def kv_heads(self) -> int:
        """Heads, each of which reads its row's KV."""

    @property
    def tile_kv(self) -> int:
        """KV tokens of a step."""

    @property
    def num_ctas(self) -> int:
        """Thread blocks."""

    @property
    def window(self) -> int | None:
        """Tokens looked back, or None."""


class Shares(NamedTuple):
    """Who reads what.

    Attributes:
        start: Of each thread block: row, KV head and step its share starts at, steps in it, segments in it.
        rows: Of each row: steps of all rows before it (times KV heads), its own steps, steps of a share.
    """

    start: Int32[Array, "ctas 5"]
    rows: Int32[Array, "rows 3"]


def first_step(context: Any, config: Shared) -> Any:
    """First step of a row in which anything is visible."""
    return 0 if config.window is None else jnp.maximum(context - config.window, 0) // config.tile_kv


def share_out(context_len: Int32[Array, " rows"], num_single: Int32[Array, ""], config: Shared) -> Shares:
    """Cut the KV of the first `num_single` rows into equal shares."""
    rows = jnp.arange(len(context_len), dtype=jnp.int32)
    steps = -(-context_len // config.tile_kv) - first_step(context_len, config)
    steps = jnp.where(rows < num_single, jnp.maximum(steps, 1), 0)
    ends = jnp.cumsum(steps) * config.kv_heads
    share = jnp.maximum(-(-ends[-1] // config.num_ctas), 1)
    begin = jnp.minimum(jnp.arange(config.num_ctas, dtype=jnp.int32) * share, ends[-1])
    count = jnp.minimum(share, ends[-1] - begin)

    def place(at: Int32[Array, " ctas"]) -> tuple[Int32[Array, " ctas"], ...]:
        row = jnp.minimum(jnp.sum(ends[None] <= at[:, None], axis=1, dtype=jnp.int32), len(rows) - 1)
        length = jnp.maximum(steps[row], 1)
        inside = at - (ends[row] - length * config.kv_heads)
        return row, inside // length, inside % length

    row, head, step = place(begin)
    last_row, last_head, _ = place(jnp.maximum(begin + count - 1, 0))
    segments = jnp.where(count > 0, (last_row - row) * config.kv_heads + last_head - head + 1, 0)
    start = jnp.stack([row, head, step, count, segments], axis=1).astype(jnp.int32)
    return Shares(start, jnp.stack([ends - steps * config.kv_heads, steps, jnp.full_like(steps, share)], axis=1))


class Segment(NamedTuple):
    """A stretch of one row and KV head; `number` of the share's."""

    number: jax.Array
    steps: Steps


def each_segment(config: Shared, context_len: Any, start: Any, visit: Any) -> tuple[jax.Array, jax.Array]:
    """Call `visit` with each segment of this thread block's share; answers the share's segments and steps."""
    cta = lax.axis_index("cta")
    row, head, step, steps, segments = (start[cta, i] for i in range(5))

    def one(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, head, step, before = state
        context = context_len[row]
        first = first_step(context, config)
        whole = jnp.maximum(lax.div(context + (config.tile_kv - 1), jnp.int32(config.tile_kv)) - first, 1)
        count = jnp.minimum(whole - step, steps - before)
        visit(Segment(number, Steps(row, head, context, first + step, count, before)))
        is_last = head + 1 == config.kv_heads
        return jnp.where(is_last, row + 1, row), jnp.where(is_last, 0, head + 1), jnp.int32(0), before + count

    lax.fori_loop(0, segments, one, (row, head, step, jnp.int32(0)))
    return segments, steps
