"""Qwen3-MoE: Qwen3's attention; experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config
from octavo_models._src.model_config import ModelConfig, MoEConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    layers = fields.integer("num_hidden_layers")
    slides = fields.boolean("use_sliding_window", False) and fields.values.get("sliding_window", 0) is not None
    window = fields.integer("sliding_window", 4096) if slides else None
    experts = fields.integer("num_experts", fields.integer("num_local_experts", 128, least=0), least=0)
    moe = MoEConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        normalise=fields.boolean("norm_topk_prob", False),
    )
    return base_config(
        fields,
        architecture,
        kv_heads=4,
        width=6144,
        max_len=32768,
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        windows=() if window is None else (window,) * layers,
        moe=moe if experts else None,
        moe_layers=_moe_layers(fields, layers),
    )


def _moe_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    step, plain = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(isinstance(layer, int) for layer in plain):
        raise fields.fail("mlp_only_layers", "a list of layer numbers")
    return tuple((layer + 1) % step == 0 and layer not in plain for layer in range(layers))


FAMILY = Family(("Qwen3MoeForCausalLM",), ("qwen3_moe",), _read)
