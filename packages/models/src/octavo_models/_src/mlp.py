"""The gated MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from octavo_models._src.layers import Linear, Parts
from octavo_models._src.model_config import Activation

ACTIVATE: Final[dict[Activation, Callable[[Array], Array]]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) · up(x))` (arXiv 2002.05202), gate and up in one dot.

    Attributes:
        gate_up: `[2 ffn, hidden]`: of each of `shards` equal parts of the width in turn, its gate, its up.
        down: `[hidden, ffn]`.
    """

    def __init__(self, hidden: int, width: int, *, act: Activation, bias: bool, dtype: jax.typing.DTypeLike) -> None:
        self.act, self.shards = act, 1
        self.gate_up = Linear(hidden, 2 * width, bias=bias, dtype=dtype)
        self.down = Linear(width, hidden, bias=bias, dtype=dtype)

    def __call__(self, x: Float32[Array, "tokens hidden"]) -> Float32[Array, "tokens hidden"]:
        """`x` is normalised."""
        gate, up = split_gate_up(self.gate_up(x), self.shards)
        return self.down(ACTIVATE[self.act](gate) * up)

    def weight_parts(self, prefix: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """Parameters and the tensors they are made of, see `Decoder.weight_parts`."""
        width = self.gate_up.num_out // 2
        yield from self.gate_up.weight_parts(prefix, (("gate_proj", width), ("up_proj", width)))
        yield from self.down.weight_parts(prefix, (("down_proj", self.down.num_out),))


def split_gate_up(
    y: Float32[Array, "tokens twice"], shards: int
) -> tuple[Float32[Array, "tokens ffn"], Float32[Array, "tokens ffn"]]:
    """Gate and up of what was computed in one dot."""
    if shards == 1:
        gate, up = jnp.split(y, 2, axis=-1)
        return gate, up
    both = y.reshape(y.shape[0], shards, 2, -1)
    return both[:, :, 0].reshape(y.shape[0], -1), both[:, :, 1].reshape(y.shape[0], -1)
