"""The scheduler and the cache under one jit, on the CPU, with both states donated and all that is small in one array each way.

Knows when `arrive` has to run; knows nothing of requests or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.seams import PrefixCache, Scheduler
from octavo_core.specs import CacheSpec
from octavo_engine._src.packing import Packing
from octavo_engine._src.programs import Programs

# Region analysis: without it XLA copies whole pools inside the step. Without the expensive passes it compiles sooner and runs as fast.
# Small operations one after another in the thread that calls: handing them to others costs more than they do.
_OPTIONS = {
    "xla_cpu_copy_insertion_use_region_analysis": True,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "xla_cpu_multi_thread_eigen": False,
}
_NEVER = 2**62


class Planner:
    """Plans steps.

    Args:
        scheduler: Built around `cache`.
        cache: Whose state is carried here.
        max_arrivals: Entries of an `Arrivals`.
        max_rows: Rows of a plan.
        kept: Programs of earlier starts, for this scheduler and this cache.
    """

    def __init__(
        self,
        scheduler: Scheduler[Any, Any],
        cache: PrefixCache[Any],
        *,
        max_arrivals: int,
        max_rows: int,
        kept: Programs | None = None,
    ) -> None:
        self.spec: CacheSpec = cache.spec
        self.max_rows = max_rows
        self.max_arrivals = max_arrivals
        self._cpu = jax.devices("cpu")[0]
        self.scheduler: Any = scheduler
        self.cache = cache
        self._kept = kept or Programs(None)
        state, plan = self._kept.recall("plan", self._shapes)
        self._states, self._results = Packing(state), Packing(self.empty_result(), limit=_NEVER)
        self._plans = Packing(plan)
        self._state: Any = None
        self._step: Any = None
        self._arrive: Any = None
        self.reset()

    def _shapes(self) -> tuple[Any, Any]:
        """Shapes of the state and of a plan."""
        with jax.default_device(self._cpu):
            state = jax.eval_shape(self._fresh)
            return state, jax.eval_shape(self.scheduler.step, *state, self.empty_result())[2]

    def _fresh(self) -> tuple[Any, Any]:
        return self.scheduler.init(), self.cache.init()

    def reset(self) -> None:
        """Forget every sequence and every cached block."""
        with jax.default_device(self._cpu):
            self._state = jax.jit(self._states.pack)(jax.device_put(self._fresh(), self._cpu))

    def compile(self) -> None:
        """Compile both programs."""
        step = jax.jit(self._plan, donate_argnums=0)
        arrive = jax.jit(self._take_in, donate_argnums=0)
        with jax.default_device(self._cpu):
            result = self._results.pack_host(self.empty_result())
            self._step = self._kept.compile("step", step, self._state, result, device=self._cpu, options=_OPTIONS)
            self._arrive = self._kept.compile(
                "arrive", arrive, self._state, self.empty_arrivals(), device=self._cpu, options=_OPTIONS
            )

    def _plan(self, packed: Any, result: jax.Array) -> tuple[Any, Any]:
        state, cache, plan = self.scheduler.step(*self._states.unpack(*packed), self._results.unpack(result, []))
        return self._states.pack((state, cache)), self._plans.pack(plan)

    def _take_in(self, packed: Any, arrivals: Arrivals) -> Any:
        return self._states.pack(self.scheduler.arrive(*self._states.unpack(*packed), arrivals))

    def step(self, result: StepResult) -> StepPlan:
        """The next plan, as NumPy arrays."""
        self._state, (words, large) = self._step(self._state, self._results.pack_host(result))
        return self._plans.unpack_host(np.asarray(words), [np.asarray(leaf) for leaf in large])

    def arrive(self, arrivals: Arrivals) -> None:
        """Hand over new sequences (or none) and let waiting ones in."""
        self._state = self._arrive(self._state, arrivals)

    def wait(self) -> None:
        """Wait until what was called last has been done: `arrive` may answer before."""
        jax.block_until_ready(self._state)

    def cache_program(self, name: str, run: Callable[..., tuple[Any, ...]], *like: Any) -> Callable[..., list[Any]]:
        """Compile an operation on the cache beside the step: `run(cache, *like)` answers the cache and more, which the call answers."""

        def packed_run(packed: Any, *arguments: Any) -> tuple[Any, list[Any]]:
            state, cache = self._states.unpack(*packed)
            cache, *answers = run(cache, *arguments)
            return self._states.pack((state, cache)), answers

        with jax.default_device(self._cpu):
            jitted = jax.jit(packed_run, donate_argnums=0)
            program = self._kept.compile(f"cache {name}", jitted, self._state, *like, device=self._cpu, options=_OPTIONS)

        def call(*arguments: Any) -> list[Any]:
            self._state, answers = program(self._state, *arguments)
            return jax.tree.map(np.asarray, answers)  # type: ignore[no-any-return]

        return call

    @property
    def state(self) -> tuple[Any, Any]:
        """A copy of the scheduler's and the cache's state, for audits."""
        words, large = jax.tree.map(np.array, self._state)
        return self._states.unpack_host(words, large)  # type: ignore[no-any-return]

    @property
    def scheduler_fields(self) -> dict[str, np.ndarray]:
        """The scheduler's state by name, without its tokens; views, valid until the next call."""
        words, large = self._state
        scheduler, _ = self._states.unpack_host(np.asarray(words), list(large))
        return {name: np.asarray(value) for name, value in scheduler._asdict().items() if name != "tokens"}

    def restore(self, state: tuple[Any, Any]) -> None:
        """Go on from a state that was read before, of this planner or of one alike."""
        with jax.default_device(self._cpu):
            self._state = jax.jit(self._states.pack)(jax.device_put(state, self._cpu))

    def empty_result(self) -> StepResult:
        """Nothing learnt."""
        n = self.spec.max_sequences
        zero, ids = np.zeros((), np.int32), np.zeros((n, 1), np.int32)
        return StepResult(np.zeros(n, np.int32), ids, np.zeros(n, bool), np.zeros(n, bool), np.zeros((), np.float32), zero, zero)

    def empty_arrivals(self) -> Arrivals:
        """Nobody arrives."""
        n = self.max_arrivals
        zeros = np.zeros(n, np.int32)
        return Arrivals(
            sequence=zeros - 1,
            tokens=np.zeros((n, self.spec.max_len), np.int32),
            prompt_len=zeros.copy(),
            limit_len=zeros.copy(),
            namespace=np.zeros((n, 2), np.uint32),
            tenant=zeros.copy(),
            priority=zeros.copy(),
            deadline=zeros.copy(),
            order=zeros.copy(),
            use_prefix=np.ones(n, bool),
        )
