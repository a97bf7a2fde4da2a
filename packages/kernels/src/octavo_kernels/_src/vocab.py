"""Reductions over a vocabulary that cost about one pass of memory, and return the lowest id among equals.

Knows how to view a vocabulary as lanes of 128 ids, because XLA:CPU turns a reduction over whole lanes into vector code and a plain
`argmax` into a scalar loop. Knows nothing of sampling.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

LANE: Final = 128
HUGE: Final = 1e38
"""Largest magnitude of a score: differences of two such scores stay finite in float32."""


def finite(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows vocab"]:
    """Scores without NaN and infinities: NaN and −inf become the lowest score, +inf the highest."""
    return jnp.clip(jnp.where(jnp.isnan(logits), -HUGE, logits), -HUGE, HUGE)


def to_lanes(values: Float32[Array, "rows vocab"], fill: float) -> Float32[Array, "rows lanes lane"]:
    """The same values as lanes of 128, the last one filled up with `fill`."""
    rows, vocab = values.shape
    short = -vocab % LANE
    if short:
        values = jnp.pad(values, ((0, 0), (0, short)), constant_values=fill)
    return values.reshape(rows, (vocab + short) // LANE, LANE)


def lane_of(values: Float32[Array, "rows lanes lane"], index: Int32[Array, " rows"]) -> Float32[Array, "rows lane"]:
    """One lane of each row."""
    return jnp.take_along_axis(values, index[:, None, None], axis=1)[:, 0]


def argmax(scores: Float32[Array, "rows vocab"]) -> Int32[Array, " rows"]:
    """Id of the greatest score of each row, the lowest among equals. No score may be NaN."""
    lanes = to_lanes(scores, -jnp.inf)
    lane = jnp.argmax(lanes.max(axis=-1), axis=-1).astype(jnp.int32)
    within = jnp.argmax(lane_of(lanes, lane), axis=-1).astype(jnp.int32)
    return jnp.minimum(lane * LANE + within, scores.shape[1] - 1)
