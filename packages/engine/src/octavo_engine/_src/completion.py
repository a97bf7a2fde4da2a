"""What becomes of one prompt: its tokens as they come, their text, and where a stop string ends it. Touches nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo_core.errors import RequestError
from octavo_core.wire import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from octavo_models.text import Detokenizer, StopStrings, Tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass
class Completion:
    """What became of one prompt.

    Attributes:
        token_ids: Generated ids, the ending one included.
        text: Their text, cut before a stop string.
        finish_reason: `stop`, `length`, `abort` or `error`; None while it goes on.
        logprobs: One entry per generated token, when asked for.
        prompt_logprobs: One entry per prompt token, None for the first, when asked for.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        request_id: The request's name.
        new_text, new_token_ids: What this news of a stream adds to the news before; all of it where there is one answer only.
    """

    prompt: Prompt
    prompt_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    request_id: str = ""
    new_text: str = ""
    new_token_ids: list[int] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Nothing follows."""
        return self.finish_reason is not None

    @property
    def outputs(self) -> list[Completion]:
        """Itself in a list, for code that reads `outputs[0].text`."""
        return [self]

    @property
    def prompt_token_ids(self) -> list[int]:
        """`prompt_ids` by their longer name."""
        return self.prompt_ids


class Job:
    """A request on its way and what has come of it.

    Args:
        request: What the engine is asked.
        prompt: As it was given.
        tokenizer: None: there is no text.
        stop: Strings that end the text.

    Raises:
        RequestError: Stop strings without a tokenizer, or an empty one.
    """

    def __init__(self, request: EngineRequest, prompt: Prompt, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        if tokenizer is None and stop:
            raise RequestError("stop strings need a tokenizer; use stop_token_ids")
        self.request = request
        self.completion = Completion(prompt, list(request.prompt_ids), request_id=request.request_id)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(list(stop))

    def take(self, output: EngineOutput) -> bool:
        """Add an output; answers whether a stop string ended the text before the engine did.

        Raises:
            RequestError: The engine ended the request with an error.
        """
        done = self.completion
        done.token_ids += output.token_ids
        if output.logprobs is not None:
            done.logprobs = (done.logprobs or []) + output.logprobs
        if output.prompt_logprobs is not None:
            done.prompt_logprobs = output.prompt_logprobs
        done.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is FinishReason.ERROR:
            raise RequestError(output.error or "the engine failed")
        if self._add_text(output):
            done.finish_reason = "stop"
            return output.finish_reason is None
        done.finish_reason = None if output.finish_reason is None else str(output.finish_reason)
        return False

    def news(self, since: Completion | None) -> Completion:
        """A copy of what has come so far, which later news leave alone.

        Args:
            since: The news before; what was added since is told apart.
        """
        done = self.completion
        num_ids, num_chars = (0, 0) if since is None else (len(since.token_ids), len(since.text))
        return dataclasses.replace(
            done,
            token_ids=list(done.token_ids),
            logprobs=None if done.logprobs is None else list(done.logprobs),
            new_text=done.text[num_chars:],
            new_token_ids=done.token_ids[num_ids:],
        )

    def _add_text(self, output: EngineOutput) -> bool:
        """Answers whether a stop string was met."""
        if self._detokenizer is None:
            return False
        body = output.token_ids[: len(output.token_ids) - (output.stop_token_id is not None)]
        text, matched = self._stops.push(self._detokenizer.push(body))
        self.completion.text += text
        if output.finish_reason is not None and matched is None:
            text, matched = self._stops.push(self._detokenizer.finish())
            self.completion.text += text + ("" if matched is not None else self._stops.finish())
        return matched is not None
