"""What the host keeps of one sequence: its request, its tokens so far, its times. No jax."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo_core.wire import EngineOutput, EngineRequest, FinishReason, TokenLogprobs

NO_DEADLINE: Final = 2**31 - 1


@dataclasses.dataclass(eq=False)
class Sequence:
    """One token stream from receipt to end.

    Attributes:
        order: Rises with arrival.
        limit_len: Most tokens of prompt and answer.
        seed: Of its draws.
        deadline: When its first token is due, in hundredths of a second of the engine's clock.
        slot: Index in the scheduler's state, −1 while it has none.
        scored_len: Prompt positions whose successors have been scored.
        finish: Set once; nothing is sent after it.
    """

    request: EngineRequest
    order: int
    limit_len: int
    seed: int
    eos_token_ids: frozenset[int]
    arrival_s: float
    deadline: int = NO_DEADLINE
    slot: int = -1
    output: list[int] = dataclasses.field(default_factory=list)
    prompt_scores: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    scored_len: int = 0
    cached_len: int = 0
    preemptions: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    finish: FinishReason | None = None

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def wants_prompt_scores(self) -> bool:
        """Prompt scores were asked for."""
        return self.request.sampling.prompt_logprobs is not None

    def accept(self, token: int, score: TokenLogprobs | None, now_s: float) -> EngineOutput:
        """Append a sampled token and say so; decides whether the sequence ends with it."""
        is_first = not self.output
        self.output.append(token)
        if is_first:
            self.first_token_s = now_s
        self.finish = self._finish_after(token)
        wants_scores = is_first and self.wants_prompt_scores
        return EngineOutput(
            request_id=self.request.request_id,
            token_ids=[token],
            logprobs=None if score is None else [score],
            prompt_logprobs=(self.prompt_scores or [None]) if wants_scores else None,
            finish_reason=self.finish,
            stop_token_id=token if self.finish is FinishReason.STOP else None,
            num_cached_tokens=self.cached_len,
            queue_s=self.started_s - self.arrival_s if is_first and self.started_s is not None else None,
        )

    def _finish_after(self, token: int) -> FinishReason | None:
        sampling = self.request.sampling
        if len(self.output) >= max(sampling.min_tokens, 1):
            ends = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.eos_token_ids)
            if ends:
                return FinishReason.STOP
        return FinishReason.LENGTH if self.prompt_len + len(self.output) >= self.limit_len else None

    def end(self, reason: FinishReason, error: str | None = None) -> EngineOutput:
        """End it for a reason other than its own tokens."""
        self.finish = reason
        return EngineOutput(
            request_id=self.request.request_id, finish_reason=reason, error=error, num_cached_tokens=self.cached_len
        )
