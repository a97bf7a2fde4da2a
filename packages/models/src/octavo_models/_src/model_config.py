"""What a model of the Llama family is, whatever file described it.

Knows the numbers; knows neither file formats nor jax.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

RopeKind = Literal["default", "linear", "llama3"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling.

    Attributes:
        theta: Base of the frequencies.
        kind: `default`: unscaled; `linear`: positions divided by `factor`; `llama3`: Llama 3.1's frequency ramp.
        factor: Stretch of `linear` and `llama3`.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: Of `llama3` only.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama-family decoder.

    Attributes:
        architecture: Hugging Face's class name; a GGUF of architecture `llama` counts as `LlamaForCausalLM`.
        vocab_size: Rows of the embedding.
        max_position_embeddings: Longest context the model was made for, in tokens.
        attention_bias: q, k, v and o projections have a bias.
        mlp_bias: gate, up and down projections have a bias.
        dtype: NumPy-style name the weights are meant to be used in: `float32`, `float16` or `bfloat16`.
        has_rope_freqs: The GGUF tensor `rope_freqs.weight` (one divisor per unscaled frequency) replaces `rope`'s scaling.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Literal["silu"] = "silu"
    rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    has_rope_freqs: bool = False


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How the checkpoint asks to be sampled and where it ends.

    Attributes:
        eos_token_ids: Tokens that end a sequence, in the checkpoint's order.
        sampling_defaults: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, as far as the checkpoint sets them.
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    sampling_defaults: dict[str, float | int] = dataclasses.field(default_factory=dict)
