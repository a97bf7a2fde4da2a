"""A recorded stretch of serving against its simulation: the same requests, the same settings, side by side over time.

Knows the two logs. A step log says what each step held, not who; the requests come from the request log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from octavo_core.errors import ConfigError
from octavo_core.records import RequestRecord, StepRecord
from octavo_scheduler._src.sim_metrics import Outcome


@dataclasses.dataclass(frozen=True)
class Stretch:
    """What happened in a stretch of time.

    Attributes:
        start_s: From the first arrival.
        steps, tokens, preemptions: In it.
        step_s: Mean length of a step.
        running, waiting: Most at any step.
    """

    start_s: float
    steps: int
    tokens: int
    preemptions: int
    step_s: float
    running: int
    waiting: int


def stretches(records: Sequence[StepRecord], start_s: float, length_s: float, count: int) -> list[Stretch]:
    """A log cut into `count` stretches of `length_s`, beginning at `start_s`."""
    at = np.floor((np.array([r.time_s for r in records]) - start_s) / length_s).astype(int)
    return [
        _stretch([record for record, where in zip(records, at.tolist(), strict=True) if where == i], i * length_s)
        for i in range(count)
    ]


def _stretch(records: Sequence[StepRecord], start_s: float) -> Stretch:
    return Stretch(
        start_s=float(start_s),
        steps=len(records),
        tokens=sum(r.num_decodes + r.prefill_tokens for r in records),
        preemptions=sum(r.preempted is not None for r in records),
        step_s=float(np.mean([r.device_s + r.host_s for r in records])) if records else 0.0,
        running=max((r.num_running for r in records), default=0),
        waiting=max((r.num_waiting for r in records), default=0),
    )


@dataclasses.dataclass(frozen=True)
class Replay:
    """A log and its simulation.

    Attributes:
        recorded, simulated: The same stretches of both.
        ttft_s, tpot_s: Medians, recorded and simulated.
    """

    recorded: list[Stretch]
    simulated: list[Stretch]
    ttft_s: tuple[float, float]
    tpot_s: tuple[float, float]


def compare(steps: Sequence[StepRecord], requests: Sequence[RequestRecord], outcome: Outcome, *, count: int = 20) -> Replay:
    """Cut a log and the simulation of its requests into the same stretches.

    Args:
        steps: Of the step log.
        requests: Of the request log.
        outcome: Of simulating those requests.
        count: Stretches.

    Raises:
        ConfigError: The logs do not overlap in time.
    """
    made = [r for r in requests if r.output_tokens]
    begin_s = min((r.arrival_s for r in made), default=0.0)
    end_s = max((r.arrival_s + r.e2e_s for r in made), default=0.0)
    inside = [s for s in steps if begin_s <= s.time_s <= end_s]
    if not inside:
        raise ConfigError(
            f"no step of the log lies between the first arrival ({begin_s:.1f} s) and the last end ({end_s:.1f} s) of the requests; "
            "are both logs of one run?"
        )
    length_s = max(end_s - begin_s, outcome.makespan_s) / count * (1 + 1e-9)
    return Replay(
        recorded=stretches(inside, begin_s, length_s, count),
        simulated=stretches(outcome.records(), 0.0, length_s, count),
        ttft_s=(_median([r.ttft_s for r in made if r.ttft_s is not None]), _median(outcome.ttft_s)),
        tpot_s=(_median(recorded_tpot_s(made)), _median(outcome.tpot_s)),
    )


def recorded_tpot_s(requests: Sequence[RequestRecord]) -> list[float]:
    """TPOT of each request of more than one token."""
    return [(r.e2e_s - r.ttft_s) / (r.output_tokens - 1) for r in requests if r.ttft_s is not None and r.output_tokens > 1]


def _median(values: Sequence[float] | Float64[np.ndarray, " values"]) -> float:
    return float(np.median(values)) if len(values) else 0.0
