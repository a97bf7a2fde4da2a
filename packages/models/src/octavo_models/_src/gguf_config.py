"""The model a GGUF header describes: llama.cpp's architectures as choices among Octavo's parts.

Knows each architecture's keys and what llama.cpp takes for granted where a file says nothing. Knows no tensor data.

Source: the GGUF specification of ggml, and the hyperparameters that llama.cpp reads for each architecture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.fields import Fields
from octavo_models._src.gguf_meta import GgufHeader
from octavo_models._src.hf_config import check_heads
from octavo_models._src.model_config import ModelConfig, MoEConfig, RopeConfig

_FILE_TYPES: Final = {0: "float32", 1: "float16"}
_GEMMA_27B_LAYERS: Final = 62


class _Keys:
    """The fields of one architecture, whose keys begin with its name."""

    def __init__(self, header: GgufHeader, name: str) -> None:
        self.header, self.name = header, name
        self.fields = Fields(header.metadata, str(header.path))

    def key(self, key: str) -> str:
        return f"{self.name}.{key}"

    def has(self, key: str) -> bool:
        return self.fields.has(self.key(key))

    def integer(self, key: str, *default: int, **bounds: Any) -> int:
        return self.fields.integer(self.key(key), *default, **bounds)

    def number(self, key: str, *default: float) -> float:
        return self.fields.number(self.key(key), *default)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors


def model_config(header: GgufHeader) -> ModelConfig:
    """The model a GGUF header describes.

    Raises:
        CheckpointError: When a key is missing, ill-typed or contradicts another.
        UnsupportedModelError: When the architecture or one of its options is not served.
    """
    name = Fields(header.metadata, str(header.path)).text("general.architecture")
    if name not in _ARCHITECTURES:
        served = ", ".join(f"'{known}'" for known in _ARCHITECTURES)
        raise UnsupportedModelError(f"{header.path}: architecture '{name}' is not served; this version serves {served}")
    keys = _Keys(header, name)
    config = dataclasses.replace(_base(keys), **_ARCHITECTURES[name](keys))
    names = [
        keys.key(key) for key in ("embedding_length", "attention.head_count", "attention.head_count_kv", "attention.key_length")
    ]
    check_heads(config, keys.fields, names=(names[0], names[1], names[2], names[3]), derived=not keys.has("attention.key_length"))
    if keys.integer("attention.value_length", config.head_dim) != config.head_dim:
        raise UnsupportedModelError(f"{header.path}: '{name}.attention.value_length' other than the key's is not served")
    if keys.integer("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UnsupportedModelError(f"{header.path}: rotating only part of each head ('{name}.rope.dimension_count') is not served")
    return config


def _base(keys: _Keys) -> ModelConfig:
    """What every architecture writes the same way."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    attention_bias, output_bias = (keys.has_tensor(f"blk.0.{name}.bias") for name in ("attn_q", "attn_output"))
    return ModelConfig(
        architecture="",
        vocab_size=_vocab_size(keys),
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=keys.integer("attention.key_length") if keys.has("attention.key_length") else hidden // heads,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings=not keys.has_tensor("output.weight"),
        attention_bias=attention_bias,
        output_bias=None if output_bias == attention_bias else output_bias,
        mlp_bias=keys.has_tensor("blk.0.ffn_gate.bias"),
        rope=_rope(keys),
        dtype=_FILE_TYPES.get(keys.fields.integer("general.file_type", 32, least=0), "bfloat16"),
        has_rope_freqs=keys.has_tensor("rope_freqs.weight"),
    )


def _llama(keys: _Keys) -> dict[str, Any]:
    """Llama and Mistral, which are not told apart, and Mixtral."""
    if not keys.integer("expert_count", 0, least=0):
        return {"architecture": "LlamaForCausalLM"}
    return {"architecture": "MixtralForCausalLM", "moe": _moe(keys, keys.integer("feed_forward_length"))}


def _qwen2(keys: _Keys) -> dict[str, Any]:
    return {"architecture": "Qwen2ForCausalLM"}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    return {"architecture": "Qwen3ForCausalLM", "qk_norm": True}


def _qwen3_moe(keys: _Keys) -> dict[str, Any]:
    moe = _moe(keys, keys.integer("expert_feed_forward_length"))
    return {"architecture": "Qwen3MoeForCausalLM", "qk_norm": True, "moe": moe}


def _gemma3(keys: _Keys) -> dict[str, Any]:
    """Norms are stored with 1 added. Five layers slide, the sixth does not; sliding layers rotate by 10000 and unscaled."""
    layers, hidden, heads = keys.integer("block_count"), keys.integer("embedding_length"), keys.integer("attention.head_count")
    period, window = keys.integer("attention.sliding_window_pattern", 6), keys.integer("attention.sliding_window", 0, least=0)
    head_dim = hidden / heads if layers == _GEMMA_27B_LAYERS else keys.integer("attention.key_length", hidden // heads)
    windows = tuple(None if (layer + 1) % period == 0 else window for layer in range(layers)) if window else ()
    return {
        "architecture": "Gemma3ForCausalLM",
        "hidden_act": "gelu_tanh",
        "rope": _rope(keys, theta=1e6),
        "local_rope": RopeConfig(theta=keys.number("rope.freq_base_swa", 10000.0)),
        "windows": windows,
        "qk_norm": True,
        "post_norms": True,
        "embed_scale": float(hidden) ** 0.5,
        "attention_scale": float(head_dim) ** -0.5,
        "logit_softcap": keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None,
    }


_ARCHITECTURES: Final[dict[str, Callable[[_Keys], dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma3": _gemma3,
}


def _moe(keys: _Keys, width: int) -> MoEConfig:
    experts, used = keys.integer("expert_count"), keys.integer("expert_used_count")
    if used > experts:
        raise keys.fields.fail(keys.key("expert_used_count"), f"at most '{keys.key('expert_count')}' ({experts})")
    return MoEConfig(num_experts=experts, experts_per_token=used, intermediate_size=width)


def _vocab_size(keys: _Keys) -> int:
    """Rows of the embedding, which may be padded beyond the tokenizer's tokens."""
    fields, header = keys.fields, keys.header
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{fields.source}: 'tokenizer.ggml.tokens' must be a list of tokens, got {type(tokens).__name__}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{fields.source}: tensor 'token_embd.weight' with two axes is missing")
    if embedding.shape[1] < len(tokens):
        raise CheckpointError(f"{fields.source}: {len(tokens)} tokens, but 'token_embd.weight' has only {embedding.shape[1]} rows")
    return embedding.shape[1]


def _rope(keys: _Keys, *, theta: float = 10000.0) -> RopeConfig:
    theta = keys.number("rope.freq_base", theta)
    kind = keys.fields.text(keys.key("rope.scaling.type"), "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=keys.number("rope.scaling.factor"))
    raise UnsupportedModelError(f"{keys.header.path}: rope scaling '{kind}' is not served; this version serves none and linear")
