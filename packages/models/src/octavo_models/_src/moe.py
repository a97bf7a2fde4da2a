"""A mixture of experts: which experts a token gets, and computing no others.

Knows routing and grouping by expert; knows no family. Tokens are sorted by expert and go through in tiles of one expert each, by a loop
whose trip count is data: work follows the experts that are asked, whatever the shape was compiled for.

Source: Switch and Mixtral's top-k softmax (arXiv 2401.04088); DeepSeek-V3's sigmoid scores, correction and groups (arXiv 2412.19437,
section 2.1.2: outside the best groups nothing is chosen, even where the corrected scores inside are negative).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, Int32

from octavo_models._src.layers import Linear, Parts, dot_out_in
from octavo_models._src.mlp import ACTIVATE, GatedMLP, split_gate_up
from octavo_models._src.model_config import ModelConfig, MoEConfig

TILE_ROWS = (8, 128)
"""Fewest and most tokens of one expert computed at once."""


class Choice(NamedTuple):
    """The experts of each token and how much each counts."""

    experts: Int32[Array, "tokens chosen"]
    weights: Float32[Array, "tokens chosen"]


def choose(scores: Float32[Array, "tokens experts"], correction: Float32[Array, " experts"] | None, moe: MoEConfig) -> Choice:
    """Route by the router's raw scores."""
    if moe.scoring == "softmax":
        likely = jax.nn.softmax(scores, axis=-1)
        weights, experts = lax.top_k(likely, moe.experts_per_token)
    else:
        likely = jax.nn.sigmoid(scores)
        wanted = likely if correction is None else likely + correction
        if moe.num_groups > 1:
            wanted = _in_best_groups(wanted, moe)
        _, experts = lax.top_k(wanted, moe.experts_per_token)
        weights = jnp.take_along_axis(likely, experts, axis=-1)
    if moe.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return Choice(experts.astype(jnp.int32), weights * moe.scale)


def _in_best_groups(wanted: Float32[Array, "tokens experts"], moe: MoEConfig) -> Float32[Array, "tokens experts"]:
    """−∞ outside the groups whose two best experts add up to most."""
    grouped = wanted.reshape(len(wanted), moe.num_groups, -1)
    merit = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
    _, best = lax.top_k(merit, moe.groups_per_token)
    inside = jnp.any(best[:, None, :] == jnp.arange(moe.num_groups)[:, None], axis=-1)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(wanted.shape)


class MoE(nnx.Module):
    """Routed experts, and shared ones where the family has them.

    Attributes:
        router: `[experts, hidden]`.
        correction: `[experts]` float32, added to sigmoid scores for choosing; None for softmax.
        expert_gate_up, expert_gate_up_bias: `[experts, 2 ffn, hidden]` and `[experts, 2 ffn]`, arranged as in `GatedMLP`.
        expert_down, expert_down_bias: `[experts, hidden, ffn]` and `[experts, hidden]`.
        shared: What every token gets.
        mesh: Devices among which whole experts are divided along its only axis; None: they are not.
    """

    def __init__(self, config: ModelConfig, moe: MoEConfig, *, dtype: jax.typing.DTypeLike) -> None:
        self.moe, self.act, self.shards = moe, config.hidden_act, 1
        self.mesh: Mesh | None = None
        experts, hidden, width = moe.num_experts, config.hidden_size, moe.intermediate_size
        self.router = Linear(hidden, experts, bias=moe.bias, dtype=dtype, split=True)
        self.correction = nnx.Param(jnp.zeros((experts,), jnp.float32)) if moe.scoring == "sigmoid" else None
        self.expert_gate_up = nnx.Param(jnp.zeros((experts, 2 * width, hidden), dtype))
        self.expert_down = nnx.Param(jnp.zeros((experts, hidden, width), dtype))
        self.expert_gate_up_bias = nnx.Param(jnp.zeros((experts, 2 * width), dtype)) if moe.bias else None
        self.expert_down_bias = nnx.Param(jnp.zeros((experts, hidden), dtype)) if moe.bias else None
        shared = moe.shared_size
        self.shared = GatedMLP(hidden, shared, act=config.hidden_act, bias=False, dtype=dtype) if shared else None

    def __call__(self, x: Float32[Array, "tokens hidden"]) -> Float32[Array, "tokens hidden"]:
        """`x` is normalised."""
        choice = choose(self.router(x), None if self.correction is None else self.correction[...], self.moe)
        weights = [
            p[...]
            for p in (self.expert_gate_up, self.expert_down, self.expert_gate_up_bias, self.expert_down_bias)
            if p is not None
        ]
        routed = self._compute(x, choice, *weights) if self.mesh is None else self._divided(self.mesh, x, choice, weights)
        return routed if self.shared is None else routed + self.shared(x)

    def _divided(self, mesh: Mesh, x: Float32[Array, "tokens hidden"], choice: Choice, weights: list[Array]) -> Array:
        """Each device computes its own experts for all tokens; the sum is everybody's."""
        (axis,) = mesh.axis_names
        everywhere, own = PartitionSpec(), PartitionSpec(axis)

        def local(x: Array, choice: Choice, *weights: Array) -> Array:
            first = lax.axis_index(axis) * weights[0].shape[0]
            return lax.psum(self._compute(x, choice._replace(experts=choice.experts - first), *weights), axis)

        specs = (everywhere, everywhere, *(own for _ in weights))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)(x, choice, *weights)

    def _compute(
        self,
        x: Float32[Array, "tokens hidden"],
        choice: Choice,
        gate_up: Array,
        down: Array,
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Float32[Array, "tokens hidden"]:
        """The weighted sum of the experts whose weights are given; a choice outside them counts nothing."""
        tokens, chosen = choice.experts.shape
        num_experts = gate_up.shape[0]
        here = (choice.experts >= 0) & (choice.experts < num_experts)
        expert = jnp.where(here, choice.experts, num_experts).reshape(-1)
        order = jnp.argsort(expert, stable=True)
        counts = jnp.bincount(expert, length=num_experts)
        tile = _tile_rows(tokens * chosen, num_experts)
        tiles, starts = (counts + tile - 1) // tile, jnp.cumsum(counts) - counts
        ends = jnp.cumsum(tiles)
        source = jnp.pad(order // chosen, (0, tile))

        def item(w: Int32[Array, ""], out: Float32[Array, "padded hidden"]) -> Float32[Array, "padded hidden"]:
            e = jnp.searchsorted(ends, w, side="right", method="compare_all")
            first = starts[e] + (w - ends[e] + tiles[e]) * tile
            rows = x[lax.dynamic_slice_in_dim(source, first, tile)]
            y = dot_out_in(rows, gate_up[e])
            gate, up = split_gate_up(y if gate_up_bias is None else y + gate_up_bias[e].astype(jnp.float32), self.shards)
            y = dot_out_in(self._activate(gate, up), down[e])
            y = y if down_bias is None else y + down_bias[e].astype(jnp.float32)
            # Rows beyond the expert's own are overwritten by the next expert's tile, or belong to nobody.
            return lax.dynamic_update_slice_in_dim(out, y, first, 0)

        out = lax.fori_loop(0, ends[-1], item, jnp.zeros((tokens * chosen + tile, x.shape[1])))
        place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)))
        parts = out[place].reshape(tokens, chosen, -1)
        return jnp.where(here[..., None], parts * choice.weights[..., None], 0.0).sum(axis=1)

    def _activate(self, gate: Float32[Array, "tokens ffn"], up: Float32[Array, "tokens ffn"]) -> Float32[Array, "tokens ffn"]:
        alpha, limit = self.moe.swiglu_alpha, self.moe.swiglu_limit
        if alpha is None:
            return ACTIVATE[self.act](gate) * up
        if limit is not None:
            gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)

    def weight_parts(self, prefix: str) -> Iterator[tuple[nnx.Param, Parts]]:
        """Parameters and the tensors they are made of, see `Decoder.weight_parts`."""
        width, hidden = self.moe.intermediate_size, self.expert_down.shape[1]
        yield from self.router.weight_parts(prefix, (("gate", self.moe.num_experts),))
        if self.correction is not None:
            yield self.correction, ((prefix + "gate.e_score_correction_bias", self.moe.num_experts),)
        each = [f"{prefix}experts.{e}." for e in range(self.moe.num_experts)]
        for kind, gate_up, down in (
            ("weight", self.expert_gate_up, self.expert_down),
            ("bias", self.expert_gate_up_bias, self.expert_down_bias),
        ):
            if gate_up is not None and down is not None:
                yield gate_up, tuple((f"{e}{name}.{kind}", width) for e in each for name in ("gate_proj", "up_proj"))
                yield down, tuple((f"{e}down_proj.{kind}", hidden) for e in each)
        if self.shared is not None:
            yield from self.shared.weight_parts(prefix + "shared_experts.")


def _tile_rows(rows: int, num_experts: int) -> int:
    """About what an expert gets on average, within `TILE_ROWS`."""
    fewest, most = TILE_ROWS
    return min(max(fewest, 1 << (rows // num_experts).bit_length()), most)
