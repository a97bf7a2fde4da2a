"""Messages to the one string a chat model was trained on.

Knows Jinja and what templates written for `transformers` expect to find. Knows no HTTP: the caller checks a request's own fields.
The clock is read only when a template asks for the date.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from octavo_core.errors import CheckpointError, RequestError
from octavo_models._src.sandbox import MAX_CHARS, BoundedSandbox, budget
from octavo_models._src.tokenizer import check_text


class ChatTemplate:
    """A model's chat template, compiled once.

    Encode what `render` gives with `add_special_tokens=False`: templates write their own.

    Args:
        source: Jinja text; None for a model without one.
        special_tokens: Texts by name (`bos_token`, …), visible in the template.
        name: Where the template came from, for errors.

    Raises:
        CheckpointError: When the source is not valid Jinja.
    """

    def __init__(self, source: str | None, *, special_tokens: Mapping[str, str] | None = None, name: str = "chat template") -> None:
        self.source = source
        self._special = dict(special_tokens or {})
        environment = BoundedSandbox()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source) if source is not None else None
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{name}: the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation.

        Args:
            messages: Each with a `role` and a `content`: a string, or a list of `{"type": "text", "text": …}` parts, which are
                joined with nothing between.
            add_generation_prompt: End with the opening of the assistant's turn.
            continue_final_message: End inside the last message instead, so that the model goes on with it.
            variables: More names the template may use (`tools`, `enable_thinking`, …).

        Raises:
            RequestError: When there is no template, a message is malformed, the template refuses or fails, or the result would be
                larger than 16 Mi characters.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a plain prompt to completions", param="messages")
        if continue_final_message and add_generation_prompt:
            message = "continue_final_message needs add_generation_prompt to be false: the last message cannot end and go on"
            raise RequestError(message, param="continue_final_message")
        plain = [_plain_message(message, at) for at, message in enumerate(messages)]
        if not plain:
            raise RequestError("messages must hold at least one message, got none", param="messages")
        mark = f"\x02{secrets.token_hex(16)}\x03" if continue_final_message else ""
        plain[-1]["content"] += mark
        names = {"tools": None, "documents": None, **self._special, **variables}
        text = _run(self._template, {**names, "messages": plain, "add_generation_prompt": add_generation_prompt})
        check_text(text, param="messages")
        return _cut_at(text, mark) if mark else text


def _run(template: Template, names: dict[str, Any]) -> str:
    pieces, length = [], 0
    try:
        with budget():
            for piece in template.generate(names):
                length += len(piece)
                if length > MAX_CHARS:
                    raise RequestError(f"the rendered chat is longer than {MAX_CHARS} characters", param="messages")
                pieces.append(piece)
    except RequestError:
        raise
    except TemplateError as error:
        raise RequestError(f"the chat template refuses these messages: {_one_line(error)}", param="messages") from None
    except Exception as error:  # a template can fail in as many ways as Python
        raise RequestError(
            f"the chat template fails on these messages: {type(error).__name__}: {_one_line(error)}", param="messages"
        ) from None
    return "".join(pieces)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _plain_message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """A copy with its content as one string; absent content becomes the empty string."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{at}] must be an object with a string 'role'", param=f"messages[{at}]")
    content = message.get("content")
    if content is None:
        content = ""
    elif isinstance(content, list):
        content = "".join(_text_of(part, f"messages[{at}].content[{i}]") for i, part in enumerate(content))
    elif not isinstance(content, str):
        raise RequestError(f"messages[{at}].content must be a string or a list of parts", param=f"messages[{at}].content")
    return {**message, "content": content}


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        came = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        message = f'{where} must be {{"type": "text", "text": "…"}}, got {came!r}: this model reads text only'
        raise RequestError(message, param=where)
    return part["text"]


def _cut_at(text: str, mark: str) -> str:
    at = text.rfind(mark)
    if at < 0:
        raise RequestError(
            "the chat template does not show the last message, so it cannot be continued", param="continue_final_message"
        )
    return text[:at].replace(mark, "")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
