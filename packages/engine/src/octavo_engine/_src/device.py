"""The two programs a step runs on the device, as pure functions: `forward` and `sample`, and `score` for prompt scores.

Knows how a plan's slices reach the model's attention. Knows no compilation, no host, no requests.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from octavo_core.plan import Sampled
from octavo_core.seams import AttentionBackend, AttentionBatch, Sampler
from octavo_core.specs import KVGroupSpec
from octavo_kernels import score_tokens


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
    """What lives on the device between steps: KV of each group, the sampler's state, the last sampled id of each sequence."""

    kv: tuple[Any, ...]
    sampler: Any
    last_token: Int32[Array, " sequences"]


@dataclasses.dataclass(frozen=True)
class DevicePrograms:
    """The step's programs around one model, attention backend and sampler."""

    graphdef: Any
    groups: tuple[KVGroupSpec, ...]
    attention: AttentionBackend[Any]
    sampler: Sampler[Any]
    max_logprobs: int

    def forward(
        self, params: Any, kv: tuple[Any, ...], last_token: Int32[Array, " sequences"], step: StepInput
    ) -> tuple[tuple[Any, ...], Float[Array, "tokens hidden"]]:
        """Write the step's KV and answer the hidden state of every token. `kv` is meant to be donated."""
        model = nnx.merge(self.graphdef, params)
        rows = len(step.sequence)
        sequence = step.sequence[jnp.minimum(step.row, rows - 1)]
        fed_back = last_token[jnp.clip(sequence, 0)]
        ids = jnp.where(step.token_ids >= 0, step.token_ids, jnp.maximum(fed_back, 0))
        return model.hidden(kv, ids, step.positions, self._layer_attention(step))

    def _layer_attention(self, step: StepInput) -> Any:
        home = {layer: (g, i) for g, spec in enumerate(self.groups) for i, layer in enumerate(spec.layers)}
        batches = [self._batch(step, g) for g in range(len(self.groups))]

        def attend(kv: tuple[Any, ...], layer: int, q: Array, k: Array, v: Array) -> tuple[tuple[Any, ...], Array]:
            g, i = home[layer]
            written = self.attention.write(kv[g], i, k, v, batches[g].slot_mapping)
            out = self.attention.attend(written, i, q, batches[g], scale=self.groups[g].head_dim ** -0.5)
            return (*kv[:g], written, *kv[g + 1 :]), out

        return attend

    def _batch(self, step: StepInput, group: int) -> AttentionBatch:
        return AttentionBatch(
            step.positions,
            step.query_start,
            step.context_len,
            step.block_table[group],
            step.slot_mapping[group],
            step.num_single,
            step.num_rows,
        )

    def sample(
        self,
        params: Any,
        sampler: Any,
        last_token: Int32[Array, " sequences"],
        hidden: Float[Array, "tokens hidden"],
        step: StepInput,
    ) -> tuple[Any, Int32[Array, " sequences"], Sampled]:
        """Sample the rows that end here and remember their tokens. `sampler` and `last_token` are meant to be donated."""
        model = nnx.merge(self.graphdef, params)
        at = jnp.maximum(step.sample_rows, 0)
        sequence = jnp.where(step.sample_rows >= 0, step.sequence, -1)
        sampler, sampled = self.sampler.sample(sampler, model.logits(hidden[at]), sequence, step.positions[at] + 1)
        slot = jnp.where(sequence >= 0, sequence, len(last_token))
        return sampler, last_token.at[slot].set(sampled.token_ids, mode="drop"), sampled

    def score(
        self, params: Any, hidden: Float[Array, "tokens hidden"], at: Int32[Array, " targets"], targets: Int32[Array, " targets"]
    ) -> tuple[Array, Array, Array, Array]:
        """Log-probability, rank and alternatives of `targets` after the tokens at flat index `at`."""
        model = nnx.merge(self.graphdef, params)
        return score_tokens(model.logits(hidden[at]), targets, self.max_logprobs)


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in a tree."""
    return sum(x.nbytes for x in jax.tree.leaves(tree))
