"""A simulated engine: turn after turn in one program, until every request of a trace has ended.

The scheduler and the cache are the objects that serve, their `arrive` and `step` traced into one program with the host's rules and a
clock that a cost model moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.errors import ConfigError
from octavo_core.native import one_kernel, turns
from octavo_core.seams import PrefixCache, Scheduler
from octavo_scheduler._src.sim_cost import CostModel
from octavo_scheduler._src.sim_state import (
    DONE,
    MAX_S,
    REFUSED,
    Books,
    Requests,
    StepLine,
    World,
    blank_result,
    empty_books,
    nobody_served,
    requests_of,
)
from octavo_scheduler._src.sim_trace import Trace
from octavo_scheduler._src.sim_turn import HostRules, Turn

F = TypeVar("F", bound=Callable[..., Any])

COMPILER_OPTIONS: Final = {
    "xla_cpu_copy_insertion_use_region_analysis": True,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_prefer_vector_width": 512,
}
"""Without the first XLA copies whole pools inside a turn; with the second it compiles sooner; the third makes counts a sixth faster."""
STALLED: Final = 64
"""Turns without a row, a result or an arrival after which a simulation is given up."""


class Simulator:
    """A scheduler around a cache, and what stands around both, as pure functions of a `World`.

    Args:
        scheduler: Built around `cache`.
        cache: Who holds the blocks; `CountingCache` where it does not matter which.
        cost: How long a step takes.
        rules: Of the host.
    """

    def __init__(
        self, scheduler: Scheduler[Any, Any], cache: PrefixCache[Any], cost: CostModel, rules: HostRules | None = None
    ) -> None:
        self.scheduler, self.cache, self.rules = scheduler, cache, rules or HostRules()
        self.turn = Turn(scheduler, cache, cost, self.rules)
        self.counts_only = self.turn.counts_only
        self._run = jax.jit(self._scan, static_argnames="length", donate_argnums=0, compiler_options=COMPILER_OPTIONS)
        self._advance = jax.jit(self._until, donate_argnums=0, compiler_options=COMPILER_OPTIONS)

    def init(self, requests: Requests, offered: int, knobs: Mapping[str, Any] | None = None) -> World:
        """Nothing has happened; the first `offered` requests are queued in order. `knobs` as for `run`."""
        count, sequences = requests.arrival.shape[0], self.cache.spec.max_sequences
        return World(
            scheduler=self.scheduler.init(),
            cache=self.cache.init(),
            request=jnp.full(sequences, -1, jnp.int32),
            ended=jnp.zeros(sequences, bool),
            results=tuple(blank_result(sequences) for _ in range(self.rules.lag + 1)),
            queue=jnp.arange(count, dtype=jnp.int32),
            num_offered=jnp.int32(offered),
            cursor=jnp.int32(0),
            num_waiting=jnp.int32(0),
            now=jnp.int32(0),
            rest=jnp.float32(0),
            knobs={name: jnp.array(value, jnp.int32) for name, value in (self.turn.knobs | dict(knobs or {})).items()},
            serving=nobody_served(sequences),
            books=empty_books(count),
        )

    def run(
        self,
        trace: Trace,
        *,
        chunk: int = 512,
        max_steps: int = 10_000_000,
        progress: Any = None,
        knobs: Mapping[str, Any] | None = None,
    ) -> tuple[Books, StepLine]:
        """Replay a trace to its end, with NumPy arrays.

        Args:
            trace: What arrives.
            chunk: Turns between two looks of the host.
            max_steps: Give up after so many turns.
            progress: Called with the share of requests that have ended.
            knobs: Other values of settings named in `SchedulerConfig.knobs`, where blocks are only counted; the compiled program is the same.

        Raises:
            ConfigError: The trace does not fit the clock.
            RuntimeError: The scheduler stopped serving, or it took more than `max_steps`.
        """
        if len(trace) and trace.arrival_s[-1] > MAX_S:
            raise ConfigError(
                f"the clock holds {MAX_S:.0f} s, {trace.name} takes {trace.arrival_s[-1]:.0f} s; cut it or raise the load"
            )
        trace_fits(trace, self.cache.spec.usable_blocks * self.cache.spec.block_size, self._max_len())
        requests = requests_of(trace, with_parts=not self.counts_only)
        world, lines = self.init(requests, len(trace), knobs), list[StepLine]()
        while len(lines) * chunk < max_steps:
            world, line = self._run(world, requests, length=chunk)
            lines.append(jax.tree.map(np.asarray, line))
            status = np.asarray(world.books.status)[: len(trace)]
            ended = (status == DONE) | (status == REFUSED)
            if progress is not None:
                progress(ended.mean() if ended.size else 1.0)
            if ended.all():
                return jax.tree.map(lambda x: np.asarray(x)[: len(trace)], world.books), _joined(lines)
            _check_moves(lines[-1], len(trace) - int(ended.sum()))
        raise RuntimeError(f"{max_steps} steps were not enough for {trace.name}: {int((~ended).sum())} requests have not ended")

    def advance(self, world: World, requests: Requests, until: int) -> World:
        """Let the clock pass `until` (ticks), or every request end that was offered."""
        moved: World = self._advance(world, requests, jnp.int32(until))
        return moved

    def _max_len(self) -> int:
        return 2**30 if self.counts_only else self.cache.spec.max_len

    def _scan(self, world: World, requests: Requests, *, length: int) -> tuple[World, StepLine]:
        def run(world: World, requests: Requests) -> tuple[World, StepLine]:
            world, line = turns(lambda world: self.turn(world, requests), world, length)
            return self.turn.settled(world), line

        return self._native(run)(world, requests)

    def _native(self, run: F) -> F:
        """Where blocks are only counted, all turns are one native function."""
        return one_kernel(run) if self.counts_only else run

    def _until(self, world: World, requests: Requests, until: Int32[Array, ""]) -> World:
        def run(world: World, requests: Requests, until: Int32[Array, ""]) -> World:
            world, *_ = lax.while_loop(goes_on, turn, (world, requests, until))
            return self.turn.settled(world)

        def turn(now: tuple[World, Requests, Int32[Array, ""]]) -> tuple[World, Requests, Int32[Array, ""]]:
            return self.turn(now[0], now[1])[0], *now[1:]

        def goes_on(now: tuple[World, Requests, Int32[Array, ""]]) -> Bool[Array, ""]:
            world, _, until = now
            busy = jnp.any(world.request >= 0) | (world.cursor < world.num_offered)
            return busy & (world.now < until)

        return self._native(run)(world, requests, until)


def trace_fits(trace: Trace, pool_tokens: int, max_len: int) -> None:
    """Raise ConfigError for the first request that no simulation of such a pool could serve: an engine refuses it at once."""
    too_long = (trace.limit_len - 1 > pool_tokens) | (trace.limit_len > max_len)
    if too_long.any():
        at = int(np.argmax(too_long))
        raise ConfigError(
            f"request {at} of {trace.name} may have {trace.limit_len[at]} tokens, but the pool holds {pool_tokens} and a sequence at most "
            f"{max_len}; an engine would refuse {int(too_long.sum())} such requests: raise blocks and max_len, or leave them out"
        )


def _check_moves(line: StepLine, num_open: int) -> None:
    rows = line.num_decodes + line.num_prefills
    if len(rows) > STALLED and not rows[-STALLED:].any():
        raise RuntimeError(
            f"the scheduler planned nothing in {STALLED} steps although {num_open} requests have not ended: "
            f"{line.num_running[-1]} running, {line.num_waiting[-1]} waiting, {line.num_free_blocks[-1]} blocks free"
        )


def _joined(lines: Sequence[StepLine]) -> StepLine:
    """All lines of a simulation, those without rows left out."""
    joined: StepLine = jax.tree.map(lambda *parts: np.concatenate(parts), *lines)
    kept = joined.num_decodes + joined.num_prefills > 0
    return jax.tree.map(lambda x: x[kept], joined)
