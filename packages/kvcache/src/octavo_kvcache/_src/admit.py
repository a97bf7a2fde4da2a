"""Admission: match a prompt and lease what was found, if the pool could give the rest."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.plan import OK, OUT_OF_BLOCKS, Admitted
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.match import Match, match
from octavo_kvcache._src.state import CacheState, num_nodes


def admit(
    spec: CacheSpec,
    cache: CacheState,
    sequence: Int32[Array, " arrivals"],
    tokens: Int32[Array, "arrivals max_len"],
    lengths: Int32[Array, " arrivals"],
    namespace: UInt32[Array, "arrivals 2"],
    want: Int32[Array, "arrivals groups"],
    reserve: Int32[Array, " groups"],
) -> tuple[CacheState, Admitted]:
    """See `BlockCache.admit`."""
    arrivals = sequence.shape[0]
    named = (sequence >= 0) & (sequence < spec.max_sequences)

    def serve(i: Array, carry: tuple[CacheState, Array, Array, Array]) -> tuple[CacheState, Array, Array, Array]:
        cache, promised, cached_len, status = carry
        found = match(cache, tokens[i], lengths[i] - 1, namespace[i])
        total = jnp.max(want[i])
        lack = jnp.maximum(total - found.num_blocks, 0)
        idle = _idle(cache, found)
        empty = cache.held[jnp.where(named[i], sequence[i], 0)] == 0
        can = empty & (total <= spec.max_blocks) & jnp.all(reserve <= _spare(spec, cache) - idle - promised - lack)
        cache = _lease(cache, named[i] & can, sequence[i], found, idle, namespace[i])
        promised = promised + jnp.where(named[i] & can, lack, 0)
        cached_len = cached_len.at[i].set(jnp.where(named[i] & can, found.num_blocks * spec.block_size, 0))
        return cache, promised, cached_len, status.at[i].set(jnp.where(named[i] & ~can, OUT_OF_BLOCKS, OK))

    def maybe(i: Array, carry: tuple[CacheState, Array, Array, Array]) -> tuple[CacheState, Array, Array, Array]:
        return lax.cond(named[i], lambda c: serve(i, c), lambda c: c, carry)

    nothing = jnp.zeros(arrivals, jnp.int32)
    cache, _, cached_len, status = lax.fori_loop(0, arrivals, maybe, (cache, jnp.int32(0), nothing, nothing))
    return cache, Admitted(cached_len, status)


def _idle(cache: CacheState, found: Match) -> Int32[Array, ""]:
    """Blocks of the match that nobody leases yet: leasing them makes them unavailable to others."""
    return jnp.sum((found.block_ids > 0) & (cache.refcount[found.block_ids] == 0), dtype=jnp.int32)


def _spare(spec: CacheSpec, cache: CacheState) -> Int32[Array, " groups"]:
    """Blocks each group could still give."""
    counters = cache.read()
    surplus = np.array(spec.num_blocks, np.int32) - num_nodes(spec)
    return counters.num_free + counters.num_evictable + surplus


def _lease(
    cache: CacheState,
    take: Bool[Array, ""],
    sequence: Int32[Array, ""],
    found: Match,
    idle: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
) -> CacheState:
    row = jnp.where(take, sequence, cache.held.shape[0])
    at = jnp.where(take & (found.block_ids > 0), found.block_ids, cache.refcount.shape[0])
    cache = cache._replace(
        refcount=cache.refcount.at[at].add(1, mode="drop"),
        block_table=cache.block_table.at[:, row].set(found.block_ids, mode="drop"),
        held=cache.held.at[row].set(found.num_blocks, mode="drop"),
        committed=cache.committed.at[row].set(found.num_blocks, mode="drop"),
        sealed=cache.sealed.at[row].set(False, mode="drop"),
        chain=cache.chain.at[row].set(found.chain, mode="drop"),
        sequence_namespace=cache.sequence_namespace.at[row].set(namespace, mode="drop"),
    )
    return cache.write(num_evictable=cache.read().num_evictable - jnp.where(take, idle, 0))
