"""What the scheduler is told, written down for the flight recorder: enough to plan the last steps again, without anybody's tokens.

Runs in the step loop's thread.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from octavo_core.plan import Arrivals, StepPlan, StepResult
from octavo_core.records import Arrived, Keyframe, PlanCall
from octavo_engine._src.planner import Planner
from octavo_engine._src.process.flight import FlightRecorder

KEYFRAME_CALLS: Final = 250


class Recording:
    """Follows one planner.

    Args:
        planner: Built around a scheduler with these settings.
        config: Settings of the scheduler, a dataclass.
        recorder: Where keyframes go.
    """

    def __init__(self, planner: Planner, config: Any, recorder: FlightRecorder) -> None:
        self._planner, self._config, self._recorder = planner, dataclasses.asdict(config), recorder
        self._calls: list[PlanCall] = []
        self._number = 0
        self._returning: set[int] = set()
        self._room = planner.spec.usable_blocks

    def told(self, arrivals: Arrivals | None, result: StepResult) -> None:
        """The planner is about to be called so."""
        if self._number % KEYFRAME_CALLS == 0:
            self._recorder.keyframe(self._keyframe())
        call = PlanCall(
            number=self._number,
            room=self._room,
            arrived=None if arrivals is None else _arrived(arrivals),
            accepted=np.packbits(result.accepted).tobytes(),
            finished=np.packbits(result.finished).tobytes(),
            step_s=float(result.step_s),
            num_decodes=int(result.num_decodes),
            num_prefill_tokens=int(result.num_prefill_tokens),
        )
        self._number += 1
        self._calls.append(call)

    def planned(self, plan: StepPlan) -> None:
        """It was, and this came of it."""
        self._room = int(np.min(plan.events.num_free + plan.events.num_evictable))

    def take(self) -> list[PlanCall]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def preempted(self, slot: int) -> None:
        """A sequence will be let in again, if it lives."""
        self._returning.add(slot)

    def left(self, slot: int) -> None:
        """An index is free."""
        self._returning.discard(slot)

    def found_again(self, plan: StepPlan) -> list[tuple[int, int]]:
        """What the cache found for sequences of a plan that had given their blocks up: where they go on."""
        if not self._returning:
            return []
        rows = [(int(slot), i) for i, slot in enumerate(plan.sequence[: int(plan.num_rows)]) if int(slot) in self._returning]
        self._returning.difference_update(slot for slot, _ in rows)
        return [(slot, int(plan.positions[int(plan.query_start[i])])) for slot, i in rows]

    def _keyframe(self) -> Keyframe:
        spec = self._planner.spec
        return Keyframe(
            call=self._number,
            config=self._config,
            num_blocks=min(spec.num_blocks),
            block_size=spec.block_size,
            max_sequences=spec.max_sequences,
            max_arrivals=self._planner.max_arrivals,
            state={name: value.tobytes() for name, value in self._planner.scheduler_fields.items()},
        )


def _arrived(arrivals: Arrivals) -> list[Arrived]:
    live = [i for i, sequence in enumerate(arrivals.sequence.tolist()) if sequence >= 0]
    return [Arrived(*(getattr(arrivals, name)[i].item() for name in Arrived.__struct_fields__)) for i in live]
