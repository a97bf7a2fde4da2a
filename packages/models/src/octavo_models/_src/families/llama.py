"""Llama 1 to 3.3, and whatever else calls itself `LlamaForCausalLM`."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config
from octavo_models._src.model_config import ModelConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    return base_config(
        fields,
        architecture,
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


FAMILY = Family(("LlamaForCausalLM",), ("llama",), _read)
