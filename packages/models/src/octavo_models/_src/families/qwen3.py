"""Qwen3: Q and K of each head are normalised; no biases unless the file says so."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.families.qwen2 import sliding_above
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config
from octavo_models._src.model_config import ModelConfig


def _read(fields: Fields, architecture: str) -> ModelConfig:
    return base_config(
        fields,
        architecture,
        head_dim=128,
        max_len=32768,
        attention_bias=fields.boolean("attention_bias", False),
        qk_norm=True,
        windows=sliding_above(fields),
    )


FAMILY = Family(("Qwen3ForCausalLM",), ("qwen3",), _read)
