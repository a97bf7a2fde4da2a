"""A flight record planned again: the scheduler that serves, told what it was told, beside what it did then.

The cache is a counting one: how many blocks were free, and what was found for whom, is part of the record. So what is run again is every
decision of the scheduler, step by step, and where it is the same code it must come out the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.config import from_mapping
from octavo_core.errors import ConfigError
from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.records import Arrived, Keyframe, PlanCall, StepRecord
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.scheduler import ChunkedScheduler
from octavo_scheduler._src.sim_cache import CountingCache
from octavo_scheduler._src.sim_state import blank_arrivals, blank_result
from octavo_scheduler._src.state import RUNNING

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


class _Planning:
    """A scheduler that goes through a record."""

    def __init__(self, keyframe: Keyframe, records: Sequence[StepRecord]) -> None:
        config = from_mapping(SchedulerConfig, keyframe.config)
        self._keyframe = keyframe
        self._cache = CountingCache(keyframe.num_blocks, keyframe.block_size, keyframe.max_sequences)
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
            plan = self._plan(call, record.step)
        return plan

    def _plan(self, call: PlanCall, step: int) -> StepPlan:
        self._blocks = self._blocks._replace(free=jnp.int32(call.room))
        if call.number:  # before the first step nobody has told the scheduler of any
            self._state = self._state._replace(room=jnp.int32(call.room))
        if call.arrived is not None:
            found = jnp.asarray(self._found.from_step(step))
            self._state = self._state._replace(tokens=self._state.tokens.at[:, 0].set(found))
            self._state, self._blocks = self._arrive(self._state, self._blocks, self._arrivals(call.arrived))
        self._state, self._blocks, plan = self._step(self._state, self._blocks, self._result(call))
        return jax.tree.map(np.asarray, plan)  # type: ignore[no-any-return]

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
