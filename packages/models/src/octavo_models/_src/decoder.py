"""The Llama family: pre-norm decoder blocks with grouped-query attention, RoPE and a gated MLP.

Knows the arithmetic of the family and the shape of its weights. Does not know where KV lives, how tokens are batched or which
attention runs: all of that is behind the callable it is given. Tokens lie on one flat axis; there is no batch axis.

Arithmetic: weights, K and V have the model's dtype. Dots accumulate in float32; the residual stream, norms, Q, RoPE and the activation
are float32 in every mode. In float32 mode everything is, so results equal a float32 reference up to summation order. In bfloat16
the inputs of the MLP's dots and of the head are rounded; those of the attention projections are not (see `dot_out_in_split`): a
quarter of the weights, half of the rounding noise in the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from octavo_core.specs import KVGroupSpec
from octavo_models._src.layers import Embedding, Linear, RMSNorm
from octavo_models._src.model_config import ModelConfig
from octavo_models._src.rope import inverse_frequencies, rotate, rotation

if TYPE_CHECKING:
    from octavo_core.seams import LayerAttention
else:
    # The seam's protocol cannot be checked at run time, a callable can.
    from collections.abc import Callable as LayerAttention


class Stream(NamedTuple):
    """What flows from layer to layer: the residual stream, and the rotation of each token, the same in every layer."""

    residual: Float32[Array, "tokens hidden"]
    cos: Float32[Array, "tokens 1 half"]
    sin: Float32[Array, "tokens 1 half"]


class Attention(nnx.Module):
    """Grouped-query attention around the seam: project, rotate, attend, project back.

    Attributes:
        qkv: Q, K and V in one dot, `[(q_heads + 2 kv_heads) · head_dim, hidden]`, in that order.
        out: `[hidden, q_heads · head_dim]`.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        wide = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        options: dict[str, Any] = {"bias": config.attention_bias, "dtype": dtype, "split": True}
        self.dtype = jnp.dtype(dtype)
        self.qkv = Linear(config.hidden_size, wide, **options)
        self.out = Linear(config.num_heads * config.head_dim, config.hidden_size, **options)

    def __call__(
        self, kv: Any, x: Float32[Array, "tokens hidden"], stream: Stream, attention: LayerAttention
    ) -> tuple[Any, Float32[Array, "tokens hidden"]]:
        """`x` is the normalised residual; the KV comes back changed."""
        rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv(x).reshape(x.shape[0], rotated + self.num_kv_heads, self.head_dim)
        qk = rotate(heads[:, :rotated], stream.cos, stream.sin)
        k, v = qk[:, self.num_heads :].astype(self.dtype), heads[:, rotated:].astype(self.dtype)
        kv, attended = attention(kv, qk[:, : self.num_heads], k, v)
        return kv, self.out(attended.reshape(x.shape[0], self.num_heads * self.head_dim))


class GatedMLP(nnx.Module):
    """`down(silu(gate(x)) · up(x))` (arXiv 2002.05202), gate and up in one dot.

    Attributes:
        gate_up: `[2 ffn, hidden]`, gate first.
        down: `[hidden, ffn]`.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, x: Float32[Array, "tokens hidden"]) -> Float32[Array, "tokens hidden"]:
        """`x` is normalised."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """One decoder layer.

    Attributes:
        attention_norm, mlp_norm: Before attention and before the MLP.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype)

    def __call__(self, kv: Any, stream: Stream, attention: LayerAttention) -> tuple[Any, Stream]:
        """The layer's KV and the stream after it."""
        kv, update = self.attention(kv, self.attention_norm(stream.residual), stream, attention)
        residual = stream.residual + update
        return kv, stream._replace(residual=residual + self.mlp(self.mlp_norm(residual)))


class Llama(nnx.Module):
    """A Llama-family model; implements `octavo_core.seams.Model`.

    Every layer is a module of its own: a scan over stacked weights would copy each layer's slice in every step.

    Attributes:
        config: What it was built from.
        dtype: Of weights and dot operands.
        embed: Token vectors, and the head where `config.tie_word_embeddings`.
        head: `[vocab, hidden]`, or None where tied.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike, rope_divisors: Sequence[float] | None = None) -> None:
        """Weights are zeros; `load_model` fills them.

        Args:
            config: Sizes and switches.
            dtype: Of weights and dot operands: float32 or bfloat16.
            rope_divisors: A checkpoint's own divisor of each rotary frequency; replaces the scaling in `config.rope`.
        """
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.frequencies = inverse_frequencies(config.rope, config.head_dim, rope_divisors)
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.blocks = nnx.List([Block(config, dtype=dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def kv_groups(self, *, block_size: int, dtype: str) -> tuple[KVGroupSpec, ...]:
        """One group: full attention in every layer."""
        layers = tuple(range(self.config.num_layers))
        return (KVGroupSpec("full", layers, self.config.num_kv_heads, self.config.head_dim, dtype, block_size),)

    def begin(self, token_ids: Int32[Array, " tokens"], positions: Int32[Array, " tokens"]) -> Stream:
        """The stream that enters the first layer. On CPU give it at least 8 tokens (pad): fewer are slower."""
        cos, sin = rotation(positions, self.frequencies)
        return Stream(self.embed(token_ids).astype(jnp.float32), cos, sin)

    def layers(self) -> Sequence[Block]:
        """The decoder layers."""
        return list(self.blocks)

    def hidden(self, stream: Stream) -> Float[Array, "tokens hidden"]:
        """Final hidden states after the last norm, in the model's dtype."""
        return self.norm(stream.residual).astype(self.dtype)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float32[Array, "rows vocab"]:
        """Scores of the next token."""
        return self.embed.score(hidden) if self.head is None else self.head(hidden)

    def weight_parts(self) -> Iterator[tuple[nnx.Param, tuple[tuple[str, int], ...]]]:
        """Every parameter with the Hugging Face tensors that it is made of: name and length along the first axis, top to bottom."""
        yield self.embed.weight, (("model.embed_tokens.weight", self.config.vocab_size),)
        for i, block in enumerate(self.blocks):
            yield from _block_parts(block, f"model.layers.{i}.", self.config)
        yield self.norm.scale, (("model.norm.weight", self.config.hidden_size),)
        if self.head is not None:
            yield self.head.weight, (("lm_head.weight", self.config.vocab_size),)


def _block_parts(block: Block, prefix: str, config: ModelConfig) -> Iterator[tuple[nnx.Param, tuple[tuple[str, int], ...]]]:
    q, kv, hidden, ffn = (
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    yield block.attention_norm.scale, ((prefix + "input_layernorm.weight", hidden),)
    yield block.mlp_norm.scale, ((prefix + "post_attention_layernorm.weight", hidden),)
    yield from _linear_parts(block.attention.qkv, prefix + "self_attn.", (("q_proj", q), ("k_proj", kv), ("v_proj", kv)))
    yield from _linear_parts(block.attention.out, prefix + "self_attn.", (("o_proj", hidden),))
    yield from _linear_parts(block.mlp.gate_up, prefix + "mlp.", (("gate_proj", ffn), ("up_proj", ffn)))
    yield from _linear_parts(block.mlp.down, prefix + "mlp.", (("down_proj", hidden),))


def _linear_parts(
    linear: Linear, prefix: str, parts: tuple[tuple[str, int], ...]
) -> Iterator[tuple[nnx.Param, tuple[tuple[str, int], ...]]]:
    yield linear.weight, tuple((f"{prefix}{name}.weight", size) for name, size in parts)
    if linear.bias is not None:
        yield linear.bias, tuple((f"{prefix}{name}.bias", size) for name, size in parts)
