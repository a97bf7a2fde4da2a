"""Shares of the pool: what a tenant can still be given without taking from another's quota.

A tenant that uses no more than its quota loses no cached block to others. Quotas are kept when blocks are evicted, not when free ones are
handed out: a free block goes to whoever asks first. With one tenant and a quota of 0 all of this is `free + evictable`.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from octavo_kvcache._src.scan import prefix_sum
from octavo_kvcache._src.state import RadixState

MARKS: Final = np.array([0xB5297A4D, 0x68E31DA5], np.uint32)


def own_space(namespace: UInt32[Array, "arrivals 2"], tenant: Int32[Array, " arrivals"]) -> UInt32[Array, "arrivals 2"]:
    """The tree that a tenant reads and extends where there are several.

    They share no prefix, whatever their namespaces: what one may lose must not lead to what another keeps.
    """
    return namespace ^ (tenant[:, None].astype(jnp.uint32) * MARKS)


def takeable(radix: RadixState, quotas: tuple[int, ...]) -> Int32[Array, " tenants"]:
    """Cached blocks of each tenant that anybody may have."""
    counters = radix.read()
    return jnp.minimum(counters.evictable, jnp.maximum(counters.used - np.array(quotas, np.int32), 0))


def spare_for(radix: RadixState, tenant: Int32[Array, ""], quotas: tuple[int, ...]) -> Int32[Array, ""]:
    """Blocks the tree could give to a tenant."""
    counters = radix.read()
    if radix.num_tenants == 1:
        return counters.num_free + counters.evictable[0]
    shared = takeable(radix, quotas)
    return counters.num_free + jnp.sum(shared, dtype=jnp.int32) + (counters.evictable - shared)[tenant]


def serve_in_order(
    radix: RadixState, lack: Int32[Array, " sequences"], tenant: Int32[Array, " sequences"], quotas: tuple[int, ...]
) -> Int32[Array, " sequences"]:
    """What the tree can give each sequence in this order: all it lacks, or nothing from the first that gets nothing on.

    A sequence that lacks more than there is must be given as `lack` above `free + evictable`, but not so far that sums overflow.
    """
    counters = radix.read()
    if radix.num_tenants == 1:
        return jnp.where(prefix_sum(lack) <= counters.num_free + counters.evictable[0], lack, 0)
    shared = takeable(radix, quotas)
    own = counters.evictable - shared
    asked = prefix_sum(jnp.where(tenant == np.arange(radix.num_tenants)[:, None], lack, 0))
    beyond = jnp.sum(jnp.maximum(asked - own[:, None], 0), axis=0)
    return jnp.where(beyond <= counters.num_free + jnp.sum(shared), lack, 0)


def allowance(
    radix: RadixState, given: Int32[Array, " sequences"], tenant: Int32[Array, " sequences"], quotas: tuple[int, ...]
) -> Int32[Array, " tenants"] | None:
    """Most blocks each tenant may lose for what is given: what anybody may have, and of the rest what it is given itself."""
    if radix.num_tenants == 1:
        return None
    shared = takeable(radix, quotas)
    gets = jnp.zeros(radix.num_tenants, jnp.int32).at[tenant].add(given)
    return shared + jnp.minimum(radix.read().evictable - shared, gets)
