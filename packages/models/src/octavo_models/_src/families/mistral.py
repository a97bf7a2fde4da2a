"""Mistral: Llama's block, in which every layer may look back a window only."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, layer_windows
from octavo_models._src.model_config import ModelConfig

_WINDOW = 4096
"""Of a file that does not mention `sliding_window`; null there means none."""


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """The window of every layer, which `sliding_window` alone decides unless the file has `layer_types`."""
    silent = "sliding_window" not in fields.values
    window = fields.integer("sliding_window", _WINDOW) if silent or fields.has("sliding_window") else None
    layers = fields.integer("num_hidden_layers")
    return layer_windows(fields, layers, window, [True] * layers)


def _read(fields: Fields, architecture: str) -> ModelConfig:
    return base_config(fields, architecture, kv_heads=8, max_len=131072, windows=_windows(fields))


FAMILY = Family(("MistralForCausalLM",), ("mistral",), _read)
