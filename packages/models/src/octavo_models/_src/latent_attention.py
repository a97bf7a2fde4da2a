"""Multi-head latent attention in its absorbed form: every head attends over the stored latents themselves.

K of a head is `up_k · latent` and V is `up_v · latent`, so `q · (up_k latent) = (up_kᵀ q) · latent`: the query is carried into latent space, one
vector for each token serves all heads as key and value, and V's projection is applied to what attention gives. The rotated part of K
is common to all heads and stored beside the latent.

Cost: `heads · (kv_rank + rope_dim)` multiplications for each query and visible token and as many for values, from
`kv_rank + rope_dim` stored elements.

Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1, "absorbed" as its appendix C says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float32

from octavo_models._src.layers import Linear, Parts, RMSNorm
from octavo_models._src.model_config import LatentConfig, ModelConfig
from octavo_models._src.rope import halves_of_pairs, rotate

if TYPE_CHECKING:
    from octavo_core.seams import LayerAttention
else:
    from collections.abc import Callable as LayerAttention

LATENT_EPS = 1e-6
"""Of the norms of the two factored projections, whatever the model's other norms have."""


class LatentAttention(nnx.Module):
    """Attention of one layer over latents.

    Attributes:
        q_down, q_norm: The first half of a factored query projection, or None.
        q: `[heads · (nope_dim + rope_dim), q_rank or hidden]`.
        kv_down: `[kv_rank + rope_dim, hidden]`: the latent, then the shared rotated part of K.
        kv_norm: Of the latent.
        up: `[heads, nope_dim + v_dim, kv_rank]`: of each head K's rows, then V's.
        out: `[hidden, heads · v_dim]`.
    """

    def __init__(self, config: ModelConfig, latent: LatentConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.num_heads, self.latent, self.dtype = config.num_heads, latent, jnp.dtype(dtype)
        hidden, wide = config.hidden_size, config.num_heads * (latent.nope_dim + latent.rope_dim)
        options: dict[str, Any] = {"dtype": dtype, "split": True}
        rank = latent.q_rank
        self.q_down = None if rank is None else Linear(hidden, rank, bias=config.attention_bias, **options)
        self.q_norm = None if rank is None else RMSNorm(rank, eps=LATENT_EPS, dtype=dtype)
        self.q = Linear(rank or hidden, wide, bias=False, **options)
        self.kv_down = Linear(hidden, latent.kv_rank + latent.rope_dim, bias=config.attention_bias, **options)
        self.kv_norm = RMSNorm(latent.kv_rank, eps=LATENT_EPS, dtype=dtype)
        self.up = nnx.Param(jnp.zeros((config.num_heads, latent.nope_dim + latent.v_dim, latent.kv_rank), dtype))
        self.out = Linear(config.num_heads * latent.v_dim, hidden, bias=config.attention_bias, **options)

    def __call__(
        self,
        kv: Any,
        x: Float32[Array, "tokens hidden"],
        cos: Float32[Array, "tokens 1 half"],
        sin: Float32[Array, "tokens 1 half"],
        attention: LayerAttention,
    ) -> tuple[Any, Float32[Array, "tokens hidden"]]:
        """`x` is the normalised residual; the KV comes back changed."""
        tokens, sizes = x.shape[0], self.latent
        q = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q = self.q(q).reshape(tokens, self.num_heads, -1)
        down = self.kv_down(x)
        latent, shared = self.kv_norm(down[:, : sizes.kv_rank]), down[:, None, sizes.kv_rank :]
        inside, turning = q[..., : sizes.nope_dim], q[..., sizes.nope_dim :]
        if sizes.interleaved:
            turning, shared = halves_of_pairs(turning), halves_of_pairs(shared)
        turning, shared = rotate(turning, cos, sin), rotate(shared, cos, sin)
        up = self.up[...]
        q = jnp.concatenate([_per_head("thn,hnr->thr", inside, up[:, : sizes.nope_dim]), turning], axis=-1)
        k = jnp.concatenate([latent[:, None], shared], axis=-1).astype(self.dtype)
        kv, attended = attention(kv, q, k, k)
        values = _per_head("thr,hvr->thv", attended[..., : sizes.kv_rank], up[:, sizes.nope_dim :])
        return kv, self.out(values.reshape(tokens, -1))

    def weight_parts(self, prefix: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """Parameters and the tensors they are made of, see `Decoder.weight_parts`."""
        if self.q_down is not None and self.q_norm is not None:
            yield from self.q_down.weight_parts(prefix, (("q_a_proj", self.q_down.num_out),))
            yield from self.q_norm.weight_parts(prefix + "q_a_layernorm")
        yield from self.q.weight_parts(prefix, (("q_proj" if self.q_down is None else "q_b_proj", self.q.num_out),))
        yield from self.kv_down.weight_parts(prefix, (("kv_a_proj_with_mqa", self.kv_down.num_out),))
        yield from self.kv_norm.weight_parts(prefix + "kv_a_layernorm")
        yield self.up, ((prefix + "kv_b_proj.weight", self.up.shape[0] * self.up.shape[1]),)
        yield from self.out.weight_parts(prefix, (("o_proj", self.out.num_out),))


def _per_head(subscripts: str, x: Float32[Array, "tokens heads inner"], weight: Array) -> Float32[Array, "tokens heads outer"]:
    """A product for each head, with float32 accumulation; `x` is not rounded."""
    exact = lax.Precision.HIGHEST
    return jnp.einsum(subscripts, x.astype(jnp.float32), weight.astype(jnp.float32), precision=exact)
