"""From a request's prompt or messages to token ids, with every size checked before work is spent on it."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

from octavo_core.errors import ContextLengthError, RequestError
from octavo_core.wire import ModelCard
from octavo_server._src.requests import Conversation
from octavo_server._src.state import Served, ServerState

MAX_PROMPTS = 1024
_FEW_IDS = 4096
_PART = 16384


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt: its ids as C ints, which go to the engine as they are. `text` is None where the client sent ids."""

    ids: array[int]
    text: str | None = None


async def completion_prompts(state: ServerState, served: Served, value: Any, *, add_special_tokens: bool) -> list[Prompt]:
    """The prompts of a completion request: a string, strings, ids, or lists of ids.

    Raises:
        RequestError: For anything else, for ids outside the vocabulary, and for prompts that do not fit.
    """
    size = _size(value)
    if size is None:  # a few ids: looking at them takes less than handing them over
        return _prompts(served, value, add_special_tokens)
    return await state.off_loop(size, _prompts, served, value, add_special_tokens)


def _size(value: Any) -> int | None:
    """About how many bytes of text or ids are in a prompt; None where it is so little that no thread is worth it."""
    listed = value if isinstance(value, list) else [value]
    size = len(listed) + sum(len(one) for one in listed[: MAX_PROMPTS + 1] if isinstance(one, str | list))
    return None if size <= _FEW_IDS and not any(isinstance(one, str) for one in listed) else size


def _prompts(served: Served, value: Any, add_special_tokens: bool) -> list[Prompt]:
    prompts = []
    for one in _listed(value):
        ids = served.require_text().encode(one, add_special_tokens=add_special_tokens) if isinstance(one, str) else one
        check_length(len(ids), None, served.card)
        check_ids(ids, served.card)
        prompts.append(Prompt(_packed(ids), one if isinstance(one, str) else None))
    return prompts


async def chat_prompt(state: ServerState, served: Served, request: Conversation) -> Prompt:
    """The prompt of a conversation, through the model's chat template."""
    served.require_text()
    return await state.off_loop(sum(len(message.content) for message in request.messages), _render, served, request)


def _render(served: Served, request: Conversation) -> Prompt:
    text = served.require_text()
    rendered = text.render(
        [message.for_template() for message in request.messages],
        add_generation_prompt=request.add_generation_prompt,
        continue_final=request.continue_final_message,
        extra=request.chat_template_kwargs,
    )
    ids = text.encode(rendered, add_special_tokens=request.add_special_tokens, param="messages")
    check_length(len(ids), None, served.card, param="messages")
    check_ids(ids, served.card, param="messages")
    return Prompt(_packed(ids), rendered)


def _listed(value: Any) -> list[str | list[Any]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise RequestError(
            "a prompt is a string, an array of strings, of token ids, or of arrays of token ids, and not empty", param="prompt"
        )
    if _are_ints(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"a request has at most {MAX_PROMPTS} prompts, got {len(value)}", param="prompt")
    if all(isinstance(one, str) for one in value) or all(isinstance(one, list) for one in value):
        return value
    raise RequestError("the items of a prompt array are all strings, all integers or all arrays of integers", param="prompt")


def check_ids(ids: list[Any], card: ModelCard, *, param: str = "prompt") -> None:
    """Refuse an empty prompt and ids that name no token: inside the engine they would be clamped, not noticed."""
    if not ids:
        raise RequestError("wanted at least one prompt token, got none", param=param)
    for some in _in_parts(ids):
        if not _are_ints(some) or min(some) < 0 or max(some) >= card.vocab_size:
            bad = next(one for one in some if type(one) is not int or not 0 <= one < card.vocab_size)
            raise RequestError(f"token ids are integers in [0, {card.vocab_size}), got {str(bad)[:40]}", param=param)


def _packed(ids: list[int]) -> array[int]:
    packed = array("i")
    for some in _in_parts(ids):
        packed.fromlist(some)
    return packed


def _are_ints(values: list[Any]) -> bool:
    return all(set(map(type, some)) == {int} for some in _in_parts(values))


def _in_parts(values: list[Any]) -> Iterator[list[Any]]:
    """A list in pieces that take a millisecond to look at: no call in C keeps Python's lock for longer."""
    return (values[at : at + _PART] for at in range(0, len(values), _PART))


def check_length(prompt_len: int, max_tokens: int | None, card: ModelCard, *, param: str = "prompt") -> None:
    """Refuse what cannot fit the context together with the tokens asked for (at least one).

    Raises:
        ContextLengthError: In the words of OpenAI's API, which clients look for.
    """
    asked = max(max_tokens or 1, 1)
    if prompt_len + asked > card.max_model_len:
        raise ContextLengthError(
            f"this model's maximum context length is {card.max_model_len} tokens, but {prompt_len + asked} were requested "
            f"({prompt_len} in the {param}, {asked} in the completion); shorten the {param} or ask for fewer",
            param=param,
        )
