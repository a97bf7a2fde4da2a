"""Which device holds which part of a model: tensor and expert parallelism as the placement of weights.

Knows the axes of the parts' weights and the order of rows that keeps what belongs together on one device. Knows no checkpoint. The
arithmetic is not told apart: jit follows the weights.

Each device has a share of the query heads with the KV heads they need, of the MLP's width, of the experts or of each expert's width, and of the
vocabulary. What does not divide evenly is refused, except the vocabulary, which then is on every device, and whole experts, to which as many
are added as are missing: nobody chooses those.

Source: the column and row split of Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo_core.errors import ConfigError
from octavo_models._src.attention import Attention
from octavo_models._src.decoder import Block, Decoder
from octavo_models._src.latent_attention import LatentAttention
from octavo_models._src.mlp import GatedMLP
from octavo_models._src.model_config import ModelConfig
from octavo_models._src.moe import MoE


@dataclasses.dataclass(frozen=True)
class _Place:
    """Of one parameter: which axis is divided (None: every device has all), the rows of that axis in the order to divide, and how many
    rows of zeros are added to it."""

    axis: int | None = None
    rows: np.ndarray | None = None
    added: int = 0


class Placement:
    """Weights divided among the devices of a mesh with one axis.

    Args:
        mesh: Its size is the number of devices.
        divide_experts: A device has whole experts; otherwise it has a share of each.
    """

    def __init__(self, mesh: Mesh, *, divide_experts: bool = False) -> None:
        self.mesh, self._divide_experts = mesh, divide_experts
        (self._axis,) = mesh.axis_names

    def check(self, config: ModelConfig) -> None:
        """Refuse a model that does not divide.

        Raises:
            ConfigError: Naming what does not.
        """
        size = self.mesh.size
        uneven = [f"{config.num_heads} attention heads"] if config.num_heads % size else []
        if config.latent is None and config.num_kv_heads % size and size % config.num_kv_heads:
            uneven.append(f"{config.num_kv_heads} KV heads")
        if any(not config.has_experts(layer) for layer in range(config.num_layers)) and config.intermediate_size % size:
            uneven.append(f"an MLP of width {config.intermediate_size}")
        if (moe := config.moe) is not None:
            if not self._divide_experts and moe.intermediate_size % size:
                uneven.append(f"experts of width {moe.intermediate_size}")
            if moe.shared_size % size:
                uneven.append(f"shared experts of width {moe.shared_size}")
        if self._divide_experts and config.moe is None:
            raise ConfigError(f"--expert-parallel needs a model with experts, {config.architecture} here has none")
        if uneven:
            raise ConfigError(f"--tensor-parallel-size {size} does not divide {' nor '.join(uneven)} of this model")

    def of(self, model: Any) -> Callable[[nnx.Param[Any], np.ndarray], jax.Array]:
        """Tell a model's parts how they are divided; answers what puts a parameter's values where they belong.

        Raises:
            ConfigError: It is no `Decoder`, or does not divide.
        """
        if not isinstance(model, Decoder):
            raise ConfigError(f"--tensor-parallel-size divides a {Decoder.__name__}, this model is a {type(model).__name__}")
        if not all(isinstance(block, Block) for block in model.blocks):
            raise ConfigError("--tensor-parallel-size divides Octavo's own layers, this model has others")
        self.check(model.config)
        places = dict(self._places(model))

        def place(param: nnx.Param[Any], values: np.ndarray) -> jax.Array:
            where = places.get(id(param), _Place())
            if where.rows is not None and where.axis is not None:
                values = np.take(values, where.rows, axis=where.axis)
            if where.added:
                values = np.pad(values, [(0, where.added if a == where.axis else 0) for a in range(values.ndim)])
            spec = PartitionSpec() if where.axis is None else PartitionSpec(*[None] * where.axis, self._axis)
            # Not `device_put`: where the mesh reaches into other processes it would compare all weights over the network.
            return jax.make_array_from_callback(values.shape, NamedSharding(self.mesh, spec), values.__getitem__)

        return place

    def _places(self, model: Decoder) -> list[tuple[int, _Place]]:
        found = []
        model.kv_heads = max(model.config.num_kv_heads, self.mesh.size)
        if model.config.vocab_size % self.mesh.size == 0:
            found += _linear(model.embed, _Place(0)) + (_linear(model.head, _Place(0)) if model.head is not None else [])
        for block in model.blocks:
            attention, mlp = block.attention, block.mlp
            found += self._attention(attention) if isinstance(attention, Attention) else self._latent(attention)
            found += self._mlp(mlp) if isinstance(mlp, GatedMLP) else self._experts(mlp)
        return found

    def _attention(self, part: Attention) -> list[tuple[int, _Place]]:
        size, dim = self.mesh.size, part.head_dim
        q, kv = part.num_heads // size, max(part.num_kv_heads // size, 1)
        heads = []
        for i in range(size):
            first = i * part.num_kv_heads // size
            keys = part.num_heads + np.arange(first, first + kv)
            heads += [np.arange(i * q, (i + 1) * q), keys, keys + part.num_kv_heads]
        rows = (np.concatenate(heads)[:, None] * dim + np.arange(dim)).ravel()
        part.shards, part.num_kv_heads = size, kv * size
        sinks = [] if part.sinks is None else [(id(part.sinks), _Place(0))]
        return [*_linear(part.qkv, _Place(0, rows)), (id(part.out.weight), _Place(1)), *sinks]

    def _latent(self, part: LatentAttention) -> list[tuple[int, _Place]]:
        return [*_linear(part.q, _Place(0)), (id(part.up), _Place(0)), (id(part.out.weight), _Place(1))]

    def _mlp(self, part: GatedMLP) -> list[tuple[int, _Place]]:
        rows = self._gate_up_rows(part.gate_up.num_out // 2)
        part.shards = self.mesh.size
        return [*_linear(part.gate_up, _Place(0, rows)), (id(part.down.weight), _Place(1))]

    def _experts(self, part: MoE) -> list[tuple[int, _Place]]:
        shared = [] if part.shared is None else self._mlp(part.shared)
        if self._divide_experts:
            part.mesh = self.mesh
            params = (part.expert_gate_up, part.expert_down, part.expert_gate_up_bias, part.expert_down_bias)
            added = -part.moe.num_experts % self.mesh.size
            return [(id(p), _Place(0, added=added)) for p in params if p is not None] + shared
        rows = self._gate_up_rows(part.moe.intermediate_size)
        part.shards = self.mesh.size
        biases = [] if part.expert_gate_up_bias is None else [(id(part.expert_gate_up_bias), _Place(1, rows))]
        return [(id(part.expert_gate_up), _Place(1, rows)), (id(part.expert_down), _Place(2)), *biases, *shared]

    def _gate_up_rows(self, width: int) -> np.ndarray:
        """Of each device in turn: its share of the gate, its share of up."""
        return np.arange(2 * width).reshape(2, self.mesh.size, -1).swapaxes(0, 1).ravel()


def _linear(part: Any, place: _Place) -> list[tuple[int, _Place]]:
    """Weight and bias of a map whose outputs are divided."""
    bias = getattr(part, "bias", None)
    return [(id(part.weight), place), *([(id(bias), place)] if bias is not None else [])]
