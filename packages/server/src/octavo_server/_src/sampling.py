"""From a request's fields to `SamplingParams`: the checkpoint's defaults where the request is silent, bounds the card sets."""

from __future__ import annotations

from typing import Any

from octavo_core.errors import RequestError
from octavo_core.wire import ModelCard, SamplingParams
from octavo_server._src.fields import Generation

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def sampling_params(
    request: Generation, card: ModelCard, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """How the engine is to choose tokens.

    Raises:
        RequestError: A token id outside the vocabulary, more alternatives than the card allows, or contradicting bounds.
    """
    for name, count in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > card.max_logprobs:
            raise RequestError(f"at most {card.max_logprobs} alternatives are answered per token, got {name}={count}", param=name)
    _check_vocabulary("logit_bias", list(request.logit_bias), card)
    _check_vocabulary("stop_token_ids", request.stop_token_ids, card)
    if max_tokens is not None and request.min_tokens > max_tokens:
        raise RequestError(f"min_tokens is at most max_tokens, got {request.min_tokens} and {max_tokens}", param="min_tokens")
    chosen: dict[str, Any] = {name: card.sampling_defaults[name] for name in _DEFAULTED if name in card.sampling_defaults}
    chosen |= {name: value for name in _DEFAULTED if (value := getattr(request, name)) is not None}
    return SamplingParams(
        **chosen,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        seed=request.seed,
        logit_bias=request.logit_bias,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )


def _check_vocabulary(param: str, token_ids: list[int], card: ModelCard) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < card.vocab_size:
            raise RequestError(f"token ids are in [0, {card.vocab_size}), got {token_id}", param=param)
