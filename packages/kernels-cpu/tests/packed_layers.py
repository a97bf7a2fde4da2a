"""Matrices and layers with numbers in them, and what they should answer in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from octavo_kernels_cpu._src.block import Block, Norms, gate_up_order
from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import GROUP, Format, Matrix, Raw, Source


def f16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16)


def as_blocks(values: np.ndarray, source: Source) -> tuple[np.ndarray, np.ndarray]:
    """GGUF's coding of rows by rounding, written from its description, and the values it stands for."""
    rows, inputs = values.shape
    groups = values.reshape(rows, inputs // GROUP, GROUP).astype(np.float32)
    low, high = groups.min(-1), groups.max(-1)
    if source is Source.Q8_0:
        scale = f16(np.abs(groups).max(-1) / 127)
        q = np.clip(np.round(groups / scale[..., None].astype(np.float32)), -127, 127).astype(np.int8)
        parts = [scale[..., None].view(np.uint8), q.view(np.uint8)]
        exact = q * scale[..., None].astype(np.float64)
    else:
        if source is Source.Q4_1:
            scale, minimum = f16((high - low) / 15), f16(low)
        else:
            scale = f16(np.abs(groups).max(-1) / 8)
            minimum = f16(-8 * scale.astype(np.float32))
        step = scale[..., None].astype(np.float32)
        q = np.clip(np.round((groups - minimum[..., None].astype(np.float32)) / step), 0, 15).astype(np.uint8)
        nibbles = q[..., :16] | (q[..., 16:] << 4)
        heads = [scale, minimum] if source is Source.Q4_1 else [scale]
        parts = [*(h[..., None].view(np.uint8) for h in heads), nibbles]
        exact = q * scale[..., None].astype(np.float64) + minimum[..., None].astype(np.float64)
    return np.concatenate(parts, axis=-1).reshape(rows, -1), exact.reshape(rows, inputs)


def raw_of(values: np.ndarray, source: Source) -> tuple[Raw, np.ndarray]:
    """Rows of a source and the values they stand for."""
    if source is Source.F32:
        return Raw(source, values.astype(np.float32), values.shape[1]), values.astype(np.float32).astype(np.float64)
    if source is Source.BF16:
        rounded = values.astype(ml_dtypes.bfloat16)
        return Raw(source, rounded.view(np.uint16), values.shape[1]), rounded.astype(np.float64)
    rows, exact = as_blocks(values, source)
    return Raw(source, rows, values.shape[1]), exact


def rounding(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Six standard deviations of what int8 activations in groups of 32 change."""
    step = np.abs(x.reshape(len(x), -1, GROUP)).max(-1) / 127
    noise = np.sqrt(np.einsum("rg,ng->rn", step**2, (weight.reshape(len(weight), -1, GROUP) ** 2).sum(-1)) / 12)
    return 6 * noise


def sums(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What float32 sums lose at their worst."""
    return 2.0**-23 * x.shape[1] * (np.abs(x) @ np.abs(weight).T) + 1e-6


@dataclasses.dataclass
class Layer:
    """A layer's values in float64; `make` packs them."""

    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 96
    activation: str = "silu"
    optional: bool = False
    eps: float = 1e-5

    def __post_init__(self) -> None:
        rng = np.random.default_rng(3)
        wide = (self.heads + 2 * self.kv_heads) * self.head_dim
        shapes = {"qkv": (wide, self.hidden), "out": (self.hidden, self.heads * self.head_dim)}
        shapes |= {"gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}
        self.weights = {k: rng.normal(size=s).astype(np.float32) / np.float32(s[1] ** 0.5) for k, s in shapes.items()}
        self.gains = [rng.uniform(0.5, 1.5, n).astype(np.float32) for n in (self.hidden,) * 4 + (self.head_dim,) * 2]
        self.biases = {k: rng.normal(size=s[0]).astype(np.float32) for k, s in shapes.items()}
        if not self.optional:
            self.gains[2:] = [None] * 4
            self.biases = dict.fromkeys(shapes)

    def make(self, library: Library, source: Source, form: Format) -> Block:
        """Packed; the values kept are those that the packed weights stand for."""
        made = {}
        for name, values in self.weights.items():
            raw, exact = raw_of(values, source)
            order = gate_up_order(self.ffn) if name == "gate_up" else None
            made[name] = Matrix(library, raw, form, order=order, bias=self.biases[name])
            self.weights[name] = exact
        sizes: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return Block(library, Norms(*self.gains, eps=self.eps), **made, **sizes, activation=self.activation)

    def norm(self, x: np.ndarray, gain: np.ndarray | None) -> np.ndarray:
        return x if gain is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * gain

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        bias = self.biases[name]
        return x @ self.weights[name].T.astype(np.float64) + (0 if bias is None else bias)

    def project(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, ...]:
        y = self.product(self.norm(x, self.gains[0]), "qkv").reshape(len(x), -1, self.head_dim)
        q, k, v = np.split(y, [self.heads, self.heads + self.kv_heads], axis=1)
        q, k = self.norm(q, self.gains[4]), self.norm(k, self.gains[5])

        def turn(z: np.ndarray) -> np.ndarray:
            a, b = np.split(z, 2, axis=-1)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

        return turn(q), turn(k), v

    def finish(self, x: np.ndarray, attended: np.ndarray) -> np.ndarray:
        x = x + self.norm(self.product(attended.reshape(len(x), -1), "out"), self.gains[2])
        gate, up = np.split(self.product(self.norm(x, self.gains[1]), "gate_up"), 2, axis=-1)
        if self.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return x + self.norm(self.product(gate * up, "down"), self.gains[3])


class Stream:
    """What a layer is given: `residual`, `cos`, `sin`."""

    def __init__(self, residual: Any, cos: Any, sin: Any) -> None:
        self.residual, self.cos, self.sin, self.local = residual, cos, sin, None

    def _replace(self, residual: Any) -> Stream:
        return Stream(residual, self.cos, self.sin)


def stream(tokens: int, hidden: int, head_dim: int, seed: int = 0) -> tuple[Stream, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 6, (tokens, 1, head_dim // 2))
    parts = [rng.normal(size=(tokens, hidden)), np.cos(angles), np.sin(angles)]
    narrow = [p.astype(np.float32) for p in parts]
    return Stream(*(jnp.asarray(p) for p in narrow)), [p.astype(np.float64) for p in narrow]
