"""Simulated steps a second: steady decode, nothing arrives, every row makes a token a step.

Shared by the benches of this package and of the engine, which brings the cache that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from octavo_core.native import turns
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.scheduler import ChunkedScheduler
from octavo_scheduler._src.sim_cost import CostModel
from octavo_scheduler._src.sim_loop import COMPILER_OPTIONS, Simulator
from octavo_scheduler._src.sim_state import Requests, World, requests_of
from octavo_scheduler._src.sim_trace import make_trace
from octavo_scheduler._src.sim_turn import HostRules

ROWS: Final = 256
BLOCKS: Final = 16_384
BLOCK_SIZE: Final = 32
MAX_LEN: Final = 4_096
CONFIGURATIONS: Final = 64

CacheMaker = Callable[[CacheSpec], PrefixCache[Any]]


class Steady:
    """A simulated engine whose rows all decode, about nine tenths of its pool in use.

    Args:
        make_cache: Who holds the blocks.
        rows: Sequences that decode.
        blocks: Of the pool.
    """

    def __init__(self, make_cache: CacheMaker, rows: int = ROWS, blocks: int = BLOCKS) -> None:
        spec = CacheSpec((blocks + 1,), BLOCK_SIZE, rows, MAX_LEN // BLOCK_SIZE)
        cache = make_cache(spec)
        config = SchedulerConfig(max_num_seqs=rows, token_budget=2_048, watermark_blocks=1, reservation="none")
        # Lengths begin at every offset in a block, so that one row in 32 takes a new one each step.
        length = blocks * 27 // 32 // rows * BLOCK_SIZE + np.arange(rows) % BLOCK_SIZE
        trace = make_trace("steady", np.zeros(rows), length, np.full(rows, MAX_LEN) - length)
        self.rows = rows
        self.requests: Requests = requests_of(trace, with_parts=True)
        self.simulator = Simulator(
            ChunkedScheduler(config, cache), cache, CostModel((0.01,)), HostRules(max_arrivals=8, span=MAX_LEN)
        )
        self.world = self._filled()

    def _filled(self) -> World:
        """Every prompt computed."""
        world = self.simulator.init(self.requests, self.rows)
        for _ in range(64):
            world, line = self.simulator._run(world, self.requests, length=64)
            if not np.asarray(line.prefill_tokens)[-8:].any() and int(line.num_decodes[-1]) == self.rows:
                return world
        raise RuntimeError(f"the bench wanted {self.rows} rows to decode, got {int(line.num_decodes[-1])}")

    def steps_per_s(self, steps: int, repeats: int) -> float:
        """Scan steps of one configuration; the fastest of some repeats."""

        def scan(world: World) -> tuple[World, Any]:
            return self._scan(world, steps)

        return steps / self._fastest(jax.jit(scan, donate_argnums=0, compiler_options=COMPILER_OPTIONS), self.world, repeats)

    def steps_per_s_of_many(self, steps: int, repeats: int, *, side_by_side: bool, configurations: int = CONFIGURATIONS) -> float:
        """Steps of many configurations in one program, of all together.

        Args:
            steps: Of each.
            repeats: The fastest counts.
            side_by_side: By `vmap`, where a branch outside a native function costs as much as both its sides; otherwise one configuration
                after another (`lax.map`).
            configurations: So many.
        """
        worlds = jax.tree.map(lambda x: jnp.broadcast_to(x, (configurations, *x.shape)), self.world)

        def scan(worlds: World) -> tuple[World, Any]:
            if side_by_side:
                return jax.vmap(lambda world: self._scan(world, steps))(worlds)
            return lax.map(lambda world: self._scan(world, steps), worlds)

        return (
            configurations
            * steps
            / self._fastest(jax.jit(scan, donate_argnums=0, compiler_options=COMPILER_OPTIONS), worlds, repeats)
        )

    def _scan(self, world: World, steps: int) -> tuple[World, Any]:
        def run(world: World, requests: Requests) -> tuple[World, Any]:
            return turns(lambda world: self._counted(world, requests), world, steps)

        return self.simulator._native(run)(world, self.requests)

    def _counted(self, world: World, requests: Requests) -> tuple[World, Any]:
        """A step of scheduler and cache with what the host and the clock do around it; nobody arrives."""
        world, line = self.simulator.turn.serve(world, requests)
        return world, line.num_decodes

    def _fastest(self, scan: Any, worlds: World, repeats: int) -> float:
        best, copies = float("inf"), (jax.tree.map(jnp.array, worlds) for _ in range(repeats + 1))
        for turn, world in enumerate(copies):
            start = time.perf_counter()
            _, rows = jax.block_until_ready(scan(world))
            best = min(best, time.perf_counter() - start) if turn else best
            if not (np.asarray(rows) == self.rows).all():
                raise RuntimeError(f"the bench wanted {self.rows} rows in every step, got as few as {int(np.min(rows))}")
        return best
