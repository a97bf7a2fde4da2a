"""A decoder-only model, assembled from the parts that its configuration names.

Knows the order of norms, attention and MLP, and which layers' KV is kept together. Does not know where KV lives, how tokens are batched or
which attention runs: all of that is behind the callable it is given. Tokens lie on one flat axis; there is no batch axis.

Arithmetic: weights, K and V have the model's dtype. Dots accumulate in float32; the residual stream, norms, Q, RoPE and the activation
are float32 in every mode. In float32 mode everything is, so results equal a float32 reference up to summation order. In bfloat16
the inputs of the MLP's dots and of the head are rounded; those of the attention projections are not (see `dot_out_in_split`): a
quarter of the weights, half of the rounding noise in the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from octavo_core.specs import KVGroupSpec
from octavo_models._src.attention import Attention
from octavo_models._src.latent_attention import LatentAttention
from octavo_models._src.layers import Embedding, Linear, Parts, RMSNorm
from octavo_models._src.mlp import GatedMLP
from octavo_models._src.model_config import ModelConfig, RopeConfig
from octavo_models._src.moe import MoE
from octavo_models._src.rope import inverse_frequencies, rotation

if TYPE_CHECKING:
    from octavo_core.seams import LayerAttention
else:
    # The seam's protocol cannot be checked at run time, a callable can.
    from collections.abc import Callable as LayerAttention


class Stream(NamedTuple):
    """What flows from layer to layer: the residual stream, and the rotation of each token, the same in every layer.

    `local` is the rotation (cosine, sine) of layers with a window, where they have one of their own.
    """

    residual: Float32[Array, "tokens hidden"]
    cos: Float32[Array, "tokens 1 half"]
    sin: Float32[Array, "tokens 1 half"]
    local: tuple[Array, Array] | None = None


class Block(nnx.Module):
    """One decoder layer.

    Attributes:
        attention_norm, mlp_norm: Before attention and before the MLP.
        attention_post_norm, mlp_post_norm: After them, where the family has such norms.
        is_local: Rotates by the stream's `local`.
    """

    def __init__(self, config: ModelConfig, layer: int, *, dtype: jax.typing.DTypeLike) -> None:
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, offset=config.norm_offset)

        self.is_local = config.local_rope is not None and config.window(layer) is not None
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.attention: Attention | LatentAttention
        if config.latent is None:
            self.attention = Attention(config, dtype=dtype)
        else:
            self.attention = LatentAttention(config, config.latent, dtype=dtype)
        self.mlp: GatedMLP | MoE
        if config.moe is not None and config.has_experts(layer):
            self.mlp = MoE(config, config.moe, dtype=dtype)
        else:
            width, act = config.intermediate_size, config.hidden_act
            self.mlp = GatedMLP(config.hidden_size, width, act=act, bias=config.mlp_bias, dtype=dtype)

    def __call__(self, kv: Any, stream: Stream, attention: LayerAttention) -> tuple[Any, Stream]:
        """The layer's KV and the stream after it."""
        cos, sin = stream.local if self.is_local and stream.local is not None else (stream.cos, stream.sin)
        kv, update = self.attention(kv, self.attention_norm(stream.residual), cos, sin, attention)
        residual = stream.residual + (update if self.attention_post_norm is None else self.attention_post_norm(update))
        update = self.mlp(self.mlp_norm(residual))
        residual = residual + (update if self.mlp_post_norm is None else self.mlp_post_norm(update))
        return kv, stream._replace(residual=residual)

    def weight_parts(self, prefix: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """Parameters and the tensors they are made of, see `Decoder.weight_parts`."""
        yield from self.attention_norm.weight_parts(prefix + "input_layernorm")
        before_mlp = "post_attention_layernorm"
        if self.attention_post_norm is not None and self.mlp_post_norm is not None:
            yield from self.attention_post_norm.weight_parts(prefix + "post_attention_layernorm")
            yield from self.mlp_post_norm.weight_parts(prefix + "post_feedforward_layernorm")
            before_mlp = "pre_feedforward_layernorm"
        yield from self.mlp_norm.weight_parts(prefix + before_mlp)
        yield from self.attention.weight_parts(prefix + "self_attn.")
        yield from self.mlp.weight_parts(prefix + "mlp.")


class Decoder(nnx.Module):
    """A model of any family served; implements `octavo_core.seams.Model`.

    Every layer is a module of its own: a scan over stacked weights would copy each layer's slice in every step.

    Attributes:
        config: What it was built from.
        dtype: Of weights and dot operands.
        embed: Token vectors, and the head where `config.tie_word_embeddings`.
        head: `[vocab, hidden]`, or None where tied.
        kv_heads: Stored for each token: the model's KV heads, or one for each of so many devices, whichever is more.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jax.typing.DTypeLike,
        rope_divisors: Sequence[float] | None = None,
        make_layer: Callable[..., Any] | None = None,
    ) -> None:
        """Weights are zeros; `load_model` fills them.

        Args:
            config: Sizes and switches.
            dtype: Of weights and dot operands: float32 or bfloat16.
            rope_divisors: A checkpoint's own divisor of each rotary frequency; replaces the scaling in `config.rope`.
            make_layer: Makes another layer than a `Block` of the same arguments, to be called as one; its `weight_parts(prefix)` says what
                it is filled with.
        """
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.kv_heads = config.num_kv_heads
        turning = config.head_dim if config.latent is None else config.latent.rope_dim
        self.frequencies = inverse_frequencies(config.rope, turning, rope_divisors)
        local = config.local_rope
        self.local_frequencies = None if local is None else inverse_frequencies(local, turning)
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.blocks = nnx.List([(make_layer or Block)(config, layer, dtype=dtype) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, offset=config.norm_offset)
        tied = config.tie_word_embeddings
        self.head = None if tied else Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)

    def kv_groups(self, *, block_size: int, dtype: str) -> tuple[KVGroupSpec, ...]:
        """A group for each way of looking back, full attention first."""
        config = self.config
        layers_of: dict[int | None, list[int]] = {}
        for layer in range(config.num_layers):
            layers_of.setdefault(config.window(layer), []).append(layer)
        if config.latent is not None:
            size = config.latent.kv_rank + config.latent.rope_dim
            scale = (config.latent.nope_dim + config.latent.rope_dim) ** -0.5
            scale = scale if config.attention_scale is None else config.attention_scale
            return (KVGroupSpec("latent", tuple(range(config.num_layers)), 1, size, dtype, block_size, scale=scale),)
        return tuple(
            KVGroupSpec(
                "full" if window is None else "window",
                tuple(layers),
                self.kv_heads,
                config.head_dim,
                dtype,
                block_size,
                window=window,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                sinks=config.sinks,
            )
            for window, layers in sorted(layers_of.items(), key=lambda item: item[0] or 0)
        )

    def begin(self, token_ids: Int32[Array, " tokens"], positions: Int32[Array, " tokens"]) -> Stream:
        """The stream that enters the first layer. On CPU give it at least 8 tokens (pad): fewer are slower."""
        cos, sin = _rotation(positions, self.frequencies, self.config.rope)
        local = None
        if self.config.local_rope is not None and self.local_frequencies is not None:
            local = _rotation(positions, self.local_frequencies, self.config.local_rope)
        residual = self.embed(token_ids).astype(jnp.float32)
        if self.config.embed_scale != 1.0:
            residual = residual * jnp.asarray(self.config.embed_scale, self.dtype).astype(jnp.float32)
        return Stream(residual, cos, sin, local)

    def layers(self) -> Sequence[Any]:
        """The decoder layers: `Block`s, or what a packer has put in their place."""
        return list(self.blocks)

    def hidden(self, stream: Stream) -> Float[Array, "tokens hidden"]:
        """Final hidden states after the last norm, in the model's dtype."""
        return self.norm(stream.residual).astype(self.dtype)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float32[Array, "rows vocab"]:
        """Scores of the next token."""
        scores = self.embed.score(hidden) if self.head is None else self.head(hidden)
        cap = self.config.logit_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def weight_parts(self) -> Iterator[tuple[nnx.Param, Parts]]:
        """Every parameter with the Hugging Face tensors that it is made of: name and rows, top to bottom.

        Rows are those of the parameter seen as a matrix, all its axes but the last together.
        """
        yield self.embed.weight, (("model.embed_tokens.weight", self.config.vocab_size),)
        for i, block in enumerate(self.blocks):
            yield from block.weight_parts(f"model.layers.{i}.")
        yield from self.norm.weight_parts("model.norm")
        if self.head is not None:
            yield self.head.weight, (("lm_head.weight", self.config.vocab_size),)


def _rotation(positions: Int32[Array, " tokens"], frequencies: tuple[float, ...], rope: RopeConfig) -> tuple[Array, Array]:
    return rotation(positions, frequencies, rope.attention_factor)
