"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, read_rope
from octavo_models._src.model_config import ModelConfig, MoEConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    moe = MoEConfig(
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 8)),
        experts_per_token=fields.integer("num_experts_per_tok", 2),
        intermediate_size=fields.integer("intermediate_size"),
    )
    # Every layer slides where one does: no file of the family says it layer by layer.
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return base_config(
        fields,
        architecture,
        kv_heads=8,
        eps=1e-5,
        max_len=131072,
        rope=read_rope(fields, theta=1e6),
        windows=() if window is None else (window,) * fields.integer("num_hidden_layers"),
        moe=moe,
    )


_RENAMES = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w2.", ".down_proj."), (".w3.", ".up_proj."))

FAMILY = Family(("MixtralForCausalLM",), ("mixtral",), _read, _RENAMES)
