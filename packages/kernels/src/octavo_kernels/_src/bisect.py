"""Where top_k and top_p end, by bisection: exact for any row, whatever its shape.

A distance is not negative, so its bits, read as an integer, are in the same order, and bisecting over those integers ends at
an exact answer after at most 31 counts, without sorting. Knows nothing of why a row is not served by something quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from octavo_kernels._src.cut import ANY_ID, Cut, token_ids, wide

INF_BITS: Final = 0x7F800000
TINY: Final = 1.1754944e-38

Distance = Float32[Array, "rows lanes lane"]
RowBits = Int32[Array, " rows"]
RowFloat = Float32[Array, " rows"]


class Band(NamedTuple):
    """The distances in (near, far]: either all equal, or all kept. Of them the first `take` ids are kept."""

    near: Float32[Array, " rows"]
    far: Float32[Array, " rows"]
    num_near: Int32[Array, " rows"]
    num_far: Int32[Array, " rows"]
    take: Int32[Array, " rows"]


def bisect_cut(distance: Distance, vocab: int, top_k: RowBits, top_p: RowFloat) -> Cut:
    """Where top_k, then top_p over what it leaves, end the prefix.

    Args:
        distance: Pads of the last lane are at infinity.
        vocab: Real ids.
        top_k: 1 to vocab; vocab keeps all.
        top_p: Smallest prefix whose share reaches it; ≥ 1 keeps all.

    Cost: At most 31 counts for each of top_k and top_p, then as many as an id has bits where equals must be told apart; each
        reads `distance` once. All stop early when every row is settled.
    """
    by_k = _bound(distance, vocab, top_k < vocab, lambda count, mass: count >= top_k, exact=top_k)
    by_k = by_k._replace(take=top_k - by_k.num_near)
    near_mass, tie_mass = _masses(distance, by_k)
    target = top_p * (near_mass + by_k.take * tie_mass)
    by_p = _bound(distance, vocab, top_p < 1, lambda count, mass: mass >= target)
    near_mass, tie_mass = _masses(distance, by_p)
    missing = jnp.ceil((target - near_mass) / jnp.maximum(tie_mass, TINY))
    # Clipped while still a float: a huge quotient has no int32.
    take = jnp.clip(missing, 1, by_p.take.astype(jnp.float32)).astype(jnp.int32)
    by_p = by_p._replace(take=jnp.where(top_p < 1, take, by_p.take))
    tighter = by_p.num_near + by_p.take < by_k.num_near + by_k.take
    band = Band(*(jnp.where(tighter, p, k) for p, k in zip(by_p, by_k, strict=True)))
    return Cut(band.near, band.far, _last_id(distance, band))


def _bound(
    distance: Distance,
    vocab: int,
    active: Bool[Array, " rows"],
    reached: Callable[[RowBits, RowFloat], Bool[Array, " rows"]],
    *,
    exact: RowBits | None = None,
) -> Band:
    """The smallest distance at which count and mass of the tokens within it have `reached` what is wanted.

    A row also stops when one token is left between the two ends, or when the far end holds `exact` tokens.
    """
    rows = distance.shape[0]

    def unsettled(lo: RowBits, hi: RowBits, n_lo: RowBits, n_hi: RowBits) -> Bool[Array, " rows"]:
        going = active & (hi - lo > 1) & (n_hi - n_lo > 1)
        return going if exact is None else going & (n_hi != exact)

    def halve(state: tuple[RowBits, RowBits, RowBits, RowBits]) -> tuple[RowBits, RowBits, RowBits, RowBits]:
        lo, hi, n_lo, n_hi = state
        going = unsettled(*state)
        mid = lo + (hi - lo) // 2
        count, mass = _within(distance, _as_float(mid))
        yes = reached(count, mass)
        down, up = going & yes, going & ~yes
        return jnp.where(up, mid, lo), jnp.where(down, mid, hi), jnp.where(up, count, n_lo), jnp.where(down, count, n_hi)

    start = (
        jnp.full(rows, -1, jnp.int32),
        jnp.full(rows, INF_BITS, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, vocab, jnp.int32),
    )
    lo, hi, n_lo, n_hi = lax.while_loop(lambda s: unsettled(*s).any(), halve, start)
    return Band(_as_float(lo), _as_float(hi), n_lo, n_hi, n_hi - n_lo)


def _last_id(distance: Distance, band: Band) -> RowBits:
    """The id at which the wanted number of the band's tokens is complete; the greatest integer where all are kept."""
    rows, lanes, lane = distance.shape
    partial = band.take < band.num_far - band.num_near
    inside = (distance > wide(band.near)) & (distance <= wide(band.far))

    def halve(state: tuple[RowBits, RowBits]) -> tuple[RowBits, RowBits]:
        lo, hi = state
        mid = lo + (hi - lo) // 2
        enough = _sum(inside & (token_ids(distance) <= mid[:, None, None]), jnp.int32) >= band.take
        going = partial & (hi - lo > 1)
        return jnp.where(going & ~enough, mid, lo), jnp.where(going & enough, mid, hi)

    start = jnp.full(rows, -1, jnp.int32), jnp.full(rows, lanes * lane - 1, jnp.int32)
    _, last = lax.while_loop(lambda s: (partial & (s[1] - s[0] > 1)).any(), halve, start)
    return jnp.where(partial, last, ANY_ID)


def _masses(distance: Distance, band: Band) -> tuple[RowFloat, RowFloat]:
    """Weight of the tokens before the band, and of each one in it."""
    near, far = _within(distance, band.near)[1], _within(distance, band.far)[1]
    return near, (far - near) / jnp.maximum(band.num_far - band.num_near, 1)


def _within(distance: Distance, bound: RowFloat) -> tuple[RowBits, RowFloat]:
    inside = distance <= wide(bound)
    return _sum(inside, jnp.int32), _sum(jnp.where(inside, jnp.exp(-distance), 0), jnp.float32)


def _sum(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    # Lanes first: XLA:CPU makes vector code of a sum over a leading axis only.
    return values.sum(axis=1, dtype=dtype).sum(axis=-1, dtype=dtype)


def _as_float(bits: RowBits) -> RowFloat:
    return jnp.where(bits < 0, -1.0, lax.bitcast_convert_type(bits, jnp.float32))
