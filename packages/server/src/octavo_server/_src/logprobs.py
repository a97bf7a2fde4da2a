"""Scores in the two shapes OpenAI's API has: lists for completions, objects for chat. Knows no endpoint."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from octavo_core.wire import TokenLogprobs
from octavo_server._src.assemble import Entry
from octavo_server._src.text import Text

_FLOOR = -9999.0
"""Shown for a probability of zero: JSON has no infinity."""


def token_namer(text: Text | None, *, as_ids: bool) -> Callable[[int], str]:
    """How tokens are written: as text, or as `token_id:N`."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids or text is None else text.token_name


class LegacyLogprobs:
    """The `logprobs` object of completions, piece by piece: remembers the text offset between deltas of one choice.

    Args:
        num_top: Alternatives per token; the chosen token is always among them.
    """

    def __init__(self, text: Text | None, *, as_ids: bool, num_top: int, skip_special_tokens: bool) -> None:
        self._text, self._num_top, self._skip = text, num_top, skip_special_tokens
        self._name = token_namer(text, as_ids=as_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The object for these tokens."""
        return {
            "tokens": [self._name(token) for token, _ in entries],
            "token_logprobs": [None if scores is None else _shown(scores.logprob) for _, scores in entries],
            "top_logprobs": [None if scores is None else self._top(scores) for _, scores in entries],
            "text_offset": [self._advance(token) for token, _ in entries],
        }

    def _top(self, scores: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in zip(scores.top_ids[: self._num_top], scores.top_logprobs, strict=False):
            top.setdefault(self._name(token), _shown(logprob))
        top[self._name(scores.token_id)] = _shown(scores.logprob)
        return top

    def _advance(self, token: int) -> int:
        start = self._offset
        if self._text is not None and not (self._skip and token in self._text.tokenizer.special_ids):
            self._offset += len(self._decoder.decode(self._text.tokenizer.token_bytes(token)))
        return start


def chat_logprobs(entries: Sequence[Entry], text: Text, *, as_ids: bool, num_top: int) -> list[dict[str, Any]]:
    """The `logprobs.content` entries of chat; alternatives best first, exactly as many as asked for."""
    name = token_namer(text, as_ids=as_ids)

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token), "logprob": _shown(logprob), "bytes": list(text.tokenizer.token_bytes(token))}

    return [
        {
            **one(token, scores.logprob),
            "top_logprobs": [one(*top) for top in zip(scores.top_ids[:num_top], scores.top_logprobs[:num_top], strict=True)],
        }
        for token, scores in entries
        if scores is not None
    ]


def prompt_logprobs(scores: Sequence[TokenLogprobs | None], name: Callable[[int], str]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token an object from token ids to score, rank and text; null for the first."""
    return [None if one is None else _by_id(one, name) for one in scores]


def _by_id(scores: TokenLogprobs, name: Callable[[int], str]) -> dict[str, Any]:
    ranked = [
        (token, logprob, rank) for rank, (token, logprob) in enumerate(zip(scores.top_ids, scores.top_logprobs, strict=True), 1)
    ]
    ranked = [(scores.token_id, scores.logprob, scores.rank), *(one for one in ranked if one[0] != scores.token_id)]
    return {str(token): {"logprob": _shown(logprob), "rank": rank, "decoded_token": name(token)} for token, logprob, rank in ranked}


def _shown(logprob: float) -> float:
    return max(logprob, _FLOOR)
