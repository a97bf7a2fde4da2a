"""A tokenizer with its chat template, as the endpoints use them. Calls are CPU-bound and thread-safe: run long ones off the event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo_core.errors import ContextLengthError, RequestError
from octavo_models.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer


class Text:
    """Text in and out of one model.

    Args:
        tokenizer: The model's.
        template: Its chat template; None where chat is refused.
        max_model_len: Longest prompt and answer, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._max_prompt_bytes = max_model_len * max(1, *(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)))

    def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a prompt.

        Raises:
            ContextLengthError: The text is too long to fit, whatever its tokens: found without tokenising it.
        """
        size = len(text.encode("utf-8", "replace"))
        if size > self._max_prompt_bytes:
            raise ContextLengthError(
                f"this model's maximum context length is {self._max_model_len} tokens, and no more than {self._max_prompt_bytes} bytes "
                f"of text can be that few; the prompt has {size} bytes",
                param=param,
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, continue_final: bool, extra: Mapping[str, Any]
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            RequestError: There is no template, or it refuses these messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template; give one with --chat-template or use /v1/completions", param="messages"
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt and not continue_final,
            continue_final_message=continue_final,
            **extra,
        )

    def token_name(self, token_id: int) -> str:
        """A token as log-probabilities show it; raw bytes that are no whole characters as `bytes:\\xe2\\x80`."""
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextStream:
    """The text of one sequence as its tokens come: characters are whole, stop strings never show.

    Args:
        stops: Strings that end the sequence.
        include_stop: Leave what ended the sequence, string or token, in the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str], include_stop: bool, skip_special_tokens: bool) -> None:
        self._characters = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include=include_stop)
        self._include_stop = include_stop

    def push(self, token_id: int, *, is_end: bool = False) -> tuple[str, str | None]:
        """Take in a token; `is_end`: the engine says it ended the sequence. Text to show, and the stop string found."""
        if is_end and not self._include_stop:
            return "", None
        return self._stops.push(self._characters.push([token_id]))

    def finish(self) -> tuple[str, str | None]:
        """The sequence has ended without a stop string: what was held back."""
        shown, matched = self._stops.push(self._characters.finish())
        return (shown, matched) if matched is not None else (shown + self._stops.finish(), None)
