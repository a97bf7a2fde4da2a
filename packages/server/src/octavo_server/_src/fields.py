"""What request models have in common: strict types, null means default, unknown fields are named.

Knows pydantic and OpenAI's and vLLM's field names; knows no tokenizer and no engine.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from octavo_core.errors import RequestError, nearest_name

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BIASES = 300
MAX_STOP_TOKENS = 32
MAX_CHOICES = 128
PRIORITY_LIMIT = 1000
_TINY_TOP_P = 1e-9


class Strict(BaseModel):
    """A JSON object whose nulls are defaults and whose unknown fields are refused.

    `ignored` fields have no effect here, whatever their value. `refused` ones are understood but not served yet: only null and
    the neutral values listed are accepted.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any, info: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.model_fields.keys()
        for name, value in data.items():
            if name in known or name in cls.ignored:
                continue
            if name in cls.refused:
                _refuse_unless_neutral(name, value, cls.refused[name])
            elif not (info.context or {}).get("ignore_unknown", False):
                hint = nearest_name(name, [*known, *cls.ignored, *cls.refused])
                raise RequestError(f"unknown field '{name[:100]}'{hint}", param=name[:100], code="unknown_field")
        return {name: value for name, value in data.items() if value is not None}


def _refuse_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
        raise RequestError(f"'{name}' is not supported yet; leave it out", param=name, code="unsupported_field")


def _stops(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("Input should be a string or an array of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"Input should have at most {MAX_STOPS} stop strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"Each stop string should have between 1 and {MAX_STOP_CHARS} characters")
    return stops


def _biases(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise ValueError(f"Input should be an object of at most {MAX_BIASES} token ids and biases")
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit() and len(key) <= 20):
            raise ValueError(f"Each key should be a token id, '{str(key)[:40]}' is none")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("Each bias should be a number between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _response_format(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise RequestError(
            f"response_format '{kind}' is not supported yet; leave it out", param="response_format", code="unsupported_field"
        )
    if kind != "text":
        raise ValueError('Input should be {"type": "text"}')
    return value


def _clamped(value: int) -> int:
    return max(-PRIORITY_LIMIT, min(PRIORITY_LIMIT, value))


Stops = Annotated[
    list[str],
    BeforeValidator(_stops),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}]}),
]
Biases = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Strict):
    """How usage is told in a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


_CONSTRAINTS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern",
    "guided_decoding_backend", "structural_tag", "regex", "grammar", "ebnf", "json_schema",
)  # fmt: skip
COMMON_REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_CONSTRAINTS, ()),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "response_role": ("assistant",),
}
COMMON_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "request_id"}
)


class Generation(Strict):
    """Fields that completions and chat share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1), AfterValidator(lambda p: max(p, _TINY_TOP_P))] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Biases = {}
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, AfterValidator(_clamped)] = 0
    deadline_ms: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    response_format: Annotated[Any, BeforeValidator(_response_format), WithJsonSchema({"type": "object"})] = None

    @model_validator(mode="after")
    def _check_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options need stream=true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs are not streamed; leave out stream=true", param="prompt_logprobs")
        return self
