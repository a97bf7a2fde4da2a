"""A decoder layer in two calls around attention, and what a head is replaced by.

Knows the form that the families served here share: norm, grouped-query attention with rotation, norm, gated MLP; optionally biases, norms
of Q and K, norms of what is added to the stream. Knows nothing of where KV lives: attention is the callable every layer is given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import Matrix, Static, aligned, call, row_bytes, score, scratch

ACTIVATIONS = ("silu", "gelu_tanh")


class Norms(NamedTuple):
    """Gains of a layer's norms, as float32; None where there is none.

    Attributes:
        attention, mlp: Before attention and before the MLP.
        after_attention, after_mlp: Of what they add to the stream.
        q, k: Of heads.
        eps: Of all of them.
    """

    attention: np.ndarray
    mlp: np.ndarray
    after_attention: np.ndarray | None
    after_mlp: np.ndarray | None
    q: np.ndarray | None
    k: np.ndarray | None
    eps: float


class Block(nnx.Module):
    """One layer; implements `octavo_core.seams.Layer` for streams with `residual`, `cos` and `sin`.

    Attributes:
        qkv, out, gate_up, down: Its weights. Rows of `gate_up` come 16 of the gate, 16 of up, and so on.
    """

    def __init__(
        self, library: Library, norms: Norms, qkv: Matrix, out: Matrix, gate_up: Matrix, down: Matrix, *, heads: int, kv_heads: int,
        head_dim: int, activation: str, is_local: bool = False, is_exact: bool = False,
    ) -> None:  # fmt: skip
        self.isa, self.eps, self.is_local, self.is_exact = library.isa, float(norms.eps), is_local, is_exact
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.activation = ACTIVATIONS.index(activation)
        self.qkv, self.out, self.gate_up, self.down = qkv, out, gate_up, down
        before = (norms.q, norms.k, _take_bias(qkv))
        after = (norms.after_attention, norms.after_mlp, *(_take_bias(m) for m in (out, gate_up, down)))
        self.before, self.before_parts = _floats(norms.attention, before)
        self.after, self.after_parts = _floats(norms.mlp, after)
        self.library = Static(library)

    def __call__(self, kv: Any, stream: Any, attention: Any) -> tuple[Any, Any]:
        """The layer's KV and the stream after it.

        Where `attention` says so, tokens from `attention.live` on are left as they are, and from `attention.singles` on they belong to
        prompts, which some machines compute in bfloat16 unless the layer is exact.
        """
        x = stream.residual
        live = getattr(attention, "live", len(x))
        singles = live if self.is_exact else getattr(attention, "singles", live)
        counts = jnp.stack([jnp.asarray(n, jnp.int32) for n in (live, singles)])
        cos, sin = stream.local if self.is_local else (stream.cos, stream.sin)
        q, k, v = self._project(counts, x, cos, sin)
        kv, attended = attention(kv, q, k, v)
        return kv, stream._replace(residual=self._finish(counts, x, attended.astype(jnp.float32)))

    def _project(self, counts: Array, x: Float32[Array, "tokens hidden"], cos: Array, sin: Array) -> tuple[Array, Array, Array]:
        tokens, hidden = x.shape
        shapes = [jax.ShapeDtypeStruct((tokens, n, self.head_dim), jnp.float32) for n in (self.heads, self.kv_heads, self.kv_heads)]
        widest = max(hidden, self.qkv.outputs)
        room = 2 * aligned(tokens * widest * 4) + row_bytes(self.qkv.form, tokens, hidden)
        operands = (counts, x, cos, sin, self.before[...], self.qkv.data[...])
        q, k, v, _ = call(
            self.library.value, "project", (*shapes, scratch(room)), *operands, format=self.qkv.form, parts=self.before_parts, eps=self.eps
        )  # fmt: skip
        return q, k, v

    def _finish(self, counts: Array, x: Float32[Array, "tokens hidden"], attended: Array) -> Float32[Array, "tokens hidden"]:
        tokens, hidden = x.shape
        matrices = (self.out, self.gate_up, self.down)
        room = 2 * aligned(tokens * hidden * 4) + sum(row_bytes(m.form, tokens, m.inputs) for m in matrices)
        operands = (counts, x, attended, self.after[...], *(m.data[...] for m in matrices))
        y, _ = call(
            self.library.value, "finish", (jax.ShapeDtypeStruct(x.shape, jnp.float32), scratch(room)), *operands, aliases={1: 0},
            f_out=self.out.form, f_gate_up=self.gate_up.form, f_down=self.down.form, ffn=self.down.inputs,
            activation=self.activation, parts=self.after_parts, eps=self.eps,
        )  # fmt: skip
        return y


class Head(nnx.Module):
    """Scores of the vocabulary."""

    def __init__(self, library: Library, matrix: Matrix) -> None:
        self.matrix, self.library = matrix, Static(library)

    def __call__(self, hidden: Float32[Array, "rows hidden"]) -> Float32[Array, "rows vocab"]:
        """Of the last hidden states."""
        return score(self.library.value, self.matrix, hidden.astype(jnp.float32))


def gate_up_order(width: int, up_first: int | None = None) -> np.ndarray:
    """Rows of gate and up in panels of 16 that alternate; `up_first` is the first row of up, where that is not `width`."""
    rows = np.arange(width).reshape(-1, 16)
    return np.stack([rows, rows + (width if up_first is None else up_first)], axis=1).ravel()


def _take_bias(matrix: Matrix) -> np.ndarray | None:
    """A matrix's bias, which from now on is somebody else's: what is left is the same in every layer."""
    bias = None if matrix.bias is None else matrix.bias.value
    matrix.bias = None
    return bias


def _floats(gain: np.ndarray, optional: tuple[np.ndarray | None, ...]) -> tuple[nnx.Param, int]:
    """A norm's gain and what there is of other vectors as one, and bits that say which there are: every operand of a call costs time."""
    there = [part is not None for part in optional]
    parts = [gain, *(part for part in optional if part is not None)]
    flat = np.concatenate([np.asarray(part, np.float32) for part in parts])
    return nnx.Param(jnp.asarray(flat)), sum(1 << i for i, is_there in enumerate(there) if is_there)
