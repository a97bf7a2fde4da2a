"""Sequences on their way into the scheduler: the bounded queue, and the arrays that describe those let in.

Knows policy order and bounds; knows no device and no plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from octavo_core.errors import OverloadedError
from octavo_core.plan import Arrivals, SamplingArrivals
from octavo_engine._src.sequence import Sequence

INT32_MAX: Final = 2**31 - 1


class Queue:
    """Sequences that have no slot yet, in policy order. Under `fair` each tenant has a line of its own.

    Args:
        policy: Of `--scheduling-policy`.
        max_requests: Most sequences that wait; 0: no bound.
        max_tokens: Most prompt tokens that wait; 0: no bound.
    """

    def __init__(self, *, policy: str, max_requests: int, max_tokens: int) -> None:
        self._policy = policy
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._lines: dict[int, list[tuple[int, int, Sequence]]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def check_room(self, prompt_lens: list[int], also_waiting: int, also_tokens: int = 0) -> None:
        """Refuse newcomers beyond the bounds; `also_waiting` sequences with `also_tokens` prompt tokens wait elsewhere.

        Raises:
            OverloadedError: The queue is full.
        """
        waiting, tokens = len(self) + also_waiting, self._tokens + also_tokens
        if self._max_requests and waiting + len(prompt_lens) > self._max_requests:
            raise OverloadedError(f"{waiting} sequences are waiting, the queue holds {self._max_requests}; try again later")
        if self._max_tokens and waiting and tokens + sum(prompt_lens) > self._max_tokens:
            raise OverloadedError(f"{tokens} prompt tokens are waiting, the queue holds {self._max_tokens}; try again later")

    def push(self, sequence: Sequence) -> None:
        """Add one."""
        key = {"priority": sequence.request.priority, "edf": sequence.deadline}.get(self._policy, 0)
        heapq.heappush(self._lines.setdefault(self._line_of(sequence), []), (key, sequence.order, sequence))
        self._tokens += sequence.prompt_len

    def pop(self, waiting: Mapping[int, int], slots: int) -> Sequence | None:
        """The next one that has not ended meanwhile.

        Under `fair` the tenant with fewest sequences waiting for a row comes first, and none takes so many of the `slots` for waiting that
        a tenant that comes now would find none.

        Args:
            waiting: Sequences of each tenant that have a slot and were not yet in a step.
            slots: Sequences that can wait so.
        """
        for lines in self._lines.values():
            while lines and lines[0][2].finish is not None:
                self._tokens -= heapq.heappop(lines)[2].prompt_len
        self._lines = {tenant: line for tenant, line in self._lines.items() if line}
        if not self._lines:
            return None
        if self._policy != "fair":
            return self._take(0)
        share = max(1, slots // (1 + len({*self._lines, *waiting})))
        turns = [(waiting.get(t, 0), line[0][1], t) for t, line in self._lines.items() if waiting.get(t, 0) < share]
        return self._take(min(turns)[2]) if turns else None

    def _take(self, tenant: int) -> Sequence:
        sequence = heapq.heappop(self._lines[tenant])[2]
        self._tokens -= sequence.prompt_len
        return sequence

    def _line_of(self, sequence: Sequence) -> int:
        return sequence.request.tenant if self._policy == "fair" else 0

    def discard(self, sequence: Sequence) -> None:
        """Take one out, wherever it stands."""
        line = self._lines.get(self._line_of(sequence), [])
        kept = [entry for entry in line if entry[2] is not sequence]
        if len(kept) != len(line):
            heapq.heapify(kept)
            self._lines[self._line_of(sequence)] = kept
            self._tokens -= sequence.prompt_len


def fill_arrivals(empty: Arrivals, sequences: list[Sequence], *, use_prefix: bool) -> Arrivals:
    """Describe newcomers, which have their slots, to the scheduler. `empty` is filled and answered."""
    for i, sequence in enumerate(sequences):
        request = sequence.request
        empty.sequence[i] = sequence.slot  # type: ignore[index]
        empty.tokens[i, : sequence.prompt_len] = request.prompt_ids  # type: ignore[index]
        empty.prompt_len[i] = sequence.prompt_len  # type: ignore[index]
        empty.limit_len[i] = sequence.limit_len  # type: ignore[index]
        empty.namespace[i] = np.frombuffer(request.namespace, np.uint32)  # type: ignore[index]
        empty.tenant[i] = request.tenant  # type: ignore[index]
        empty.priority[i] = max(-INT32_MAX, min(request.priority, INT32_MAX))  # type: ignore[index]
        empty.deadline[i] = sequence.deadline  # type: ignore[index]
        empty.order[i] = sequence.order & INT32_MAX  # type: ignore[index]
        empty.use_prefix[i] = use_prefix and not sequence.wants_prompt_scores  # type: ignore[index]
    return empty


def fill_sampling(empty: Any, sequences: list[Sequence]) -> SamplingArrivals:
    """The same newcomers for the sampler. `empty` holds NumPy arrays; it is filled and answered."""
    for i, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        empty.sequence[i] = sequence.slot
        empty.tokens[i, : sequence.prompt_len] = sequence.request.prompt_ids
        empty.prompt_len[i] = sequence.prompt_len
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            getattr(empty, name)[i] = getattr(sampling, name)
        empty.seed[i] = (sequence.seed & 0xFFFFFFFF, sequence.seed >> 32 & 0xFFFFFFFF)
        bias = sampling.logit_bias
        empty.bias_ids[i], empty.bias_values[i] = -1, 0
        empty.bias_ids[i, : len(bias)] = list(bias)
        empty.bias_values[i, : len(bias)] = list(bias.values())
        stops = sorted({*sampling.stop_token_ids, *(() if sampling.ignore_eos else sequence.eos_token_ids)})
        empty.stop_ids[i] = -1
        empty.stop_ids[i, : len(stops)] = stops
        empty.min_len[i] = min(sequence.prompt_len + sampling.min_tokens, INT32_MAX)
        empty.num_logprobs[i] = -1 if sampling.logprobs is None else sampling.logprobs
    return empty
