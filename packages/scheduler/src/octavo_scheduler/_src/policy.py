"""The decisions of a step: how many tokens each sequence computes, how much KV is kept for it, and who gives way when blocks run out.

Pure functions of the state; they know no cache and move no tokens.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from octavo_core.native import inverse, running_sum, unless
from octavo_scheduler._src import chunks, order
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.state import SchedulerState

LONGEST_GUESS: Final = 4_096
"""Tokens of answer that `optimistic` reckons with at most: few requests mean the limit that their client left open."""

SURE_SHARE: Final = 4
"""One part in so many of a sequence's KV is kept for its growth whatever the estimate: cheap beside computing all of it again."""

MOST: Final = 2**31 - 1

GROWTH_LEAST: Final = 100
GROWTH_MOST: Final = 1_000


def query_lens(
    state: SchedulerState, config: SchedulerConfig, block_size: int = 1, rank: Int32[Array, " sequences"] | None = None
) -> Int32[Array, " sequences"]:
    """New tokens of each sequence in the next step, 0 for those left out. `rank`: places in policy order, where they are known.

    Sequences with one token to go are served first, `N_decode` of them; the others share what is left of the budget in policy
    order: `C_avail = max(0, T_budget − N_decode)`, `c_p = min(U_p, C_chunk, what is left of C_avail)`. A chunk never reaches into
    tokens in flight, so a sequence with more than one token to go waits until their ids are known. Sequences beyond
    `max_num_partial_prefills`, and long ones beyond `max_long_partial_prefills`, take nothing: shorter ones pass them.

    Source: Sarathi-Serve (Agrawal et al., OSDI 2024), stall-free batching; here the chunk is also bounded per sequence.
    """
    remaining = state.total_len - state.computed_len
    single = state.is_open & (remaining == 1)
    partial = state.is_open & (remaining > 1) & (state.in_flight == 0)
    all_decode = ~jnp.any(partial) & (jnp.sum(single, dtype=jnp.int32) <= config.token_budget)

    def share() -> Int32[Array, " sequences"]:
        return _shared_out(state, config, block_size, rank, single, jnp.where(partial, remaining, 0))

    return unless(all_decode, lambda: single.astype(jnp.int32), share)


def _shared_out(
    state: SchedulerState,
    config: SchedulerConfig,
    block_size: int,
    rank: Int32[Array, " sequences"] | None,
    single: Bool[Array, " sequences"],
    remaining: Int32[Array, " sequences"],
) -> Int32[Array, " sequences"]:
    """The budget shared out among those with one token to go and the `remaining` prompt tokens of others."""
    ranked_single = single[state.by_rank].astype(jnp.int32)
    decode = jnp.where(running_sum(ranked_single) <= config.token_budget, ranked_single, 0)
    num_decodes = jnp.sum(decode, dtype=jnp.int32)
    want = _wanted_chunks(remaining[state.by_rank], chunks.chunk_limit(num_decodes, config), config)
    before = running_sum(want) - want
    room = chunks.available(num_decodes, state.costs, config, block_size, jnp.sum(remaining > 0, dtype=jnp.int32))
    ranked = decode + jnp.clip(room - before, 0, want)
    return ranked[inverse(state.by_rank) if rank is None else rank]


def _wanted_chunks(
    remaining: Int32[Array, " sequences"], limit: Int32[Array, ""], config: SchedulerConfig
) -> Int32[Array, " sequences"]:
    """The chunk each sequence asks for, in policy order: `min(U_p, C_chunk)`, and 0 for those that others keep out."""
    want = jnp.minimum(remaining, limit)
    if config.long_prefill_token_threshold:
        is_long = remaining > config.long_prefill_token_threshold
        want = jnp.where(is_long, jnp.minimum(want, config.long_prefill_token_threshold), want)
        if config.max_long_partial_prefills:
            want = jnp.where(is_long & (running_sum(is_long) > config.max_long_partial_prefills), 0, want)
    if config.max_num_partial_prefills:
        want = jnp.where(running_sum(want > 0) > config.max_num_partial_prefills, 0, want)
    return want.astype(jnp.int32)


def choose_victim(
    state: SchedulerState, rank: Int32[Array, " sequences"], lack: Int32[Array, ""], config: SchedulerConfig, block_size: int
) -> Int32[Array, ""]:
    """Who gives its blocks up so that others get the `lack` blocks they are short of, or −1 where it would help nobody.

    Among the sequences the policy values least (the lowest priority, the tenant served most), the one that costs least to compute
    again among those that free enough, or the one that frees most where none does; the last in policy order breaks ties. A resumed
    sequence is protected until it has a token more than when it was preempted, and the first in policy order always: it ends, and
    then the next is first. Were all protected, they are chosen from all the same. Sequences at their limit are about to end and are
    left alone, and so is the only open one: it waits for those.
    """
    most = MOST
    candidates = state.is_open & (rank > jnp.min(jnp.where(state.is_open, rank, most)))
    candidates = _prefer(candidates, state.total_len > state.guard_len)
    if config.policy in ("priority", "fair"):
        worth = state.priority if config.policy == "priority" else state.served[order.tenants(state)]
        candidates &= worth == jnp.max(jnp.where(candidates, worth, -most))
    # What was found at admission is most likely shared: leaving it frees nothing, and finds it again.
    own_len = jnp.maximum(state.computed_len - state.found_len, 0)
    frees = blocks_for(own_len, block_size)
    enough = candidates & (frees >= lack)
    candidates = jnp.where(jnp.any(enough), enough, candidates & (frees == jnp.max(jnp.where(candidates, frees, 0))))
    candidates &= own_len == jnp.min(jnp.where(candidates, own_len, most))
    last = jnp.max(jnp.where(candidates, rank, -1))
    found = jnp.min(jnp.where(candidates & (rank == last), jnp.arange(rank.size, dtype=jnp.int32), most))
    return jnp.where(last >= 0, found, -1)


def _prefer(candidates: Bool[Array, " sequences"], trait: Bool[Array, " sequences"]) -> Bool[Array, " sequences"]:
    """Those with the trait, or all where none has it."""
    chosen = candidates & trait
    return jnp.where(jnp.any(chosen), chosen, candidates)


def is_served_ahead(state: SchedulerState, first: Int32[Array, ""], config: SchedulerConfig) -> Bool[Array, ""]:
    """Whether a running sequence's tenant was served more than `fair_quantum` beyond the tenant of the first in line."""
    if config.policy != "fair":
        return jnp.bool_(False)
    share = order.tenants(state)
    most = jnp.max(jnp.where(state.is_open, state.served[share], 0))
    return most > state.served[share[first]] + config.fair_quantum * 1_000


def blocks_for(num_tokens: Int32[Array, "..."], block_size: int) -> Int32[Array, "..."]:
    """Blocks that hold so many tokens."""
    return lax.div(num_tokens + (block_size - 1), jnp.int32(block_size))


def wanted_blocks(state: SchedulerState, config: SchedulerConfig, block_size: int) -> Int32[Array, " sequences"]:
    """Blocks kept for each sequence: for all it has, and for what it may still write. The last token before the limit is never computed.

    `none`: one token. `guaranteed`: up to its limit. `optimistic`: `growth` thousandths of that, an answer of `LONGEST_GUESS` at most, but a `SURE_SHARE`-th
    of what it has whatever the estimate, and one token always.

    Source of an estimate that rises with preemptions and falls with time: SGLang's `new_token_ratio`.
    """
    most = state.limit_len - 1
    if config.reservation == "guaranteed":
        return blocks_for(most, block_size)
    if config.reservation == "none":
        return blocks_for(jnp.minimum(state.total_len + 1, most), block_size)
    rest = jnp.maximum(state.limit_len - 1 - state.total_len, 0)
    guess = jnp.minimum(rest, LONGEST_GUESS) * state.growth // GROWTH_MOST
    growth = jnp.maximum(jnp.maximum(guess, jnp.minimum(rest, state.total_len // SURE_SHARE)), 1)
    return blocks_for(jnp.minimum(state.total_len + growth, most), block_size)


def learn_growth(state: SchedulerState, preempts: Bool[Array, ""]) -> Int32[Array, ""]:
    """`growth` after a step: doubled where somebody had to give way, else a thousandth less."""
    return jnp.clip(jnp.where(preempts, 2 * state.growth, state.growth - 1), GROWTH_LEAST, GROWTH_MOST)


def promised_blocks(state: SchedulerState, config: SchedulerConfig, block_size: int) -> Int32[Array, ""]:
    """Blocks kept for running sequences beyond what they hold: newcomers must leave these alone.

    Promises of one token more, made at admission, can all be kept, which is why protected sequences cannot block one another for ever.
    """
    lacking = wanted_blocks(state, config, block_size) - blocks_for(state.computed_len, block_size)
    return jnp.sum(jnp.where(state.is_open, jnp.maximum(lacking, 0), 0))
