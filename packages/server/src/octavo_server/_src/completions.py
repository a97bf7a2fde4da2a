"""`POST /v1/completions`. Knows the shape of text completions; how tokens become text is `assemble`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_core.errors import RequestError
from octavo_server._src.answers import Job, check_prompts
from octavo_server._src.assemble import Delta, Entry
from octavo_server._src.logprobs import LegacyLogprobs, prompt_logprobs, token_namer
from octavo_server._src.prompts import Prompt, completion_prompts
from octavo_server._src.requests import CompletionRequest
from octavo_server._src.sampling import sampling_params
from octavo_server._src.state import Served, ServerState

_DEFAULT_MAX_TOKENS = 16


class CompletionFormat:
    """Writes text completions.

    Args:
        echoes: Text of each prompt, put before the answer; None: no echo.
        as_ids: Write tokens as `token_id:N`.
    """

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, request: CompletionRequest, served: Served, prompts: Sequence[Prompt], echoes: Sequence[str] | None, *, as_ids: bool
    ) -> None:
        self._request, self._served, self._prompts, self._echoes, self._as_ids = request, served, prompts, echoes, as_ids
        self._logprobs: dict[int, LegacyLogprobs] = {}
        self._opened: set[int] = set()

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: a text completion opens with text."""
        return None

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """One chunk choice, or none while the text is held back."""
        is_first = index not in self._opened
        choice = self.choice(index, delta)
        news = choice["text"] or choice["logprobs"] is not None or delta.finish_reason is not None
        if not news and "token_ids" not in choice and not (is_first and self._echoes is not None):
            return []
        choice.pop("prompt_logprobs", None)
        return [choice]

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice for one delta or for all joined: the first of a choice carries the echo."""
        is_first = index not in self._opened
        self._opened.add(index)
        echo = self._echoes[index // self._request.n] if is_first and self._echoes is not None else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text,
            "logprobs": self._scores(index, delta, with_prompt=is_first and self._echoes is not None),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._request.prompt_logprobs is not None and delta.prompt_scores is not None:
            name = token_namer(self._served.text, as_ids=self._as_ids)
            choice["prompt_logprobs"] = prompt_logprobs(delta.prompt_scores, name)
        if self._request.return_token_ids or self._served.text is None:
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompts[index // self._request.n].ids.tolist()
        return choice

    def envelope(self, whole: Sequence[Delta]) -> dict[str, Any]:
        """Nothing more."""
        return {}

    def _scores(self, index: int, delta: Delta, *, with_prompt: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        entries: list[Entry] = list(delta.entries or [])
        if with_prompt and delta.prompt_scores is not None:
            prompt = self._prompts[index // self._request.n].ids
            entries = [*zip(prompt, delta.prompt_scores, strict=True), *entries]
        if index not in self._logprobs:
            self._logprobs[index] = LegacyLogprobs(
                self._served.text,
                as_ids=self._as_ids,
                num_top=self._request.logprobs,
                skip_special_tokens=self._request.skip_special_tokens,
            )
        return self._logprobs[index].take(entries)


async def prepare_completion(state: ServerState, served: Served, request: CompletionRequest) -> Job:
    """Validate a completion request against the model.

    Raises:
        RequestError: It cannot be served.
    """
    served.check_model(request.model)
    prompts = await completion_prompts(state, served, request.prompt, add_special_tokens=request.add_special_tokens)
    check_prompts(prompts, served, request.n, request.max_tokens, param="prompt")
    max_tokens = _max_tokens(request, served, prompts)
    scored = request.logprobs if request.echo else None
    wanted = [count for count in (scored, request.prompt_logprobs) if count is not None]
    sampling = sampling_params(
        request, served.card, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=max(wanted, default=None)
    )
    echoes = [await _echo(state, served, prompt, request) for prompt in prompts] if request.echo else None
    as_ids = request.return_tokens_as_token_ids
    as_ids = state.config.return_tokens_as_token_ids if as_ids is None else as_ids
    layout = CompletionFormat(request, served, prompts, echoes, as_ids=as_ids)
    return Job(request, prompts, sampling, layout, drops_generated=request.max_tokens == 0)


def _max_tokens(request: CompletionRequest, served: Served, prompts: Sequence[Prompt]) -> int:
    """What was asked; else 16, or what is left of the context."""
    if request.max_tokens is not None:
        if request.max_tokens == 0 and request.min_tokens > 0:
            raise RequestError("min_tokens is at most max_tokens, which is 0", param="min_tokens")
        return max(request.max_tokens, 1)
    room = served.card.max_model_len - max(len(prompt.ids) for prompt in prompts)
    return max(1, min(max(_DEFAULT_MAX_TOKENS, request.min_tokens), room))


async def _echo(state: ServerState, served: Served, prompt: Prompt, request: CompletionRequest) -> str:
    """The prompt as it was sent; ids are decoded where there is a tokenizer."""
    if prompt.text is not None:
        return prompt.text
    if served.text is None:
        return ""
    decode = served.text.tokenizer.decode
    return await state.off_loop(len(prompt.ids), decode, prompt.ids, skip_special_tokens=request.skip_special_tokens)
