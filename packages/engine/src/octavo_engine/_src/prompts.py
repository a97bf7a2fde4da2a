"""Prompts on their way in: text, token ids or a conversation become a request. Knows the tokenizer and the card; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_core.errors import RequestError
from octavo_core.keys import namespace_of
from octavo_core.wire import EngineRequest, ModelCard, SamplingParams
from octavo_engine._src.completion import Job, Prompt
from octavo_models.text import ChatTemplate, Tokenizer, load_text

Message = Mapping[str, Any]


class Prompts:
    """Makes jobs of prompts.

    Args:
        card: What is served.
        skip_tokenizer: Token ids in and out.

    Raises:
        CheckpointError: The tokenizer cannot be read.
    """

    def __init__(self, card: ModelCard, *, skip_tokenizer: bool) -> None:
        text = None if skip_tokenizer else load_text(card.root)
        self.card = card
        self.tokenizer: Tokenizer | None = text[0] if text else None
        self.chat_template: ChatTemplate | None = text[1] if text else None

    def default_sampling(self, **fields: Any) -> SamplingParams:
        """Sampling parameters with the checkpoint's own defaults, 16 tokens unless said otherwise."""
        return SamplingParams(**{"max_tokens": 16, **self.card.sampling_defaults, **fields})

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Raises:
            RequestError: It is text and there is no tokenizer, or neither text nor ids.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("a text prompt needs a tokenizer; start without skip_tokenizer_init, or pass token ids")
            return self.tokenizer.encode(prompt)
        try:
            return [int(i) for i in prompt]
        except (TypeError, ValueError):
            raise RequestError(f"a prompt is a text or a sequence of token ids, got {type(prompt).__name__}") from None

    def render(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation, through the checkpoint's chat template; `options` are `ChatTemplate.render`'s.

        Raises:
            RequestError: There is no tokenizer or no template, or the template refuses.
        """
        if self.tokenizer is None or self.chat_template is None:
            raise RequestError("a conversation needs a tokenizer; start without skip_tokenizer_init, or pass token ids to generate")
        return self.tokenizer.encode(self.chat_template.render(messages, **options), add_special_tokens=False)

    def job(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        stop: str | Sequence[str],
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Job:
        """A request for a prompt; the checkpoint's own sampling where None is given.

        Raises:
            RequestError: It cannot be asked.
        """
        request = EngineRequest(
            request_id=request_id,
            prompt_ids=self.encode(prompt),
            sampling=self.default_sampling() if sampling is None else sampling,
            namespace=namespace_of(cache_salt=cache_salt),
            priority=priority,
        )
        return Job(request, prompt, self.tokenizer, [stop] if isinstance(stop, str) else stop)


def is_conversation(messages: Any) -> bool:
    """One conversation, not several."""
    return bool(messages) and isinstance(messages[0], Mapping)


def one_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """Sampling parameters of each of `count` prompts.

    Raises:
        RequestError: There are several, but not so many.
    """
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    each: list[SamplingParams | None] = list(sampling)
    if len(each) != count:
        raise RequestError(f"sampling parameters are one for all prompts or one for each: {count} prompts came with {len(each)}")
    return each


def same(one: Any, other: Any, names: tuple[str, str]) -> Any:
    """A value that goes by two names, given by at most one of them.

    Raises:
        RequestError: Both were given.
    """
    if one is not None and other is not None:
        raise RequestError(f"{names[0]} and {names[1]} mean the same; give one of them")
    return other if one is None else one
