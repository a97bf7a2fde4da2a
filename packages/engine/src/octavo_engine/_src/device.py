"""The programs a step runs on the device, as pure functions: `begin`, a segment of layers, `ends`, `sample`; `copy` for blocks that
are copied before it, and `score` for prompt scores.

Knows how a plan's slices reach the model's attention. Knows no compilation, no host, no requests.

Why segments: XLA compiles each layer of one program anew, half a second each on a CPU, while layers of equal structure could
share one. A segment of one layer is compiled once and called for every layer; a segment of all layers is one program,
which suits an accelerator, where calls cost more than they do here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from octavo_core.plan import Sampled
from octavo_core.seams import AttentionBackend, AttentionBatch, Model, Sampler
from octavo_core.specs import KVGroupSpec
from octavo_kernels import attend_rules, score_tokens

_ABSENT = np.zeros((), np.float32)


class StepInput(NamedTuple):
    """A `StepPlan` cut to a bucket, as the device sees it."""

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    row: Int32[Array, " tokens"]
    query_start: Int32[Array, " rows_plus_one"]
    context_len: Int32[Array, " rows"]
    block_table: Int32[Array, "groups rows max_blocks"]
    slot_mapping: Int32[Array, "groups tokens"]
    sample_rows: Int32[Array, " rows"]
    sequence: Int32[Array, " rows"]
    num_single: Int32[Array, ""]
    num_rows: Int32[Array, ""]


class DeviceState(NamedTuple):
    """What lives on the device between steps.

    Attributes:
        kv: Of each segment, of each of its layers.
        sampler: The sampler's own.
        last_token: Last sampled id of each sequence.
    """

    kv: tuple[tuple[Any, ...], ...]
    sampler: Any
    last_token: Int32[Array, " sequences"]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layers that run as one program.

    Attributes:
        kind: Structure of each layer; segments of equal kind and shapes share a compiled program.
        params: Weights of each layer.
        groups: KV group of each layer.
    """

    kind: tuple[Any, ...]
    params: tuple[Any, ...]
    groups: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DevicePrograms:
    """A step's programs around one model, attention backend and sampler. Make one with `of`.

    Attributes:
        rebuild: From the weights outside the layers to a model whose layers must not be called.
        params: The weights outside the layers: flattening a model's every weight would cost a millisecond a call.
        segments: All layers in order.
    """

    rebuild: Callable[[Any], Model]
    params: Any
    segments: tuple[Segment, ...]
    groups: tuple[KVGroupSpec, ...]
    attention: AttentionBackend[Any]
    sampler: Sampler[Any]
    max_logprobs: int

    @classmethod
    def of(
        cls,
        model: Model,
        groups: tuple[KVGroupSpec, ...],
        attention: AttentionBackend[Any],
        sampler: Sampler[Any],
        *,
        max_logprobs: int,
        layers_per_segment: int,
    ) -> DevicePrograms:
        """Split a model into segments of `layers_per_segment` layers."""
        home = {layer: g for g, spec in enumerate(groups) for layer in spec.layers}
        parts = [(*_flat(layer), home[i]) for i, layer in enumerate(model.layers())]
        chunks = [parts[i : i + layers_per_segment] for i in range(0, len(parts), layers_per_segment)]
        segments = tuple(Segment(*(tuple(column) for column in zip(*chunk, strict=True))) for chunk in chunks)
        return cls(*_without_layers(model, segments), segments, groups, attention, sampler, max_logprobs)

    def init_kv(self, num_blocks: tuple[int, ...]) -> tuple[tuple[Any, ...], ...]:
        """Zeroed KV of every layer."""
        alone = [dataclasses.replace(spec, layers=spec.layers[:1]) for spec in self.groups]
        return tuple(tuple(self.attention.init_kv(alone[g], num_blocks[g]) for g in s.groups) for s in self.segments)

    def begin(self, params: Any, last_token: Int32[Array, " sequences"], step: StepInput) -> tuple[Any, tuple[AttentionBatch, ...]]:
        """The stream that enters the first layer, and what attention needs of each KV group."""
        rows = len(step.sequence)
        sequence = step.sequence[jnp.minimum(step.row, rows - 1)]
        fed_back = last_token[jnp.clip(sequence, 0)]
        ids = jnp.where(step.token_ids >= 0, step.token_ids, fed_back)
        stream = self.rebuild(params).begin(ids, step.positions)
        batches = tuple(
            AttentionBatch(step.positions, step.query_start, step.context_len, table, slots, step.num_single, step.num_rows)
            for table, slots in zip(step.block_table, step.slot_mapping, strict=True)
        )
        return stream, batches

    def run(
        self, segment: Segment, params: tuple[Any, ...], kv: tuple[Any, ...], stream: Any, batches: tuple[AttentionBatch, ...]
    ) -> tuple[tuple[Any, ...], Any]:
        """The layers of a segment; `params` are its own or another's of the same kind. `kv` and `stream` are meant to be donated."""
        out = []
        for kind, weights, group, layer_kv in zip(segment.kind, params, segment.groups, kv, strict=True):
            graphdef, tree = kind
            layer = nnx.merge(graphdef, jax.tree.unflatten(tree, weights))
            layer_kv, stream = layer(layer_kv, stream, self._layer_attention(batches[group], group))
            out.append(layer_kv)
        return tuple(out), stream

    def whole(
        self,
        segment: Segment,
        weights: tuple[Any, ...],
        kv: tuple[Any, ...],
        params: Any,
        last_token: Int32[Array, " sequences"],
        step: StepInput,
    ) -> tuple[tuple[Any, ...], Any]:
        """`begin` and `run` of the only segment. `kv` is meant to be donated."""
        return self.run(segment, weights, kv, *self.begin(params, last_token, step))

    def _layer_attention(self, batch: AttentionBatch, group: int) -> Any:
        spec = self.groups[group]

        def attend(kv: Any, q: Array, k: Array, v: Array, *, sinks: Array | None = None) -> tuple[Any, Array]:
            rules = attend_rules(spec) if sinks is None else {**attend_rules(spec), "sinks": sinks}
            kv = self.attention.write(kv, 0, k, v, batch.slot_mapping)
            return kv, self.attention.attend(kv, 0, q, batch, scale=spec.score_scale, **rules)

        # For layers that need not compute pads, and those that compute prompts in another way than tokens alone in their row.
        attend.live, attend.singles = batch.query_start[-1], batch.num_single  # type: ignore[attr-defined]
        return attend

    def copy(self, groups: tuple[int, ...], kv: tuple[Any, ...], copies: Int32[Array, "groups copies 2"]) -> tuple[Any, ...]:
        """Copy blocks (from, to) in every layer of a segment, all read before any is written; −1 pads. `kv` is meant to be donated."""
        out = []
        for group, layer_kv in zip(groups, kv, strict=True):
            source, target = copies[group, :, 0], copies[group, :, 1]
            data = self.attention.gather(layer_kv, jnp.maximum(source, 0))
            out.append(self.attention.scatter(layer_kv, jnp.where(source < 0, -1, target), data))
        return tuple(out)

    def ends(self, params: Any, stream: Any, at: Int32[Array, " ending"]) -> Float[Array, "ending hidden"]:
        """Final hidden states of the tokens at flat index `at`."""
        return self.rebuild(params).hidden(stream)[at]

    def sample(
        self,
        params: Any,
        sampler: Any,
        last_token: Int32[Array, " sequences"],
        hidden: Float[Array, "rows hidden"],
        sequence: Int32[Array, " rows"],
        position: Int32[Array, " rows"],
    ) -> tuple[Any, Int32[Array, " sequences"], Sampled]:
        """Sample rows and remember their tokens; `sequence` −1 pads. `sampler` and `last_token` are meant to be donated."""
        # A head may leave out rows of zeros.
        logits = self.rebuild(params).logits(jnp.where((sequence >= 0)[:, None], hidden, 0))
        sampler, sampled = self.sampler.sample(sampler, logits, sequence, position)
        slot = jnp.where(sequence >= 0, sequence, len(last_token))
        return sampler, last_token.at[slot].set(sampled.token_ids, mode="drop"), sampled

    def score(
        self, params: Any, stream: Any, at: Int32[Array, " targets"], targets: Int32[Array, " targets"]
    ) -> tuple[Array, Array, Array, Array]:
        """Log-probability, rank and alternatives of `targets` after the tokens at flat index `at`."""
        model = self.rebuild(params)
        return score_tokens(model.logits(model.hidden(stream)[at]), targets, self.max_logprobs)


def _flat(layer: Any) -> tuple[tuple[Any, Any], list[Any]]:
    """A layer's structure and its weights as a plain list: a tree of modules would be flattened in every step."""
    graphdef, params = nnx.split(layer)
    leaves, tree = jax.tree.flatten(params)
    return (graphdef, tree), leaves


def _without_layers(model: Model, segments: tuple[Segment, ...]) -> tuple[Callable[[Any], Model], list[Any]]:
    graphdef, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    inside = {id(leaf) for segment in segments for leaf in jax.tree.leaves(segment.params)}
    is_outer = [id(leaf) not in inside for leaf in leaves]

    def rebuild(outer: list[Any]) -> Model:
        rest = iter(outer)
        return nnx.merge(graphdef, jax.tree.unflatten(tree, [next(rest) if keep else _ABSENT for keep in is_outer]))

    return rebuild, [leaf for leaf, keep in zip(leaves, is_outer, strict=True) if keep]


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))
