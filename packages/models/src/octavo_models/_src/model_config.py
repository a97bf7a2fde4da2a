"""What a decoder-only model is, whatever file described it.

Knows the numbers and switches of every family served; knows neither file formats nor jax. A family is a choice among these, made by
its file in `families`.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from octavo_models._src.quantisation import QuantisationConfig

RopeKind = Literal["default", "linear", "dynamic", "proportional", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
}
"""Hugging Face's names of the activations served."""


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling.

    Attributes:
        theta: Base of the frequencies.
        kind: `default`: unscaled; `linear`: positions divided by `factor`; `dynamic`: unscaled up to the length the model was made
            for; `proportional`: only the first pairs turn; `llama3`: Llama 3.1's frequency ramp; `yarn`: the ramp of arXiv 2309.00071;
            `longrope`: a divisor for each frequency (arXiv 2402.13753), up to the length before stretching.
        factor: Stretch of all but `default` and `longrope`.
        share: Of the pairs, those that turn; of `proportional` only.
        low_freq_factor, high_freq_factor: Of `llama3` only.
        original_max_position_embeddings: Length before stretching, of `llama3`, `yarn` and `longrope`.
        beta_fast, beta_slow, truncate: Turns between which `yarn` blends, and whether the ramp's ends are whole pairs.
        attention_factor: What cosine and sine are multiplied by.
        divisors: Of `longrope` only, one a pair.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    share: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434): K and V of all heads are linear in one stored vector.

    Attributes:
        q_rank: Of the factored query projection; None: it is not factored.
        kv_rank: Size of the latent.
        nope_dim, rope_dim, v_dim: Of each head: elements of Q and K without and with rotation, and of V.
        interleaved: Rotated pairs are neighbours (2i, 2i+1).
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    interleaved: bool


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts, experts_per_token, intermediate_size: Experts, how many a token gets, and the width of each.
        scoring: `softmax` over all experts, or a `sigmoid` each with a correction that only takes part in choosing.
        normalise: The chosen experts' weights are made to sum to 1.
        scale: What the weights are multiplied by in the end.
        num_groups, groups_per_token: Experts are chosen from the best groups only; 1 and 1: from all.
        shared_size: Width of the experts that every token gets, together; 0: none.
        bias: The router and the experts have biases.
        swiglu_alpha, swiglu_limit: Experts compute `(up + 1) · gate · sigmoid(alpha · gate)` of clamped inputs; None: the usual way.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0
    bias: bool = False
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder.

    Attributes:
        architecture: Hugging Face's class name; a GGUF of architecture `llama` counts as `LlamaForCausalLM`.
        vocab_size: Rows of the embedding.
        max_position_embeddings: Longest context the model was made for, in tokens.
        attention_bias: q, k and v projections have a bias; `output_bias` says it of o (None: the same).
        mlp_bias: gate, up and down projections have a bias.
        dtype: NumPy-style name the weights are meant to be used in: `float32`, `float16` or `bfloat16`.
        has_rope_freqs: The GGUF tensor `rope_freqs.weight` (one divisor per unscaled frequency) replaces `rope`'s scaling.
        windows: Tokens each layer looks back, the current one included, None for all; empty: every layer sees all.
        local_rope: Of layers with a window, where it differs from `rope`.
        qk_norm: Q and K of each head are normalised before rotation.
        norm_offset: Added to the scale of every norm.
        post_norms: What attention and the MLP give is normalised before it is added.
        embed_scale: What embeddings are multiplied by.
        attention_scale: What scores are multiplied by; None: `head_dim ** -0.5`.
        attention_softcap, logit_softcap: `cap * tanh(x / cap)` of attention scores and of the final logits.
        sinks: Attention has a score per head that takes weight and gives nothing.
        latent: Attention is of this kind instead.
        moe: Layers named in `moe_layers` (empty: all) have experts instead of an MLP.
        quantisation: How safetensors files keep the weights.
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
    hidden_act: Activation = "silu"
    rope: RopeConfig = RopeConfig()
    dtype: str = "float32"
    has_rope_freqs: bool = False
    output_bias: bool | None = None
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    qk_norm: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    latent: LatentConfig | None = None
    moe: MoEConfig | None = None
    moe_layers: tuple[bool, ...] = ()
    quantisation: QuantisationConfig | None = None

    def window(self, layer: int) -> int | None:
        """Tokens a layer looks back; None: all."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """The layer's MLP is a mixture of experts."""
        return self.moe is not None and (self.moe_layers[layer] if self.moe_layers else True)


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
