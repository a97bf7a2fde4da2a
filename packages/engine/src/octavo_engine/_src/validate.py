"""What a request must be before the step loop sees it. In JAX an out-of-range index is clamped, never an error: so it is checked here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo_core.errors import ContextLengthError, RequestError
from octavo_core.ids import id_range
from octavo_core.wire import EngineRequest, ModelCard, SamplingParams

MAX_BIAS = 300
MAX_STOP = 32


def check_request(request: EngineRequest, card: ModelCard) -> None:
    """Refuse what cannot be served.

    Raises:
        ContextLengthError: Prompt, or prompt and answer, are longer than the context.
        RequestError: Everything else.
    """
    _check_prompt(request.prompt_ids, card)
    _check_length(len(request.prompt_ids), request.sampling.max_tokens, card)
    _check_sampling(request.sampling, card)
    if len(request.namespace) != 8:
        raise RequestError(f"a namespace has 8 bytes, got {len(request.namespace)}")


def _check_prompt(ids: Sequence[int], card: ModelCard) -> None:
    if not ids:
        raise RequestError("a prompt has at least one token, got none", param="prompt")
    low, high = id_range(ids)
    if low < 0 or high >= card.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"token ids are 0 to {card.vocab_size - 1}, got {bad}", param="prompt")


def _check_length(prompt_len: int, max_tokens: int | None, card: ModelCard) -> None:
    if prompt_len >= card.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {card.max_model_len} tokens, but the prompt has {prompt_len} tokens and at "
            "least one more is needed for the answer. Please shorten the prompt.",
            param="prompt",
        )
    if max_tokens is not None and prompt_len + max_tokens > card.max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {card.max_model_len} tokens. However, you requested "
            f"{prompt_len + max_tokens} tokens ({prompt_len} in the prompt, {max_tokens} for the answer). "
            "Please shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )


def _check_sampling(sampling: SamplingParams, card: ModelCard) -> None:
    _in_range("temperature", sampling.temperature, 0, math.inf)
    _in_range("top_p", sampling.top_p, 0, 1)
    _in_range("min_p", sampling.min_p, 0, 1)
    _in_range("presence_penalty", sampling.presence_penalty, -2, 2)
    _in_range("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100)
    _in_range("top_k", sampling.top_k, -1, 2**31 - 1)
    _in_range("min_tokens", sampling.min_tokens, 0, 2**31 - 1)
    if sampling.top_p == 0:
        raise RequestError("top_p is above 0, got 0", param="top_p")
    if sampling.max_tokens is not None:
        _in_range("max_tokens", sampling.max_tokens, 1, 2**31 - 1)
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(sampling, name)
        if wanted is not None:
            _in_range(name, wanted, 0, card.max_logprobs)
    _check_ids("logit_bias", sampling.logit_bias, MAX_BIAS, card)
    _check_ids("stop_token_ids", sampling.stop_token_ids, MAX_STOP, card)
    for bias in sampling.logit_bias.values():
        _in_range("logit_bias", bias, -100, 100)


def _in_range(name: str, value: float | int, low: float | int, high: float | int) -> None:
    if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
        wanted = f"at least {low}" if math.isinf(high) else f"{low} to {high}"
        shown = f"{value}" if isinstance(value, float) or abs(value) < 10**30 else "a much larger number"
        raise RequestError(f"{name} is {wanted}, got {shown}", param=name)


def _check_ids(name: str, ids: dict[int, float] | tuple[int, ...], most: int, card: ModelCard) -> None:
    if len(ids) > most:
        raise RequestError(f"{name} has at most {most} entries, got {len(ids)}", param=name)
    for token in ids:
        if not 0 <= token < card.vocab_size:
            raise RequestError(f"{name}: token ids are 0 to {card.vocab_size - 1}, got {token}", param=name)
