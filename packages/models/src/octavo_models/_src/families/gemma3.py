"""Gemma 3, text: sliding and full layers with a rotation each, norms before and after, scaled embeddings.

Of a checkpoint with vision (`Gemma3ForConditionalGeneration`) the language model is served. `attn_logit_softcapping` says nothing: the
family normalises Q and K instead of capping scores (arXiv 2503.19786, section 2), and transformers does not cap them either.
"""

from __future__ import annotations

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, layer_windows, object_at, rope_of
from octavo_models._src.model_config import ModelConfig, RopeConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    fields = _text_fields(fields)
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{fields.source}: 'use_bidirectional_attention' is not served")
    layers = fields.integer("num_hidden_layers", 26)
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    window = fields.integer("sliding_window", 4096)
    rope, local_rope = _ropes(fields)
    hidden = fields.integer("hidden_size")
    return base_config(
        fields,
        architecture,
        kv_heads=4,
        head_dim=256,
        max_len=131072,
        tied=True,
        act_key="hidden_activation",
        act="gelu_pytorch_tanh",
        attention_bias=fields.boolean("attention_bias", False),
        rope=rope,
        local_rope=local_rope,
        windows=layer_windows(fields, layers, window, [(layer + 1) % period != 0 for layer in range(layers)]),
        qk_norm=True,
        norm_offset=1.0,
        post_norms=True,
        embed_scale=hidden**0.5,
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        logit_softcap=fields.number("final_logit_softcapping") if fields.has("final_logit_softcapping") else None,
    )


def _text_fields(fields: Fields) -> Fields:
    """The language model's part of a configuration that has others beside it; what it leaves out is Gemma 3's default."""
    inner = fields.values.get("text_config")
    if inner is None:
        return fields
    if not isinstance(inner, dict):
        raise fields.fail("text_config", "an object")
    outer = {key: fields.values[key] for key in ("dtype", "torch_dtype") if fields.has(key)}
    # The head belongs to the whole: what is said of it beside the language model holds.
    head = {"tie_word_embeddings": fields.boolean("tie_word_embeddings", True)}
    sizes = {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    }
    return Fields({**sizes, **outer, **inner, **head}, f"{fields.source}: text_config")


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of sliding layers: an object each in `rope_parameters`; the old `rope_scaling` is of full layers alone.

    As transformers, which reads nothing of an object for both, but for `truncate`, which it reads only there.
    """
    said, scaling = object_at(fields, "rope_parameters"), object_at(fields, "rope_scaling")
    outside = Fields({k: v for k, v in fields.values.items() if k != "original_max_position_embeddings"}, fields.source)
    found = []
    for layers, base, theta, more in (
        ("full_attention", "rope_theta", 1e6, scaling),
        ("sliding_attention", "rope_local_base_freq", 10000.0, {}),
    ):
        own = object_at(Fields(said, f"{fields.source}: rope_parameters"), layers)
        values = {**own, **more, "truncate": said.get("truncate")}
        inner = Fields(values, f"{fields.source}: {'rope_scaling' if more else f'rope_parameters.{layers}'}")
        found.append(rope_of(outside, inner, theta=fields.number(base, theta)))
    return found[0], found[1]


_RENAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

FAMILY = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"), _read, _RENAMES)
