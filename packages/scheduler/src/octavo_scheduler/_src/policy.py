"""The two decisions of a step: how many tokens each sequence computes, and who gives way when blocks run out.

Pure functions of the state; they know no cache and move no tokens.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.state import SchedulerState


def query_lens(state: SchedulerState, config: SchedulerConfig) -> Int32[Array, " sequences"]:
    """New tokens of each sequence in the next step, 0 for those left out.

    Sequences with one token to go are served first, `N_decode` of them; the others share what is left of the budget in policy
    order: `C_avail = max(0, T_budget − N_decode)`, `c_p = min(U_p, C_chunk, what is left of C_avail)`. A chunk never reaches into
    tokens in flight, so a sequence with more than one token to go waits until their ids are known.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024), stall-free batching; here the chunk is also bounded per sequence.
    """
    remaining = state.total_len - state.computed_len
    single = state.is_open & (remaining == 1)
    partial = state.is_open & (remaining > 1) & (state.in_flight == 0)
    ranked_single = single[state.by_rank].astype(jnp.int32)
    ranked_want = jnp.where(partial, jnp.minimum(remaining, config.chunk_tokens), 0)[state.by_rank]
    decode = jnp.where(jnp.cumsum(ranked_single) <= config.token_budget, ranked_single, 0)
    available = config.token_budget - jnp.sum(decode)
    before = jnp.cumsum(ranked_want) - ranked_want
    ranked = decode + jnp.clip(available - before, 0, ranked_want)
    return jnp.zeros_like(ranked).at[state.by_rank].set(ranked)


def choose_victim(state: SchedulerState, rank: Int32[Array, " sequences"]) -> Int32[Array, ""]:
    """Who gives its blocks up: the last in policy order that is not protected, or −1 where it would help nobody.

    A resumed sequence is protected until it has a token more than when it was preempted. Were all protected, the last gives way
    all the same: then the first can finish. Sequences at their limit are about to end and are left alone, and so is the only open one:
    it waits for those.
    """
    num_sequences = rank.size
    protected = state.total_len <= state.guard_len
    score = jnp.where(state.is_open, rank + jnp.where(protected, 0, num_sequences), -1)
    several = jnp.sum(state.is_open) > 1
    return jnp.where(several, jnp.argmax(score), -1).astype(jnp.int32)


def blocks_for(num_tokens: Int32[Array, "..."], block_size: int) -> Int32[Array, "..."]:
    """Blocks that hold so many tokens."""
    return (num_tokens + block_size - 1) // block_size


def wanted_blocks(state: SchedulerState, block_size: int) -> Int32[Array, " sequences"]:
    """Blocks each sequence needs to compute all it has and one token more; the last token before the limit is never computed."""
    return blocks_for(jnp.minimum(state.total_len + 1, state.limit_len - 1), block_size)


def promised_blocks(state: SchedulerState, block_size: int) -> Int32[Array, ""]:
    """Blocks that running sequences still lack of what they want: newcomers must leave these alone.

    Promises made at admission can all be kept, which is why protected sequences cannot block one another for ever.
    """
    lacking = wanted_blocks(state, block_size) - blocks_for(state.computed_len, block_size)
    return jnp.sum(jnp.where(state.is_open, jnp.maximum(lacking, 0), 0))
