"""What one turn of the step loop hands to the next: steps in flight, and the plan being made."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable
from typing import Any

from octavo_core.plan import StepPlan
from octavo_core.records import PlanCall
from octavo_engine._src.collect import PromptScores
from octavo_engine._src.runner import Dispatched
from octavo_engine._src.sequence import Sequence


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatched step and whose rows are in it; rows of sequences that end meanwhile are dropped.

    `told`: what the scheduler was told for it, and what the cache found for whom, where that is recorded.
    """

    step: int
    dispatched: Dispatched
    rows: list[Sequence | None]
    scores: list[PromptScores]
    plan_s: float
    host_s: float
    preempted: str | None
    told: tuple[list[PlanCall], list[tuple[int, int]]] = ([], [])


@dataclasses.dataclass(frozen=True)
class Ahead:
    """A plan being made, and the slots that are free once it is."""

    plan: concurrent.futures.Future[tuple[StepPlan, float]]
    leaving: list[int]


class Inline:
    """An executor without threads."""

    def submit(self, job: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
        """Run the job now."""
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(job(*arguments))
        return done
