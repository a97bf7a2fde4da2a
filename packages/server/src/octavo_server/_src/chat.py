"""`POST /v1/chat/completions`. Knows the shape of chat answers; how messages become a prompt is `prompts`'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo_core.errors import RequestError
from octavo_server._src.answers import Job, check_prompts
from octavo_server._src.assemble import Delta
from octavo_server._src.logprobs import chat_logprobs, prompt_logprobs, token_namer
from octavo_server._src.prompts import Prompt, chat_prompt
from octavo_server._src.requests import ChatRequest
from octavo_server._src.sampling import sampling_params
from octavo_server._src.state import Served, ServerState


class ChatFormat:
    """Writes chat completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, request: ChatRequest, served: Served, prompt: Prompt, *, as_ids: bool) -> None:
        self._request, self._text, self._prompt, self._as_ids = request, served.require_text(), prompt, as_ids

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role, once per choice."""
        delta = {"role": "assistant", "content": ""}
        extra = {"prompt_token_ids": self._prompt.ids.tolist()} if self._request.return_token_ids else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **extra}

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Content if there is any to show, then the end if this is it."""
        chunks = []
        logprobs = self._scores(delta)
        ids = {"token_ids": delta.token_ids} if self._request.return_token_ids else {}
        if delta.text or logprobs is not None or (ids and delta.token_ids):
            said = {"content": delta.text}
            chunks.append({"index": index, "delta": said, "logprobs": logprobs, "finish_reason": None, **ids})
        if delta.finish_reason is not None:
            end: dict[str, Any] = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            chunks.append({"index": index, "delta": {}, "logprobs": None, **end})
        return chunks

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The whole message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._scores(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **({"token_ids": delta.token_ids} if self._request.return_token_ids else {}),
        }

    def envelope(self, whole: Sequence[Delta]) -> dict[str, Any]:
        """Prompt scores and ids, which belong to no choice."""
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt.ids.tolist()} if self._request.return_token_ids else {}
        scores = whole[0].prompt_scores
        if self._request.prompt_logprobs is not None and scores is not None:
            extra["prompt_logprobs"] = prompt_logprobs(scores, token_namer(self._text, as_ids=self._as_ids))
        return extra

    def _scores(self, delta: Delta) -> dict[str, Any] | None:
        if not self._request.logprobs or delta.entries is None:
            return None
        num_top = self._request.top_logprobs or 0
        return {"content": chat_logprobs(delta.entries, self._text, as_ids=self._as_ids, num_top=num_top), "refusal": None}


async def prepare_chat(state: ServerState, served: Served, request: ChatRequest) -> Job:
    """Validate a chat request against the model.

    Raises:
        RequestError: It cannot be served.
    """
    served.check_model(request.model)
    if served.text is None:
        raise RequestError(
            "chat needs a tokenizer, and this server was started with --skip-tokenizer-init; send token ids to /v1/completions",
            param="messages",
        )
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    prompt = await chat_prompt(state, served, request)
    check_prompts([prompt], served, request.n, max_tokens, param="messages")
    sampling = sampling_params(
        request,
        served.card,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    as_ids = request.return_tokens_as_token_ids
    as_ids = state.config.return_tokens_as_token_ids if as_ids is None else as_ids
    return Job(request, [prompt], sampling, ChatFormat(request, served, prompt, as_ids=as_ids))
