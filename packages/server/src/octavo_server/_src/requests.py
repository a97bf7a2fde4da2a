"""Request bodies of every endpoint. What a field means for the engine is said in `sampling`, `prompts` and the endpoints."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from octavo_core.errors import RequestError
from octavo_server._src.fields import COMMON_IGNORED, COMMON_REFUSED, Generation, Strict

MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 64
MAX_TOKENS = 2**20
_TOKENS = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, _TOKENS, {"type": "array", "items": _TOKENS}]
}
_RESERVED_KWARGS = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)


class CompletionRequest(Generation):
    """Body of `POST /v1/completions`."""

    ignored: ClassVar[frozenset[str]] = COMMON_IGNORED
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**COMMON_REFUSED, "suffix": ("",)}

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    echo: bool = False
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of not in (1, self.n):
            raise RequestError(f"best_of equals n or is left out, got best_of={self.best_of} and n={self.n}", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens is at least 1 unless echo=true, got 0", param="max_tokens")
        return self


def _content(value: Any) -> Any:
    """A string, or an array of text parts, joined with nothing between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("Input should be a string or an array of text parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(kind, str) and kind not in ("text", "input_text"):
            raise RequestError(f"content parts of type '{kind[:40]}' are not supported; only text is", param="messages")
        else:
            raise ValueError('Each part should be {"type": "text", "text": "..."}')
    return "".join(texts)


class Message(Strict):
    """One turn of a conversation."""

    ignored: ClassVar[frozenset[str]] = frozenset({"refusal", "annotations"})
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "function_call": (), "tool_call_id": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        BeforeValidator(_content),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
    ]
    name: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, str]:
        """What a chat template sees; `developer` is what older templates call `system`."""
        role = "system" if self.role == "developer" else self.role
        extra = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {"role": role, "content": self.content, **{k: v for k, v in extra.items() if v is not None}}


def _template_kwargs(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise ValueError(f"Input should be an object of at most {MAX_TEMPLATE_KWARGS} fields")
    for name, one in value.items():
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise ValueError(f"'{name[:40]}' cannot be set here")
        if not isinstance(one, str | int | float | bool | None) or len(str(one)) > 4096:
            raise ValueError(f"'{name[:40]}' should be a string, a number or a boolean of at most 4096 characters")
    return value


_CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "best_of": (1,),
    "include_reasoning": (True, False),
}


class Conversation(Strict):
    """Fields that decide how messages become a prompt."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_template_kwargs), Field(default_factory=dict)]

    @model_validator(mode="after")
    def _check_end(self) -> Conversation:
        if not self.continue_final_message:
            return self
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            raise RequestError("continue_final_message excludes add_generation_prompt", param="continue_final_message")
        if self.messages[-1].role != "assistant":
            raise RequestError("continue_final_message needs an assistant's message at the end", param="continue_final_message")
        return self


class ChatRequest(Generation, Conversation):
    """Body of `POST /v1/chat/completions`."""

    ignored: ClassVar[frozenset[str]] = COMMON_IGNORED | {"parallel_tool_calls", "prediction"}
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {**COMMON_REFUSED, **_CHAT_REFUSED}

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs need logprobs=true", param="top_logprobs")
        return self


class TokenizePrompt(Strict):
    """Body of `POST /tokenize` with a text; `content` is another name for `prompt`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeMessages(Conversation):
    """Body of `POST /tokenize` with messages."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    return_token_strs: bool = False
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {"tools": ([],), "chat_template": ()}


def _listed(value: Any) -> Any:
    """What is in the list is for `check_ids` to say, piece by piece."""
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise ValueError(f"Input should be an array of at most {MAX_TOKENS} token ids")
    return value


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Annotated[Any, BeforeValidator(_listed), WithJsonSchema(_TOKENS | {"maxItems": MAX_TOKENS})]
