"""The kept part of a vocabulary, as the end of a prefix.

Knows distances: `(greatest score − score) / temperature`, so 0 is the most likely token, a banned one is at infinity, and a token's
weight is `exp(−distance)`. top_k, top_p and min_p each keep a prefix of the tokens in the order (distance, id). Knows nothing of
how its end is found.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

ANY_ID: Final = 2**31 - 1


class Cut(NamedTuple):
    """End of the kept prefix: all up to `near`, and those up to `far` whose id is at most `last_id`."""

    near: Float32[Array, " rows"]
    far: Float32[Array, " rows"]
    last_id: Int32[Array, " rows"]


def everything(rows: int) -> Cut:
    """The cut that keeps all tokens."""
    inf = jnp.full(rows, jnp.inf, jnp.float32)
    return Cut(inf, inf, jnp.full(rows, ANY_ID, jnp.int32))


def keep(distance: Float32[Array, "rows lanes lane"], cut: Cut) -> Bool[Array, "rows lanes lane"]:
    """The tokens inside the cut."""
    tied = (distance <= wide(cut.far)) & (token_ids(distance) <= cut.last_id[:, None, None])
    return (distance <= wide(cut.near)) | tied


def token_ids(distance: Float32[Array, "rows lanes lane"]) -> Int32[Array, "1 lanes lane"]:
    """The id at each place."""
    _, lanes, lane = distance.shape
    return jnp.arange(lanes * lane, dtype=jnp.int32).reshape(1, lanes, lane)


def wide(values: Float32[Array, " rows"]) -> Float32[Array, "rows 1 1"]:
    """A value per row, ready to meet a distance."""
    return values[:, None, None]
