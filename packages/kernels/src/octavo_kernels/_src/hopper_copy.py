"""The copying warpgroup of the Hopper kernels: block ids read from the table in device memory, one TMA copy a block and KV head.

Knows stages and their barriers (`k_full`, `k_free`, `v_full`, `v_free`). Knows nothing of who computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Steps(NamedTuple):
    """Consecutive tiles of KV of one row and KV head.

    Attributes:
        row, head: Whose.
        context: Tokens of the row; block ids beyond it are not read.
        first, num_tiles: Tiles of the row.
        before: Steps this thread block has made ahead of these.
    """

    row: jax.Array
    head: jax.Array
    context: jax.Array
    first: jax.Array
    num_tiles: jax.Array
    before: jax.Array


@runtime_checkable
class Staged(Protocol):
    """What copying needs of a kernel's configuration."""

    @property
    def stages(self) -> int:
        """Tiles of KV in shared memory."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def tile_blocks(self) -> int:
        """Blocks of a tile."""

    @property
    def fold(self) -> int:
        """Heads of the kernel to a KV head."""

    @property
    def has_scales(self) -> bool:
        """Elements come with a scale a token, in pools beside theirs."""

    @property
    def free_too_early(self) -> bool:
        """Plants a fault: copies are issued before their buffer is known to be free."""


def copy_steps(config: Staged, steps: Steps, pools: dict[str, Any], table: Any, at: dict[str, Any]) -> None:
    """Issue the copies of these tiles, each as soon as its buffer is free. Blocks beyond the context repeat its last block.

    Args:
        config: The kernel's.
        steps: Which tiles.
        pools: `k` and `v`; with scales `k_scale` and `v_scale`. Of latents `k` alone.
        table: Block ids.
        at: Shared memory and barriers.
    """
    stages = jnp.int32(config.stages)
    names = tuple(name for name in ("k", "v") if name in pools)
    last = lax.div(jnp.maximum(steps.context - 1, 0), jnp.int32(config.block_size))

    def ids(i: jax.Array) -> tuple[jax.Array, ...]:
        begin = (steps.first + i) * config.tile_blocks
        return tuple(table[steps.row, jnp.minimum(begin + p, last)] for p in range(config.tile_blocks))

    def wait_free(i: jax.Array, name: str) -> None:
        number = steps.before + i

        @pl.when(number >= stages)
        def _() -> None:
            plgpu.barrier_wait(at[name + "_free"].at[lax.rem(number, stages)])

    head = steps.head if config.fold == 1 else lax.div(steps.head, jnp.int32(config.fold))

    def copy(i: jax.Array, name: str, blocks: tuple[jax.Array, ...]) -> None:
        stage = lax.rem(steps.before + i, stages)  # anew for K and V: kept, it costs the registers of a block id
        for p, block in enumerate(blocks):
            rows = pl.ds(p * config.block_size, config.block_size)
            for kind in (name, name + "_scale") if config.has_scales else (name,):
                plgpu.copy_gmem_to_smem(pools[kind].at[block, head], at[kind].at[stage, rows], at[name + "_full"].at[stage])

    def step(i: jax.Array, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        following = ids(i + 1)  # under way while this step waits
        for name in names:
            if not config.free_too_early:
                wait_free(i, name)
            copy(i, name, blocks)
            if config.free_too_early:
                wait_free(i, name)
        return following

    lax.fori_loop(0, steps.num_tiles, step, ids(jnp.int32(0)))


def observe(barrier: Any, phases: jax.Array, count: int) -> None:
    """Wait for the last phases of `count` barriers used in turn: one must not go with a phase unobserved."""

    def one(i: jax.Array, _: tuple[()]) -> tuple[()]:
        plgpu.barrier_wait(barrier.at[lax.rem(i, jnp.int32(count))])
        return ()

    lax.fori_loop(jnp.maximum(phases - count, 0), phases, one, ())
