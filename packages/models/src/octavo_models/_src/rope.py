"""Rotary position embedding in the half-split convention of Hugging Face checkpoints.

Knows how inverse frequencies follow from a RoPE configuration and how to rotate. Knows no checkpoint format: a loader that must
permute weights to reach this convention does so itself.

Source: RoFormer (arXiv 2104.09864) for the rotation; the `llama3` frequency ramp as published with Llama 3.1; YaRN (arXiv 2309.00071)
section 3.2, its ends as transformers computes them; LongRoPE (arXiv 2402.13753) up to the length before stretching.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.model_config import RopeConfig, RopeKind


def inverse_frequencies(rope: RopeConfig, head_dim: int, divisors: Sequence[float] | None = None) -> tuple[float, ...]:
    """Radians per position of each rotated pair, float32 values as Python floats (hashable, so jit may close over them).

    Args:
        rope: Base and scaling.
        head_dim: Of each head; `head_dim / 2` pairs rotate.
        divisors: A checkpoint's own divisor of each unscaled frequency; replaces `rope.kind` where given.

    Raises:
        UnsupportedModelError: For a scaling kind not known here.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base: np.ndarray = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    scaled: np.ndarray
    if divisors is not None:
        scaled = base / np.asarray(divisors, np.float32)
    elif rope.kind in ("default", "dynamic"):
        scaled = base
    elif rope.kind == "linear":
        scaled = base / np.float32(rope.factor)
    elif rope.kind == "proportional":
        turning = np.arange(len(base)) < int(rope.share * head_dim // 2)
        scaled = np.where(turning, base / np.float32(rope.factor), np.float32(0))
    elif rope.kind == "longrope":
        scaled = base / np.asarray(rope.divisors, np.float32)
    elif rope.kind == "llama3":
        scaled = _llama3(base, rope)
    elif rope.kind == "yarn":
        scaled = _yarn(base, rope, head_dim)
    else:
        raise UnsupportedModelError(f"RoPE scaling '{rope.kind}' is not supported; supported are {', '.join(get_args(RopeKind))}")
    return tuple(scaled.astype(np.float32).tolist())


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Wavelengths short against the original context stay, long ones stretch by `factor`, between them it blends."""
    wavelength = 2 * math.pi / base
    turns = rope.original_max_position_embeddings / wavelength
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0).astype(np.float32)
    return keep * base + (1 - keep) * base / np.float32(rope.factor)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Pairs that turn more than `beta_fast` times in the original context stay, those below `beta_slow` stretch; a ramp between them."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretch = np.clip((np.arange(len(base), dtype=np.float32) - low) / ((high - low) or 0.001), 0, 1)
    return base * (1 - stretch) + base / np.float32(rope.factor) * stretch


def rotation(
    positions: Int32[Array, " tokens"], frequencies: Sequence[float], factor: float = 1.0
) -> tuple[Float32[Array, "tokens 1 half"], Float32[Array, "tokens 1 half"]]:
    """Cosine and sine of every token's angles times `factor`, broadcast over heads; once per step, shared by all layers."""
    angles = positions.astype(jnp.float32)[:, None, None] * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    heads: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens 1 half"],
    sin: Float32[Array, "tokens 1 half"],
) -> Float32[Array, "tokens heads head_dim"]:
    """Rotate the pair (i, i + head_dim/2) of every head by its token's angle, in float32."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def halves_of_pairs(heads: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
    """Heads whose pairs are neighbours (2i, 2i+1), reordered for `rotate`."""
    return heads.reshape(*heads.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(heads.shape)
