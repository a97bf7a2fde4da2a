"""What a simulation says: latencies of requests, goodput, rates over windows of time, and which settings are not beaten by another.

Knows arrays and definitions: TTFT first token − receipt, TPOT (last − first) / (output tokens − 1), goodput requests a second within both limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64

from octavo_core.records import StepRecord
from octavo_scheduler._src.sim_state import REFUSED, TICK_S, Books, StepLine
from octavo_scheduler._src.sim_trace import Trace

PERCENTILES: Final = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good.

    Attributes:
        ttft_s: Longest time to the first token.
        tpot_s: Longest time per further token.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A trace after its simulation.

    Attributes:
        label: What was set, by name.
        trace: What arrived.
        books: What became of each request.
        steps: Every step.
    """

    label: Mapping[str, Any]
    trace: Trace
    books: Books
    steps: StepLine

    @property
    def served(self) -> Bool[np.ndarray, " requests"]:
        """Requests that were not refused."""
        return np.asarray(self.books.status) != REFUSED

    @property
    def ttft_s(self) -> Float64[np.ndarray, " served"]:
        """Of each served request."""
        return (np.asarray(self.books.first) * TICK_S - self.trace.arrival_s)[self.served]

    @property
    def tpot_s(self) -> Float64[np.ndarray, " several"]:
        """Of each served request of more than one token."""
        several = self.served & (np.asarray(self.books.made) > 1)
        took = (np.asarray(self.books.last, np.int64) - np.asarray(self.books.first)) * TICK_S
        return (took / np.maximum(np.asarray(self.books.made) - 1, 1))[several]

    @property
    def queue_s(self) -> Float64[np.ndarray, " served"]:
        """Receipt until its first step, of each served request."""
        return (np.asarray(self.books.started) * TICK_S - self.trace.arrival_s)[self.served]

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the end of the last step."""
        return float(self.steps.end[-1]) * TICK_S if len(self.steps.end) else 0.0

    def is_good(self, limits: Limits) -> Bool[np.ndarray, " requests"]:
        """Requests served within both limits; one of a single token has no TPOT to miss."""
        good = np.zeros(len(self.trace), bool)
        made = np.asarray(self.books.made)[self.served]
        tpot = np.zeros(len(made))
        tpot[made > 1] = self.tpot_s
        good[self.served] = (self.ttft_s <= limits.ttft_s) & (tpot <= limits.tpot_s)
        return good

    def summary(self, limits: Limits | None = None) -> dict[str, int | float]:
        """The figures of a table, by name; times in seconds, rates per second."""
        limits, books, seconds = limits or Limits(), self.books, max(self.makespan_s, TICK_S)
        found: dict[str, int | float] = {"requests": len(self.trace), "refused": int((~self.served).sum())}
        for name, values in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s), ("queue_s", self.queue_s)):
            found |= {f"{name}_p{p}": _percentile(values, p) for p in PERCENTILES}
        found["longest_gap_s"] = float(np.max(books.gap, initial=0)) * TICK_S
        found["requests_per_s"] = int(self.served.sum()) / seconds
        found["output_tokens_per_s"] = int(np.sum(books.made)) / seconds
        found["goodput_per_s"] = int(self.is_good(limits).sum()) / seconds
        found["good_share"] = float(self.is_good(limits).mean()) if len(self.trace) else 0.0
        found["cached_share"] = float(np.sum(books.cached) / max(1, np.sum(self.trace.prompt_len[self.served])))
        found |= {"preemptions": int(np.sum(books.preemptions)), "lost_tokens": int(np.sum(self.steps.lost))}
        return found | {"steps": len(self.steps.end), "makespan_s": self.makespan_s}

    def records(self) -> list[StepRecord]:
        """The steps as a server would have logged them."""
        line = self.steps
        return [
            StepRecord(
                step=i,
                time_s=float(line.start[i]) * TICK_S,
                num_decodes=int(line.num_decodes[i]),
                num_prefills=int(line.num_prefills[i]),
                prefill_tokens=int(line.prefill_tokens[i]),
                context_tokens=int(line.context_tokens[i]),
                bucket_tokens=int(line.num_decodes[i] + line.prefill_tokens[i]),
                bucket_rows=int(line.num_decodes[i] + line.num_prefills[i]),
                device_s=float(line.end[i] - line.start[i]) * TICK_S,
                host_s=0.0,
                plan_s=0.0,
                output_s=0.0,
                num_running=int(line.num_running[i]),
                num_waiting=int(line.num_waiting[i]),
                num_free_blocks=int(line.num_free_blocks[i]),
                preempted=str(line.preempted[i]) if line.preempted[i] >= 0 else None,
                prefill_pairs=round(float(line.prefill_pairs[i])),
            )
            for i in range(len(line.end))
        ]


def _percentile(values: Float64[np.ndarray, " values"], at: int) -> float:
    return float(np.percentile(values, at)) if len(values) else 0.0


def window_rates(steps: StepLine, window_s: float, until_s: float | None = None) -> Float64[np.ndarray, " windows"]:
    """Useful tokens a second in every window that begins with a step.

    Useful is what had not been computed before: prompt tokens and new tokens, less what preempted requests will compute again, taken off in
    the step that gave it up.

    Args:
        steps: Of a simulation.
        window_s: Length of a window.
        until_s: Windows end no later than this; by default with the last step.
    """
    end_s = np.asarray(steps.end) * TICK_S
    start_s = np.asarray(steps.start) * TICK_S
    useful = np.asarray(steps.prefill_tokens + steps.num_decodes - steps.lost, np.int64)
    done = np.concatenate([[0], np.cumsum(useful)])
    last_s = end_s[-1] if until_s is None else until_s
    begins = start_s[start_s + window_s <= last_s]
    # What a step does is spread over its time, so that a window's edge may fall inside one.
    at_edges = np.interp(np.stack([begins, begins + window_s]), np.append(start_s[:1], end_s), done)
    return (at_edges[1] - at_edges[0]) / window_s


def pareto(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Indices of the points that no other beats: none is cheaper with as much gain, or gains more for as little. By cost."""
    front: list[int] = []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i])):
        if not front or gains[i] > gains[front[-1]]:
            front.append(i)
    return front
