"""Building blocks shared by decoder-only families: a linear map, RMSNorm, an embedding.

Knows dtypes and precision; knows no family, no checkpoint and no KV.

Weights lie `[out, in]` and are contracted on dimension 1: on CPU the other order costs up to ten times as much at few rows. Dots
accumulate in float32 and return float32; whoever calls casts, so that the cast fuses with what follows.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

FEW_ROWS = 32

Parts = tuple[tuple[str, int], ...]
"""The tensors of a checkpoint that make up a parameter, top to bottom: name, and rows of the parameter."""


def dot_out_in(x: Float[Array, "tokens inner"], weight: Float[Array, "outer inner"]) -> Float32[Array, "tokens outer"]:
    """`x @ weight.T` with float32 accumulation; float32 operands are multiplied as true float32 on every platform.

    At few rows a float32 weight goes first and the small result is turned: on CPU a matrix product with few columns is up to 1.8
    times as fast as one with few rows (measured at 2 to 32 rows; above, and in bfloat16, it is not). The barrier keeps XLA from
    undoing it.
    """
    if weight.dtype != jnp.float32:
        return lax.dot_general(x.astype(weight.dtype), weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    wide, contract, exact = x.astype(jnp.float32), (((1,), (1,)), ((), ())), lax.Precision.HIGHEST
    if len(x) <= FEW_ROWS:
        return lax.optimization_barrier(lax.dot_general(weight, wide, contract, precision=exact)).T
    return lax.dot_general(wide, weight, contract, precision=exact)


def dot_out_in_split(x: Float[Array, "tokens inner"], weight: Float[Array, "outer inner"]) -> Float32[Array, "tokens outer"]:
    """`dot_out_in` without rounding `x` to a bfloat16 weight's dtype: what rounding would lose goes in as extra rows of the same dot.

    Cost: twice the rows. At few rows that is hidden by reading the weight.
    """
    if weight.dtype != jnp.bfloat16:
        return dot_out_in(x, weight)
    wide = x.astype(jnp.float32)
    # Not a cast to bfloat16 and back: XLA may drop such a pair, and with it the difference.
    high = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    both = dot_out_in(jnp.concatenate([high, wide - high]), weight)
    return both[: x.shape[0]] + both[x.shape[0] :]


class Linear(nnx.Module):
    """`y = W x + b`, W stored `[out, in]`.

    Attributes:
        weight: `[out, in]`, in the model's dtype.
        bias: `[out]`, or None.
        split: Use `dot_out_in_split`.
    """

    def __init__(self, num_in: int, num_out: int, *, bias: bool, dtype: jax.typing.DTypeLike, split: bool = False) -> None:
        """Zeros of the right shape; a loader or a test fills them."""
        self.split, self.num_out = split, num_out
        self.weight = nnx.Param(jnp.zeros((num_out, num_in), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "tokens inner"]) -> Float32[Array, "tokens outer"]:
        """Rounds `x` to the weight's dtype first, unless it is split."""
        y = (dot_out_in_split if self.split else dot_out_in)(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)

    def weight_parts(self, prefix: str, parts: Parts) -> Iterator[tuple[nnx.Param, Parts]]:
        """Weight and bias of projections stacked in this one; `parts` names each without its ending."""
        yield self.weight, tuple((f"{prefix}{name}.weight", rows) for name, rows in parts)
        if self.bias is not None:
            yield self.bias, tuple((f"{prefix}{name}.bias", rows) for name, rows in parts)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation in float32, with a learned scale (arXiv 1910.07467).

    Attributes:
        scale: `[hidden]`, in the model's dtype; `offset` is added to it.
    """

    def __init__(self, size: int, *, eps: float, dtype: jax.typing.DTypeLike, offset: float = 0.0) -> None:
        """Scale one."""
        self.eps, self.offset = eps, offset
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "*tokens hidden"]) -> Float32[Array, "*tokens hidden"]:
        """The result is not rounded."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = self.scale[...].astype(jnp.float32)
        return wide * lax.rsqrt(mean_square + self.eps) * (scale + self.offset if self.offset else scale)

    def weight_parts(self, name: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """The scale; `name` is the norm's, without its ending."""
        yield self.scale, ((name + ".weight", self.scale.shape[0]),)


class Embedding(nnx.Module):
    """A table of token vectors, which can also score them: a tied head is the same array.

    Attributes:
        weight: `[vocab, hidden]`, in the model's dtype.
    """

    def __init__(self, vocab_size: int, size: int, *, dtype: jax.typing.DTypeLike) -> None:
        """Zeros of the right shape."""
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype))

    def __call__(self, token_ids: Int32[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """Ids outside the vocabulary are clipped: pads may hold anything."""
        return self.weight[...].at[token_ids].get(mode="clip")

    def score(self, hidden: Float[Array, "rows hidden"]) -> Float32[Array, "rows vocab"]:
        """Dot product with every token vector."""
        return dot_out_in(hidden, self.weight[...])
