"""Hugging Face's config.json and generation_config.json as typed configurations.

Knows old keys (`rope_theta`, `rope_scaling`, `torch_dtype`) and new ones (`rope_parameters`, `dtype`). Opens no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.fields import Fields, read_json
from octavo_models._src.model_config import GenerationConfig, ModelConfig, RopeConfig, RopeKind

SERVED: Final = "LlamaForCausalLM"
_DTYPES: Final = ("float32", "float16", "bfloat16")
_ROPE_KINDS: Final = ("default", "linear", "llama3")


def read_model_config(path: Path) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
        CheckpointError: When the file cannot be read, or a key is missing, ill-typed or contradicts another.
        UnsupportedModelError: When the architecture or one of its options is not served.
    """
    return parse_model_config(read_json(path), source=str(path))


def parse_model_config(values: Mapping[str, Any], *, source: str) -> ModelConfig:
    """As `read_model_config`, from the decoded object; `source` names it in errors."""
    fields = Fields(values, source)
    _refuse_unserved(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    config = ModelConfig(
        architecture=SERVED,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim") if fields.has("head_dim") else hidden // heads,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        rope=_rope(fields),
        dtype=_dtype(fields),
    )
    check_heads(config, fields, names=("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    return config


def check_heads(config: ModelConfig, fields: Fields, *, names: tuple[str, str, str, str]) -> None:
    """Refuse head counts that do not fit together; `names` are the file's words for hidden size, heads, KV heads, head size."""
    hidden, heads, kv_heads, head_dim = names
    if not fields.has(head_dim) and config.hidden_size % config.num_heads:
        raise fields.fail(heads, f"a divisor of '{hidden}' ({config.hidden_size}) where '{head_dim}' is not given")
    if config.num_heads % config.num_kv_heads:
        raise fields.fail(kv_heads, f"a divisor of '{heads}' ({config.num_heads})")
    if config.head_dim % 2:
        raise fields.fail(head_dim, f"even for rotary embedding (here {config.head_dim})")


def _refuse_unserved(fields: Fields) -> None:
    names = fields.values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise fields.fail("architectures", "a list of class names")
    model_type = fields.text("model_type", "")
    if SERVED not in names and (names or model_type != "llama"):
        came = ", ".join(names) or model_type or "none named"
        raise UnsupportedModelError(f"{fields.source}: architecture {came} is not served; this version serves {SERVED}")
    if fields.has("quantization_config"):
        raise UnsupportedModelError(
            f"{fields.source}: 'quantization_config' is not served; use unquantised safetensors or a GGUF file"
        )
    if fields.boolean("rope_interleaved", False):
        raise UnsupportedModelError(f"{fields.source}: 'rope_interleaved' is not served")
    act = fields.text("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModelError(f"{fields.source}: 'hidden_act' must be 'silu', got '{act}'")


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.fail(key, f"one of {', '.join(_DTYPES)}")
    return name


def _rope(fields: Fields) -> RopeConfig:
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = fields.values.get(key) or {}
    if not isinstance(values, dict):
        raise fields.fail(key, "an object")
    inner = Fields(values, f"{fields.source}: {key}")
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind not in _ROPE_KINDS:
        raise UnsupportedModelError(
            f"{inner.source}: rope type '{kind}' is not served; this version serves {', '.join(_ROPE_KINDS)}"
        )
    if fields.number("partial_rotary_factor", 1.0) != 1.0 or inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"{fields.source}: 'partial_rotary_factor' other than 1 is not served")
    theta = inner.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=inner.number("factor"))
    rope = RopeConfig(
        theta=theta,
        kind=cast(RopeKind, kind),
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise inner.fail("high_freq_factor", f"above 'low_freq_factor' ({rope.low_freq_factor:g})")
    return rope


def read_generation_config(folder: Path) -> GenerationConfig:
    """generation_config.json of a folder, with config.json's token ids where it is silent.

    `do_sample` alone sets nothing: whether to sample is the request's choice.

    Raises:
        CheckpointError: When a file cannot be read or a value is out of range.
    """
    base = Fields(read_json(folder / "config.json"), str(folder / "config.json"))
    path = folder / "generation_config.json"
    own = Fields(read_json(path) if path.exists() else {}, str(path))
    bos = own.token_ids("bos_token_id") or base.token_ids("bos_token_id")
    pad = own.token_ids("pad_token_id") or base.token_ids("pad_token_id")
    return GenerationConfig(
        eos_token_ids=own.token_ids("eos_token_id") or base.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        pad_token_id=pad[0] if pad else None,
        sampling_defaults=_sampling_defaults(own),
    )


def _sampling_defaults(fields: Fields) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    ranges: dict[str, dict[str, Any]] = {
        "temperature": {"closed": True},
        "top_p": {"most": 1.0},
        "min_p": {"most": 1.0, "closed": True},
    }
    for key in ("temperature", "top_p", "min_p", "repetition_penalty"):
        if fields.has(key):
            found[key] = fields.number(key, **ranges.get(key, {}))
    if fields.has("top_k"):
        found["top_k"] = fields.integer("top_k", least=-1)
    return found


def check_token_ids(generation: GenerationConfig, vocab_size: int, *, source: str) -> None:
    """Refuse end tokens the model cannot produce.

    Raises:
        CheckpointError: For an id at or above `vocab_size`.
    """
    for token_id in generation.eos_token_ids:
        if token_id >= vocab_size:
            raise CheckpointError(f"{source}: eos_token_id {token_id} is outside the vocabulary of {vocab_size}")
