"""What one turn of the step loop hands to the next: steps in flight."""

from __future__ import annotations

import dataclasses

from octavo_core.records import PlanCall
from octavo_engine._src.collect import PromptScores
from octavo_engine._src.dispatched import Dispatched
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
    preempted: str | None
    told: tuple[list[PlanCall], list[tuple[int, int]]] = ([], [])
