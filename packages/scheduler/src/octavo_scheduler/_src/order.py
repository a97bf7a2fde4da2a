"""Who goes before whom: a key for each sequence under each policy, and the books some policies keep.

Pure functions of the state. Only `arrive` sorts; between two arrivals the order stands, since nobody new asks for a place.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from octavo_core.native import sorted_again
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.state import FREE, WAITING, SchedulerState

DECODE_COST = 2
"""What a sampled token costs its tenant, in prompt tokens."""

_MOST = 1 << 30


def sort_key(state: SchedulerState, config: SchedulerConfig) -> tuple[Int32[Array, " sequences"], ...]:
    """Keys of each sequence, the most telling last (as `jnp.lexsort` wants them); arrival breaks every tie."""
    if config.policy == "priority":
        return state.order, state.priority
    if config.policy == "edf":
        return state.order, state.deadline
    if config.policy == "fair":
        return state.order, state.served[tenants(state)]
    if config.policy == "lpm":
        waits = state.status == WAITING
        willing = waits & (state.passed < config.max_overtakes)
        return state.order, jnp.where(willing, -state.found_len, 0), willing.astype(jnp.int32), waits.astype(jnp.int32)
    return (state.order,)


def put_in_order(state: SchedulerState, config: SchedulerConfig) -> SchedulerState:
    """Everybody in policy order."""
    return state._replace(by_rank=sorted_again(state.by_rank, sort_key(state, config)))


def tenants(state: SchedulerState) -> Int32[Array, " sequences"]:
    """Tenant of each sequence, as far as they are told apart."""
    return jnp.clip(state.tenant, 0, state.served.size - 1)


def settle_shares(state: SchedulerState) -> SchedulerState:
    """Count what tenants were served from the least served one that has sequences now.

    A tenant that was away keeps no credit: it comes back beside the least served one, not before it.

    Source: the counters of VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).
    """
    shares = jnp.arange(state.served.size, dtype=jnp.int32)
    present = jnp.any((state.status != FREE) & (tenants(state) == shares[:, None]), axis=1)
    least = jnp.min(jnp.where(present, state.served, _MOST))
    return state._replace(served=jnp.where(jnp.any(present), jnp.maximum(state.served - least, 0), state.served))


def charge(
    state: SchedulerState, config: SchedulerConfig, query_len: Int32[Array, " sequences"], samples: Array
) -> Int32[Array, " tenants"]:
    """`served` after a step: a prompt token costs 1 and a sampled one `DECODE_COST`, divided by the tenant's weight.

    What is computed again after a preemption is not charged again. Counted in thousandths of a token of weight 1, and never beyond 2³⁰.
    """
    fresh = jnp.maximum(state.computed_len + query_len - jnp.maximum(state.computed_len, state.guard_len - 1), 0)
    cost = jnp.where(query_len > 0, fresh, 0) + (DECODE_COST - 1) * samples
    weights = jnp.asarray(config.tenant_weights, jnp.int32)
    shares = jnp.arange(weights.size, dtype=jnp.int32)
    tokens = jnp.sum(jnp.where(tenants(state) == shares[:, None], cost, 0), axis=1, dtype=jnp.int32)
    return jnp.minimum(state.served + tokens * 1_000 // weights, _MOST)


def note_overtaken(state: SchedulerState, admitted: Int32[Array, ""]) -> Int32[Array, " sequences"]:
    """`passed` once this sequence is admitted."""
    return state.passed + ((state.status == WAITING) & (state.order < state.order[admitted]))
