"""A flight record planned again: the scheduler that serves, told what it was told, beside what it did then.

The cache's answers are those of the record: how many sequences it had room for, what it found for whom, how many blocks were free. So what is
run again is every decision of the scheduler, step by step, and where it is the same code it must come out the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from octavo_core.config import from_mapping
from octavo_core.errors import ConfigError
from octavo_core.plan import OK, OUT_OF_BLOCKS, Admitted, Arrivals, StepPlan, StepResult
from octavo_core.records import Arrived, Keyframe, PlanCall, StepRecord
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.scheduler import ChunkedScheduler
from octavo_scheduler._src.sim_cache import CountingCache, CountingState
from octavo_scheduler._src.sim_state import blank_arrivals, blank_result
from octavo_scheduler._src.state import RUNNING

_ADMISSION: Final = 2**20
COMPARED: Final = ("num_decodes", "num_prefills", "prefill_tokens", "context_tokens", "num_running", "preempted")


@dataclasses.dataclass(frozen=True)
class Difference:
    """A step that came out otherwise: names of what differs with what was recorded and what is now."""

    step: int
    values: dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Rerun:
    """What came of it. `steps`: those compared; `differences`: the first few."""

    steps: list[int]
    tokens: int
    differences: list[Difference]


def has_calls(records: Sequence[StepRecord]) -> bool:
    """The steps can be planned again."""
    return any(isinstance(record.keyframe, Keyframe) for record in records)


def rerun(records: Sequence[StepRecord], *, most_differences: int = 5) -> Rerun:
    """Plan the steps again from the oldest keyframe after which nothing is missing.

    Raises:
        ConfigError: There is none.
    """
    tail = _whole_tail(records)
    start = next((i for i, record in enumerate(tail) if isinstance(record.keyframe, Keyframe)), None)
    if start is None:
        raise ConfigError("the record has no keyframe after which every step is there: it cannot be planned again")
    tail = tail[start:]
    keyframe = tail[0].keyframe
    assert isinstance(keyframe, Keyframe)
    again = _Planning(keyframe, tail)
    found, tokens = list[Difference](), 0
    for record in tail:
        plan = again.plan_of(record)
        now = _seen(plan)
        was = {name: getattr(record, name) for name in COMPARED} | {"preempted": int(record.preempted is not None)}
        tokens += record.num_decodes + record.prefill_tokens
        if other := {name: (was[name], now[name]) for name in COMPARED if was[name] != now[name]}:
            found.append(Difference(record.step, other))
            if len(found) == most_differences:
                break
    return Rerun([record.step for record in tail], tokens, found)


def _whole_tail(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The longest end of a record in which no call is missing."""
    tail: list[StepRecord] = []
    for record in reversed(records):
        if not isinstance(record.calls, list):
            break
        if tail and record.calls[-1].number + 1 != _first_call(tail[-1]):
            break
        tail.append(record)
    return tail[::-1]


def _first_call(record: StepRecord) -> int:
    assert isinstance(record.calls, list)
    return record.calls[0].number


def _seen(plan: StepPlan) -> dict[str, int]:
    rows, single = int(plan.num_rows), int(plan.num_single)
    return {
        "num_decodes": single,
        "num_prefills": rows - single,
        "prefill_tokens": int(plan.num_tokens) - single,
        "context_tokens": int(np.asarray(plan.context_len)[:rows].sum()),
        "num_running": int(plan.num_running),
        "preempted": int(int(plan.preempted) >= 0),
    }


class _RecordedCache(CountingCache):
    """Lets in as many as it is told: `free` counts them in units of `_ADMISSION`. What follows is told anew by whoever plans."""

    def admit(
        self,
        cache: CountingState,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[CountingState, Admitted]:
        """The first ones fit."""
        takes = (sequence >= 0) & (jnp.cumsum(sequence >= 0) * _ADMISSION <= cache.free)
        found = jnp.where(takes, jnp.clip(tokens[:, 0], 0, lengths - 1), 0)
        to = jnp.where(takes, sequence, cache.held.size)
        held = cache.held.at[to].set(-(-found // self.spec.block_size), mode="drop")
        free = cache.free - jnp.sum(takes, dtype=jnp.int32) * _ADMISSION
        fits = takes | (sequence < 0)
        return CountingState(free, held), Admitted(found, jnp.where(fits, OK, OUT_OF_BLOCKS).astype(jnp.int32))


class _Planning:
    """A scheduler that goes through a record."""

    def __init__(self, keyframe: Keyframe, records: Sequence[StepRecord]) -> None:
        config = from_mapping(SchedulerConfig, keyframe.config)
        self._keyframe = keyframe
        self._cache = _RecordedCache(keyframe.num_blocks, keyframe.block_size, keyframe.max_sequences)
        scheduler: Any = ChunkedScheduler(config, self._cache)
        self._step, self._arrive = jax.jit(scheduler.step), jax.jit(scheduler.arrive)
        state = scheduler.init()
        self._state = state._replace(**{name: _array(data, getattr(state, name)) for name, data in keyframe.state.items()})
        held = -(-self._state.computed_len // keyframe.block_size)
        self._blocks = self._cache.init()._replace(held=jnp.where(self._state.status == RUNNING, held, 0).astype(jnp.int32))
        self._found = _Found(records, keyframe.max_sequences)

    def plan_of(self, record: StepRecord) -> StepPlan:
        """Make the calls of a step, from the keyframe's on."""
        assert isinstance(record.calls, list)
        calls = [call for call in record.calls if call.number >= self._keyframe.call]
        for call in calls:
            plan = self._plan(call, record, makes_it=call is calls[-1])
        return plan

    def _plan(self, call: PlanCall, record: StepRecord, *, makes_it: bool) -> StepPlan:
        """Make a call; the last one of a step made its plan, those before it planned nothing and let nobody in."""
        admitted = self._num_admitted(call, record) if makes_it and call.arrived is not None else 0
        if call.number:  # before the first step nobody has told the scheduler of any
            self._state = self._state._replace(room=jnp.int32(call.room))
        if call.arrived is not None:
            found = jnp.asarray(self._found.from_step(record.step))
            self._state = self._state._replace(tokens=self._state.tokens.at[:, 0].set(found))
            self._blocks = self._blocks._replace(free=jnp.int32(admitted * _ADMISSION))
            self._state, self._blocks = self._arrive(self._state, self._blocks, self._arrivals(call.arrived))
        # Who was let in holds some blocks together with others, and the record does not say how many: there was room, if nobody gave way.
        is_known = not admitted or record.preempted is not None
        self._blocks = self._blocks._replace(free=jnp.int32(call.room if is_known else _ADMISSION))
        self._state, self._blocks, plan = self._step(self._state, self._blocks, self._result(call))
        return jax.tree.map(np.asarray, plan)  # type: ignore[no-any-return]

    def _num_admitted(self, call: PlanCall, record: StepRecord) -> int:
        """Sequences that were let in by a call: those that ran after it, less those that ran on."""
        finished = _bits(call.finished, self._keyframe.max_sequences)
        ran_on = int(((np.asarray(self._state.status) == RUNNING) & ~finished).sum())
        return max(0, record.num_running + (record.preempted is not None) - ran_on)

    def _arrivals(self, arrived: Sequence[Arrived]) -> Arrivals:
        empty = jax.tree.map(np.array, blank_arrivals(self._keyframe.max_arrivals, self._cache.spec.max_len))
        for i, one in enumerate(arrived):
            for name in Arrived.__struct_fields__:
                getattr(empty, name)[i] = getattr(one, name)
            empty.tokens[i, 0] = self._found.now[one.sequence]
        return empty  # type: ignore[no-any-return]

    def _result(self, call: PlanCall) -> StepResult:
        count = self._keyframe.max_sequences
        return blank_result(count)._replace(
            accepted=jnp.asarray(_bits(call.accepted, count).astype(np.int32)),
            finished=jnp.asarray(_bits(call.finished, count)),
            step_s=jnp.float32(call.step_s),
            num_decodes=jnp.int32(call.num_decodes),
            num_prefill_tokens=jnp.int32(call.num_prefill_tokens),
        )


class _Found:
    """What the cache will find for each index when it is next let in, at a step or after it."""

    def __init__(self, records: Sequence[StepRecord], count: int) -> None:
        self._coming = [(r.step, slot, found) for r in records if isinstance(r.found, list) for slot, found in r.found]
        self._count, self.now = count, np.zeros(count, np.int32)

    def from_step(self, step: int) -> np.ndarray:
        """Forget what was before."""
        self._coming = [one for one in self._coming if one[0] >= step]
        self.now = np.zeros(self._count, np.int32)
        for _, slot, found in reversed(self._coming):
            self.now[slot] = found
        return self.now


def _array(data: bytes, like: Any) -> Any:
    dtype = np.dtype(like.dtype)
    if len(data) != dtype.itemsize * int(np.prod(like.shape)):
        raise ConfigError("the record is of another version of the scheduler: it cannot be planned again")
    return jnp.asarray(np.frombuffer(data, dtype).reshape(like.shape))


def _bits(data: bytes, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count).astype(bool)
