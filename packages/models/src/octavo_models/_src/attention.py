"""Grouped-query attention around the seam: project, normalise, rotate, attend, project back.

Knows the arithmetic and the shape of the weights. Does not know where KV lives, how tokens are batched or which attention runs: that is
behind the callable it is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from octavo_models._src.layers import Linear, Parts, RMSNorm
from octavo_models._src.model_config import ModelConfig
from octavo_models._src.rope import rotate

if TYPE_CHECKING:
    from octavo_core.seams import LayerAttention
else:
    # The seam's protocol cannot be checked at run time, a callable can.
    from collections.abc import Callable as LayerAttention


class Attention(nnx.Module):
    """Attention of one layer.

    Attributes:
        qkv: Q, K and V in one dot, `[(q_heads + 2 kv_heads) · head_dim, hidden]`: of each of `shards` equal parts of the heads in turn, its Q,
            its K, its V.
        out: `[hidden, q_heads · head_dim]`.
        q_norm, k_norm: Of each head, before rotation; None where the family has none.
        sinks: `[q_heads]` scores beside those of the tokens, or None.
    """

    def __init__(self, config: ModelConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.shards = 1
        wide = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        out_bias = config.attention_bias if config.output_bias is None else config.output_bias
        self.dtype = jnp.dtype(dtype)
        self.qkv = Linear(config.hidden_size, wide, bias=config.attention_bias, dtype=dtype, split=True)
        self.out = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=out_bias, dtype=dtype, split=True)
        norms = [
            RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype, offset=config.norm_offset) if config.qk_norm else None
            for _ in range(2)
        ]
        self.q_norm, self.k_norm = norms
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype)) if config.sinks else None

    def __call__(
        self,
        kv: Any,
        x: Float32[Array, "tokens hidden"],
        cos: Float32[Array, "tokens 1 half"],
        sin: Float32[Array, "tokens 1 half"],
        attention: LayerAttention,
    ) -> tuple[Any, Float32[Array, "tokens hidden"]]:
        """`x` is the normalised residual; the KV comes back changed."""
        q, k, v = self._heads(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        sinks = {} if self.sinks is None else {"sinks": self.sinks[...].astype(jnp.float32)}
        kv, attended = attention(kv, q, k.astype(self.dtype), v.astype(self.dtype), **sinks)
        return kv, self.out(attended.reshape(x.shape[0], self.num_heads * self.head_dim))

    def _heads(self, x: Float32[Array, "tokens hidden"]) -> tuple[Float32[Array, "tokens heads head_dim"], ...]:
        """Q, K and V."""
        tokens, q_heads, kv_heads = x.shape[0], self.num_heads // self.shards, self.num_kv_heads // self.shards
        heads = self.qkv(x).reshape(tokens, self.shards, q_heads + 2 * kv_heads, self.head_dim)
        ends = (0, q_heads, q_heads + kv_heads, q_heads + 2 * kv_heads)
        return tuple(heads[:, :, a:b].reshape(tokens, -1, self.head_dim) for a, b in itertools.pairwise(ends))

    def weight_parts(self, prefix: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """Parameters and the tensors they are made of, see `Decoder.weight_parts`."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from self.qkv.weight_parts(prefix, (("q_proj", q), ("k_proj", kv), ("v_proj", kv)))
        yield from self.out.weight_parts(prefix, (("o_proj", self.out.num_out),))
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from norm.weight_parts(prefix + name)
        if self.sinks is not None:
            yield self.sinks, ((prefix + "sinks", self.num_heads),)
