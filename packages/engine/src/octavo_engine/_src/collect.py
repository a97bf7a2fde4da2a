"""Scores from device arrays to messages."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np

from octavo_core.plan import Sampled
from octavo_core.wire import TokenLogprobs
from octavo_engine._src.sequence import Sequence


def token_scores(sampled: Sampled, wanted: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Scores of sampled tokens; `wanted` maps rows to how many alternatives."""
    return {row: _entry(arrays, row, most) for arrays in [_host(sampled)] for row, most in wanted.items()}


@dataclasses.dataclass(frozen=True)
class PromptScores:
    """Scores on their way for consecutive prompt tokens of one sequence."""

    sequence: Sequence
    targets: list[int]
    parts: concurrent.futures.Future[list[tuple[Any, Any, Any, Any]]]

    def collect(self) -> None:
        """Append them to the sequence; the first prompt token has none."""
        scores, most = self.sequence.prompt_scores, self.sequence.request.sampling.prompt_logprobs or 0
        if not scores:
            scores.append(None)
        done = 0
        for part in self.parts.result():
            arrays = _host(Sampled(np.asarray(self.targets[done:], np.int32), *part))
            count = min(len(arrays.logprob), len(self.targets) - done)
            scores.extend(_entry(arrays, i, most) for i in range(count))
            done += count


def _host(sampled: Sampled) -> Sampled:
    return Sampled(*(np.asarray(x) for x in sampled))


def _entry(arrays: Sampled, i: int, most: int) -> TokenLogprobs:
    return TokenLogprobs(
        int(arrays.token_ids[i]),
        float(arrays.logprob[i]),
        int(arrays.rank[i]),
        arrays.top_ids[i, :most].tolist(),
        arrays.top_logprobs[i, :most].tolist(),
    )
