"""Which tokens top_k, top_p and min_p leave, without sorting the vocabulary.

Knows that the most likely tokens are in the lanes with the best tokens: the best 128 tokens of the best 64 lanes settle nearly
every row, and a row they do not settle (a very flat one, or a large top_k) is bisected. Both ways are exact.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from octavo_kernels._src.bisect import bisect_cut
from octavo_kernels._src.cut import ANY_ID, Cut
from octavo_kernels._src.vocab import LANE

NUM_LANES: Final = 64
NUM_NEAREST: Final = 128
TINY: Final = 1.1754944e-38

Distance = Float32[Array, "rows lanes lane"]
RowInt = Int32[Array, " rows"]
RowFloat = Float32[Array, " rows"]


class Nearest(NamedTuple):
    """The most likely tokens of each row in the order (distance, id).

    Attributes:
        distance, token_id: Entries from `num` on may lack tokens between them.
        num: Leading entries that are certainly the most likely ones.
        complete: These are all the tokens there are; all others are banned.
    """

    distance: Float32[Array, "rows nearest"]
    token_id: Int32[Array, "rows nearest"]
    num: Int32[Array, " rows"]
    complete: Bool[Array, " rows"]


def find_cut(distance: Distance, vocab: int, top_k: RowInt, top_p: RowFloat, min_p: RowFloat) -> Cut:
    """Where top_k, then top_p over what it leaves, then min_p end the prefix.

    Among equals lower ids come first, so top_k=1, a tiny top_p and min_p=1 each leave exactly the greedy token.

    Args:
        distance: Pads of the last lane are at infinity.
        vocab: Real ids.
        top_k: ≤ 0 or ≥ vocab keeps all.
        top_p: Smallest prefix whose share reaches it; ≥ 1 keeps all.
        min_p: Least weight relative to the most likely token; ≤ 0 keeps all.

    Cost: Three passes over `distance`, and up to 80 over the rows that must be bisected.
    """
    top_k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    top_k = jnp.where(min_p >= 1, 1, top_k)
    quick, settled = _from_nearest(distance, nearest(distance), vocab, top_k, top_p)
    cut = lax.cond(
        settled.all(),
        lambda: quick,
        lambda: lax.platform_dependent(distance, top_k, top_p, settled, quick, cpu=_rowwise(vocab), default=_at_once(vocab)),
    )
    floor = jnp.where(min_p > 0, -jnp.log(jnp.clip(min_p, TINY, 1.0)), jnp.inf)
    return cut._replace(near=jnp.minimum(cut.near, floor), far=jnp.minimum(cut.far, floor))


def nearest(distance: Distance) -> Nearest:
    """The most likely tokens, as far as the best lanes tell.

    A token nearer than every token of the lanes left out cannot be missing; one at the same distance could be.
    """
    rows, lanes, _ = distance.shape
    num_lanes = min(NUM_LANES, lanes)
    best, lane_ids = lax.top_k(-distance.min(axis=-1), min(num_lanes + 1, lanes))
    outside = -best[:, num_lanes] if lanes > num_lanes else jnp.full(rows, jnp.inf, jnp.float32)
    # In the order of their ids, so that among equals the partial selection below prefers the lower id.
    lane_ids = jnp.sort(lane_ids[:, :num_lanes].astype(jnp.int32), axis=-1)
    inside = jnp.take_along_axis(distance, lane_ids[:, :, None], axis=1).reshape(rows, num_lanes * LANE)
    negative, at = lax.top_k(-inside, NUM_NEAREST)
    token_id = jnp.take_along_axis(lane_ids, at // LANE, axis=1) * LANE + at % LANE
    num = (-negative < outside[:, None]).sum(axis=-1, dtype=jnp.int32)
    return Nearest(-negative, token_id.astype(jnp.int32), num, jnp.isinf(outside) & (num < NUM_NEAREST))


def _from_nearest(
    distance: Distance, found: Nearest, vocab: int, top_k: RowInt, top_p: RowFloat
) -> tuple[Cut, Bool[Array, " rows"]]:
    """The cut, and for which rows it is right."""
    mass = jnp.cumsum(jnp.exp(-found.distance), axis=-1)
    within_k = jnp.take_along_axis(mass, jnp.minimum(top_k, NUM_NEAREST)[:, None] - 1, axis=1)[:, 0]
    total = jnp.exp(-distance).sum(axis=1).sum(axis=-1)
    target = top_p * jnp.where(top_k < vocab, within_k, total)
    num_p = jnp.where(top_p < 1, 1 + (mass < target[:, None]).sum(axis=-1, dtype=jnp.int32), vocab)
    num = jnp.minimum(top_k, num_p)
    settled = (num == vocab) | found.complete | ((num <= found.num) & ((top_k <= found.num) | (top_k == vocab)))
    num = jnp.where(found.complete, jnp.clip(num, 1, jnp.maximum(found.num, 1)), num)
    last = jnp.clip(num, 1, NUM_NEAREST)[:, None] - 1
    far = jnp.take_along_axis(found.distance, last, axis=1)[:, 0]
    # Just below: the previous float, or nothing.
    near = jnp.where(far > 0, jnp.nextafter(far, jnp.float32(0)), -1.0)
    last_id = jnp.take_along_axis(found.token_id, last, axis=1)[:, 0]
    whole = num == vocab
    cut = Cut(jnp.where(whole, jnp.inf, near), jnp.where(whole, jnp.inf, far), jnp.where(whole, ANY_ID, last_id))
    return cut, settled


class _rowwise:
    """Bisect the rows that need it one after the other: each fits a CPU's cache, and the others cost nothing."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def __call__(self, distance: Distance, top_k: RowInt, top_p: RowFloat, settled: Bool[Array, " rows"], quick: Cut) -> Cut:
        order = jnp.argsort(settled, stable=True)

        def one(i: Int32[Array, ""], cut: Cut) -> Cut:
            row = order[i]
            found = bisect_cut(distance[row][None], self.vocab, top_k[row][None], top_p[row][None])
            return Cut(*(old.at[row].set(new[0]) for old, new in zip(cut, found, strict=True)))

        return lax.fori_loop(0, (~settled).sum(), one, quick)


class _at_once:
    """Bisect all rows together, in few launches."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def __call__(self, distance: Distance, top_k: RowInt, top_p: RowFloat, settled: Bool[Array, " rows"], quick: Cut) -> Cut:
        found = bisect_cut(distance, self.vocab, jnp.where(settled, self.vocab, top_k), jnp.where(settled, 1.0, top_p))
        return Cut(*(jnp.where(settled, old, new) for old, new in zip(quick, found, strict=True)))
