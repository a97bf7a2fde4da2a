"""Hugging Face's config.json and generation_config.json as typed configurations.

Knows what every family has in common: old keys (`rope_theta`, `rope_scaling`, `torch_dtype`) and new ones (`rope_parameters`, `dtype`). What is a
family's own is in its file in `families`. Opens no weights.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.fields import Fields, read_json
from octavo_models._src.model_config import ACTIVATIONS, Activation, GenerationConfig, ModelConfig, RopeConfig, RopeKind
from octavo_models._src.quantisation import read_quantisation

logger = logging.getLogger(__name__)

_DTYPES: Final = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "float64": "float32"}


def read_model_config(path: Path) -> ModelConfig:
    """The model that a config.json describes.

    Raises:
        CheckpointError: When the file cannot be read, or a key is missing, ill-typed or contradicts another.
        UnsupportedModelError: When the architecture or one of its options is not served.
    """
    return parse_model_config(read_json(path), source=str(path))


def parse_model_config(values: Mapping[str, Any], *, source: str) -> ModelConfig:
    """As `read_model_config`, from the decoded object; `source` names it in errors."""
    from octavo_models._src.families import family_of

    fields = Fields(values, source)
    family, name = family_of(fields)
    return dataclasses.replace(family.read(fields, name), quantisation=read_quantisation(fields))


def base_config(
    fields: Fields,
    architecture: str,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    width: int | None = None,
    eps: float = 1e-6,
    max_len: int = 2048,
    tied: bool = False,
    act_key: str = "hidden_act",
    act: str = "silu",
    rope: RopeConfig | None = None,
    **more: Any,
) -> ModelConfig:
    """What all families write the same way.

    Args:
        kv_heads, head_dim: What the family means where the file says nothing; None: derived from the heads.
        width: As well, of the MLP; None: the file must say it.
        eps, max_len, tied, act: As well.
        act_key: Where the activation is named.
        rope: Where the family reads it in a way of its own.
        more: Other fields of the configuration.
    """
    refuse_unserved(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    own_dim = fields.integer("head_dim") if fields.has("head_dim") else head_dim
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", width),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(fields, heads, kv_heads),
        head_dim=hidden // heads if own_dim is None else own_dim,
        rms_norm_eps=fields.number("rms_norm_eps", eps),
        max_position_embeddings=fields.integer("max_position_embeddings", max_len),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", tied),
        hidden_act=activation(fields, act_key, act),
        dtype=_dtype(fields),
        rope=read_rope(fields) if rope is None else rope,
        **more,
    )
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    check_heads(config, fields, names=names, derived=own_dim is None)
    if config.moe is not None and config.moe.experts_per_token > config.moe.num_experts:
        raise fields.fail("num_experts_per_tok", f"at most the number of experts ({config.moe.num_experts})")
    return _within_its_length(config, fields)


def _within_its_length(config: ModelConfig, fields: Fields) -> ModelConfig:
    """LongRoPE has other factors for sequences beyond the length before stretching, in every position of theirs: K that is kept for
    the next token or the next request would be wrong. The context ends where one set of factors is right."""
    ropes = [rope for rope in (config.rope, config.local_rope) if rope is not None and rope.kind == "longrope"]
    for rope in ropes:
        if len(rope.divisors) != config.head_dim // 2:
            raise fields.fail(
                "short_factor", f"{config.head_dim // 2} numbers, one for each rotated pair; there are {len(rope.divisors)}"
            )
    lengths = (config.max_position_embeddings, *(rope.original_max_position_embeddings for rope in ropes))
    return dataclasses.replace(config, max_position_embeddings=min(lengths))


def _kv_heads(fields: Fields, heads: int, unsaid: int | None) -> int:
    """Null means as many as there are heads; a file that says nothing means the family's number."""
    if fields.has("num_key_value_heads"):
        return fields.integer("num_key_value_heads")
    return heads if unsaid is None or "num_key_value_heads" in fields.values else unsaid


def check_heads(config: ModelConfig, fields: Fields, *, names: tuple[str, str, str, str], derived: bool) -> None:
    """Refuse head counts that do not fit together; `names` are the file's words for hidden size, heads, KV heads, head size."""
    hidden, heads, kv_heads, head_dim = names
    if derived and config.hidden_size % config.num_heads:
        raise fields.fail(heads, f"a divisor of '{hidden}' ({config.hidden_size}) where '{head_dim}' is not given")
    if config.num_heads % config.num_kv_heads:
        raise fields.fail(kv_heads, f"a divisor of '{heads}' ({config.num_heads})")
    if config.head_dim % 2:
        raise fields.fail(head_dim, f"even for rotary embedding (here {config.head_dim})")


def refuse_unserved(fields: Fields) -> None:
    """Options that no family is served with."""
    if fields.boolean("rope_interleaved", False):
        raise UnsupportedModelError(f"{fields.source}: 'rope_interleaved' is not served")


def activation(fields: Fields, key: str, default: str) -> Activation:
    """The activation a file names."""
    name = fields.text(key, default)
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"{fields.source}: '{key}' must be one of {', '.join(ACTIVATIONS)}, got '{name}'")
    return ACTIVATIONS[name]


def layer_windows(fields: Fields, num_layers: int, window: int | None, is_sliding: list[bool]) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types` where the file has them, otherwise by the family's rule.

    Args:
        window: Tokens that sliding layers look back; None: no layer slides.
        is_sliding: The family's rule.

    Raises:
        CheckpointError: For a list of another length.
        UnsupportedModelError: For a kind of layer that is not served.
    """
    if fields.has("layer_types"):
        kinds = fields.values["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.fail("layer_types", f"a list of {num_layers} kinds, one a layer")
        unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedModelError(
                f"{fields.source}: layers of kind {', '.join(unknown)} are not served; full_attention and sliding_attention are"
            )
        is_sliding = [kind == "sliding_attention" for kind in kinds]
        if any(is_sliding) and window is None:
            raise fields.fail("sliding_window", "a number of tokens where 'layer_types' has sliding layers")
    if window is None or not any(is_sliding):
        return ()
    return tuple(window if slides else None for slides in is_sliding)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    name = fields.text(key, "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.fail(key, f"one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def read_rope(fields: Fields, *, theta: float = 10000.0) -> RopeConfig:
    """Rotary embedding in the old keys or the new ones.

    Args:
        theta: Base where the file says nothing.
    """
    return rope_of(fields, rope_fields(fields), theta=fields.number("rope_theta", theta))


def rope_of(fields: Fields, inner: Fields, *, theta: float) -> RopeConfig:
    """Rotary embedding as an object of the file describes it.

    Args:
        fields: The file.
        inner: The object.
        theta: Base where the object says nothing.
    """
    kind = inner.text("rope_type", inner.text("type", "default"))
    if kind not in get_args(RopeKind):
        raise UnsupportedModelError(
            f"{inner.source}: rope type '{kind}' is not served; this version serves {', '.join(get_args(RopeKind))}"
        )
    share = inner.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0, most=1.0), most=1.0)
    if share != 1.0 and kind != "proportional":
        # transformers 5 turns all pairs of such a file where the rotation is plain and fails where it is not; others turn the first.
        raise UnsupportedModelError(
            f"{fields.source}: 'partial_rotary_factor' other than 1 is served with rope type 'proportional' alone, got {share:g} with '{kind}'"
        )
    theta = inner.number("rope_theta", theta)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeConfig(theta=theta, kind="linear" if kind == "linear" else "dynamic", factor=inner.number("factor"))
    if kind == "proportional":
        return RopeConfig(theta=theta, kind="proportional", factor=inner.number("factor", 1.0), share=share)
    return {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[kind](fields, inner, theta)


def rope_fields(fields: Fields) -> Fields:
    """The object that describes rotary embedding, of full attention where it has one for each type of layer; empty where there is none."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = object_at(fields, key)
    if any(isinstance(values.get(name), dict) for name in ("full_attention", "sliding_attention")):
        return Fields(
            object_at(Fields(values, f"{fields.source}: {key}"), "full_attention"), f"{fields.source}: {key}.full_attention"
        )
    return Fields(values, f"{fields.source}: {key}")


def object_at(fields: Fields, key: str) -> dict[str, Any]:
    """An object of the file; empty where there is none."""
    values = fields.values.get(key) or {}
    if not isinstance(values, dict):
        raise fields.fail(key, "an object")
    return values


def _original_length(fields: Fields, inner: Fields) -> int:
    """Before stretching. Beside the scaling it wins over within it; a file that has it nowhere means its own length."""
    if fields.has("original_max_position_embeddings"):
        return fields.integer("original_max_position_embeddings")
    return inner.integer("original_max_position_embeddings", fields.integer("max_position_embeddings", 2048))


def _llama3(fields: Fields, inner: Fields, theta: float) -> RopeConfig:
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_max_position_embeddings=_original_length(fields, inner),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise inner.fail("high_freq_factor", f"above 'low_freq_factor' ({rope.low_freq_factor:g})")
    return rope


def _yarn(fields: Fields, inner: Fields, theta: float) -> RopeConfig:
    """As transformers: the factor may follow from the two lengths, the attention factor from the factor."""
    original = _original_length(fields, inner)
    factor = inner.number("factor") if inner.has("factor") else fields.integer("max_position_embeddings", 2048) / original
    if inner.has("attention_factor"):
        attention_factor = inner.number("attention_factor")
    else:
        whole, shared = inner.number("mscale", 0.0, closed=True), inner.number("mscale_all_dim", 0.0, closed=True)
        attention_factor = yarn_mscale(factor, whole) / yarn_mscale(factor, shared) if whole and shared else yarn_mscale(factor)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.boolean("truncate", True),
        attention_factor=attention_factor,
    )


def _longrope(fields: Fields, inner: Fields, theta: float) -> RopeConfig:
    """As transformers up to the length before stretching: the short factors, and sharper by what the file is stretched to."""
    original = _original_length(fields, inner)
    if original < 2:
        raise inner.fail("original_max_position_embeddings", "at least 2")
    factor = inner.number("factor") if inner.has("factor") else fields.integer("max_position_embeddings", 2048) / original
    sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    divisors = inner.values.get("short_factor")
    if not isinstance(divisors, list) or not all(
        isinstance(d, int | float) and d > 0 and not isinstance(d, bool) for d in divisors
    ):
        raise inner.fail("short_factor", "a list of numbers above 0, one for each rotated pair")
    return RopeConfig(
        theta=theta,
        kind="longrope",
        original_max_position_embeddings=original,
        attention_factor=inner.number("attention_factor", sharper),
        divisors=tuple(float(d) for d in divisors),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """By how much YaRN sharpens attention for a stretch of `factor` (arXiv 2309.00071, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


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


def producible(generation: GenerationConfig, vocab_size: int, *, source: str) -> GenerationConfig:
    """Without end tokens that the model cannot produce, which a log line names: configurations of cut-down models keep those of the whole."""
    known = tuple(token_id for token_id in generation.eos_token_ids if token_id < vocab_size)
    if known == generation.eos_token_ids:
        return generation
    beyond = ", ".join(str(token_id) for token_id in generation.eos_token_ids if token_id >= vocab_size)
    logger.warning("%s: end tokens outside the vocabulary of %d are left out: %s", source, vocab_size, beyond)
    return dataclasses.replace(generation, eos_token_ids=known)
