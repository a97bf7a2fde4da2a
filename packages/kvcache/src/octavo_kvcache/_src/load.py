"""Blocks that come from outside: made findable as if a sequence had computed them, and leased by hand until somebody has matched them.

Built on the functions of the tree alone; knows no sequences. Only for caches whose groups are all whole: a block has one id in every group.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from octavo_core.plan import OK, Loaded
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.evict import evict
from octavo_kvcache._src.lease import Loan, allocate, insert, lease, lend, release, surplus
from octavo_kvcache._src.match import match
from octavo_kvcache._src.policy import EvictionPolicy
from octavo_kvcache._src.share import allowance, own_space, spare_for
from octavo_kvcache._src.state import RadixState


def load(
    spec: CacheSpec,
    radix: RadixState,
    tokens: Int32[Array, " max_len"],
    first: Int32[Array, ""],
    upto: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
    tenant: Int32[Array, ""],
    *,
    policy: EvictionPolicy,
    quotas: tuple[int, ...],
) -> tuple[RadixState, Loaded]:
    """See `RadixCache.load`."""
    size, block_size = spec.max_blocks, spec.block_size
    owner = jnp.clip(tenant, 0, len(quotas) - 1)
    if len(quotas) > 1:
        namespace = own_space(namespace[None], owner[None])[0]
    found = match(radix, tokens, upto * block_size, namespace)
    radix, _ = lease(radix, found.block_ids, found.generations)
    lack = jnp.where(found.num_blocks >= first, upto - found.num_blocks, 0)
    count = jnp.clip(jnp.minimum(lack, spare_for(radix, owner, quotas)), 0, size)
    may_lose = allowance(radix, count[None], owner[None], quotas)
    short = jnp.maximum(count - radix.read().num_free, 0)
    radix = evict(radix, short, policy, max_depth=size - 1, allowance=may_lose)
    radix, ids, generations, status = allocate(radix, count, size=size, tenant=owner)
    rest = lax.dynamic_slice(jnp.pad(tokens, (0, tokens.shape[0])), (found.num_blocks * block_size,), (tokens.shape[0],))
    radix, ids, generations, _ = insert(radix, found, rest, ids, generations, namespace)
    filed = jnp.sum((ids > 0) & radix.is_indexed[ids], dtype=jnp.int32)
    return radix, Loaded(
        block_ids=_after(found.block_ids, ids, found.num_blocks),
        generations=_after(found.generations, generations, found.num_blocks),
        num_found=found.num_blocks,
        num_new=jnp.where(status == OK, filed, 0),
    )


def _after(first: Int32[Array, " ids"], then: Int32[Array, " ids"], count: Int32[Array, ""]) -> Int32[Array, " ids"]:
    """The first `count` of one list, then the other."""
    j = jnp.arange(first.shape[0], dtype=jnp.int32)
    return jnp.where(j < count, first, then[jnp.maximum(j - count, 0)])


def unload(radix: RadixState, loaded: Loaded, *, policy: EvictionPolicy) -> RadixState:
    """See `RadixCache.unload`. Blocks that found no place in the index stand last and are free from now on."""
    return release(radix, loaded.block_ids, loaded.generations, policy=policy)[0]


def lend_surplus(
    spec: CacheSpec, radix: RadixState, *, high: float, low: float, size: int, policy: EvictionPolicy
) -> tuple[RadixState, Loan]:
    """See `RadixCache.lend`."""
    return lend(radix, surplus(radix, high=high, low=low), size=size, max_depth=spec.max_blocks - 1, policy=policy)
