"""gpt-oss: attention with sinks, sliding and full layers in turn, biased experts with clamped inputs."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, layer_windows, read_rope
from octavo_models._src.model_config import ModelConfig, MoEConfig

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a file that does not mention rotary scaling, or says null in the new key. Null in the old one says that there is none."""


def _read(fields: Fields, architecture: str) -> ModelConfig:
    if not fields.has("rope_parameters") and "rope_scaling" not in fields.values:
        fields = Fields({**fields.values, "rope_scaling": _YARN}, fields.source)
    layers = fields.integer("num_hidden_layers")
    moe = MoEConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        experts_per_token=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        intermediate_size=fields.integer("intermediate_size"),
        bias=True,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
    )
    return base_config(
        fields,
        architecture,
        kv_heads=8,
        head_dim=64,
        eps=1e-5,
        max_len=131072,
        attention_bias=fields.boolean("attention_bias", True),
        rope=read_rope(fields, theta=150000.0),
        windows=layer_windows(fields, layers, fields.integer("sliding_window", 128), [layer % 2 == 0 for layer in range(layers)]),
        sinks=True,
        moe=moe,
    )


FAMILY = Family(("GptOssForCausalLM",), ("gpt_oss",), _read, ((".mlp.router.", ".mlp.gate."),))
