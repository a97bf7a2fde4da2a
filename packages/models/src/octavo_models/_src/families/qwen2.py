"""Qwen2 and Qwen2.5: Llama's block with biases on Q, K and V; the upper layers may look back a window only."""

from __future__ import annotations

from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields
from octavo_models._src.hf_config import base_config, layer_windows
from octavo_models._src.model_config import ModelConfig


def sliding_above(fields: Fields) -> tuple[int | None, ...]:
    """Layers from `max_window_layers` on slide, where `use_sliding_window` says that any do."""
    window = None
    if fields.boolean("use_sliding_window", False) and (fields.has("sliding_window") or "sliding_window" not in fields.values):
        window = fields.integer("sliding_window", 4096)
    layers, first = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", 28, least=0)
    return layer_windows(fields, layers, window, [layer >= first for layer in range(layers)])


def _read(fields: Fields, architecture: str) -> ModelConfig:
    return base_config(fields, architecture, max_len=32768, attention_bias=True, output_bias=False, windows=sliding_above(fields))


FAMILY = Family(("Qwen2ForCausalLM",), ("qwen2",), _read)
