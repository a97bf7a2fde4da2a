"""Which tokens top_k, top_p and min_p leave, without sorting the vocabulary.

Knows distances: `(greatest score − score) / temperature`, so 0 is the most likely token, a masked token is at infinity, and a
token's weight is `exp(−distance)`. All three rules keep a prefix of the tokens in the order (distance, id); what is found here is
the end of that prefix. Distances are not negative, so their bits, read as integers, are in the same order, and bisecting
over those integers ends at an exact answer after at most 31 counts. Knows nothing of keys, penalties or the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from octavo_kernels._src.vocab import LANE

INF_BITS: Final = 0x7F800000
ANY_ID: Final = 2**31 - 1
TINY: Final = 1.1754944e-38

Distance = Float32[Array, "rows lanes lane"]
RowBits = Int32[Array, " rows"]
RowFloat = Float32[Array, " rows"]


class Cut(NamedTuple):
    """End of the kept prefix: all up to `near`, and those up to `far` whose id is at most `last_id`."""

    near: Float32[Array, " rows"]
    far: Float32[Array, " rows"]
    last_id: Int32[Array, " rows"]


class Band(NamedTuple):
    """The distances in (near, far]: either all equal, or all kept. Of them the first `take` ids are kept."""

    near: Float32[Array, " rows"]
    far: Float32[Array, " rows"]
    num_near: Int32[Array, " rows"]
    num_far: Int32[Array, " rows"]
    take: Int32[Array, " rows"]


def keep(distance: Distance, cut: Cut) -> Bool[Array, "rows lanes lane"]:
    """The tokens inside the cut."""
    tied = (distance <= _wide(cut.far)) & (_ids(distance) <= cut.last_id[:, None, None])
    return (distance <= _wide(cut.near)) | tied


def everything(rows: int) -> Cut:
    """The cut that keeps all tokens."""
    inf = jnp.full(rows, jnp.inf, jnp.float32)
    return Cut(inf, inf, jnp.full(rows, ANY_ID, jnp.int32))


def find_cut(distance: Distance, vocab: int, top_k: RowBits, top_p: RowFloat, min_p: RowFloat) -> Cut:
    """Where top_k, then top_p over what it leaves, then min_p end the prefix.

    Among equals lower ids come first, so top_k=1, a tiny top_p and min_p=1 each leave exactly the greedy token.

    Args:
        distance: Pads of the last lane are at infinity.
        vocab: Real ids.
        top_k: ≤ 0 or ≥ vocab keeps all.
        top_p: Smallest prefix whose share reaches it; ≥ 1 keeps all.
        min_p: Least weight relative to the most likely token; ≤ 0 keeps all.

    Cost: At most 31 counts for each of top_k and top_p, 31 more where equals must be told apart by id; each reads `distance` once.
        Rows stop early, a rule nobody uses costs one.
    """
    top_k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_k = jnp.where(min_p >= 1, 1, top_k)
    by_k = _bound(distance, top_k < vocab, lambda count, mass: count >= top_k, exact=top_k)
    by_k = by_k._replace(take=top_k - by_k.num_near)
    near_mass, tie_mass = _masses(distance, by_k)
    target = top_p * (near_mass + by_k.take * tie_mass)
    by_p = _bound(distance, top_p < 1, lambda count, mass: mass >= target)
    near_mass, tie_mass = _masses(distance, by_p)
    missing = jnp.ceil((target - near_mass) / jnp.maximum(tie_mass, TINY))
    ties = by_p.num_far - by_p.num_near
    # A row far above int32 would wrap; clip as floats first.
    take = jnp.clip(missing, 1, ties.astype(jnp.float32)).astype(jnp.int32)
    by_p = by_p._replace(take=jnp.where(top_p < 1, take, ties))
    tighter = by_p.num_near + by_p.take < by_k.num_near + by_k.take
    band = Band(*(jnp.where(tighter, p, k) for p, k in zip(by_p, by_k, strict=True)))
    cut = Cut(band.near, band.far, _last_id(distance, band))
    floor = jnp.where(min_p > 0, -jnp.log(jnp.clip(min_p, TINY, 1.0)), jnp.inf)
    return cut._replace(near=jnp.minimum(cut.near, floor), far=jnp.minimum(cut.far, floor))


def _bound(
    distance: Distance,
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

    size = distance.shape[1] * LANE
    start = (
        jnp.full(rows, -1, jnp.int32),
        jnp.full(rows, INF_BITS, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.full(rows, size, jnp.int32),
    )
    lo, hi, n_lo, n_hi = lax.while_loop(lambda s: unsettled(*s).any(), halve, start)
    return Band(_as_float(lo), _as_float(hi), n_lo, n_hi, n_hi - n_lo)


def _last_id(distance: Distance, band: Band) -> RowBits:
    """The id at which the wanted number of the band's tokens is complete; the greatest integer where all are kept."""
    rows, lanes, lane = distance.shape
    partial = band.take < band.num_far - band.num_near
    inside = (distance > _wide(band.near)) & (distance <= _wide(band.far))

    def halve(state: tuple[RowBits, RowBits]) -> tuple[RowBits, RowBits]:
        lo, hi = state
        mid = lo + (hi - lo) // 2
        enough = _sum(inside & (_ids(distance) <= mid[:, None, None]), jnp.int32) >= band.take
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
    inside = distance <= _wide(bound)
    return _sum(inside, jnp.int32), _sum(jnp.where(inside, jnp.exp(-distance), 0), jnp.float32)


def _sum(values: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    # Lanes first: XLA:CPU makes vector code of a sum over a leading axis only.
    return values.sum(axis=1, dtype=dtype).sum(axis=-1, dtype=dtype)


def _as_float(bits: RowBits) -> RowFloat:
    return jnp.where(bits < 0, -1.0, lax.bitcast_convert_type(bits, jnp.float32))


def _ids(distance: Distance) -> Int32[Array, "1 lanes lane"]:
    _, lanes, lane = distance.shape
    return jnp.arange(lanes * lane, dtype=jnp.int32).reshape(1, lanes, lane)


def _wide(values: RowFloat) -> Float32[Array, "rows 1 1"]:
    return values[:, None, None]
