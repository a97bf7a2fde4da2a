"""Gemma 3, text: sliding and full layers with a rotation each, norms before and after, scaled embeddings.

Of a checkpoint with vision (`Gemma3ForConditionalGeneration`) the language model is served. `attn_logit_softcapping` says nothing: the
family normalises Q and K instead of capping scores (arXiv 2503.19786, section 2), and transformers does not cap them either.
"""

from __future__ import annotations

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, layer_windows, read_rope
from octavo_models._src.model_config import ModelConfig, RopeConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    fields = _text_fields(fields)
    if fields.boolean("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{fields.source}: 'use_bidirectional_attention' is not served")
    layers = fields.integer("num_hidden_layers", 26)
    period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    window = fields.integer("sliding_window", 4096)
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
        rope=read_rope(fields, theta=1e6),
        local_rope=_local_rope(fields),
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


def _local_rope(fields: Fields) -> RopeConfig:
    """Sliding layers: never scaled in the old keys, as `sliding_attention` says in the new ones."""
    theta, rope = fields.number("rope_local_base_freq", 10000.0), fields.values.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        return read_rope(Fields({**fields.values, "rope_theta": theta}, fields.source), layer_type="sliding_attention")
    return RopeConfig(theta=theta)


_RENAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

FAMILY = Family(("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), ("gemma3_text", "gemma3"), _read, _RENAMES)
