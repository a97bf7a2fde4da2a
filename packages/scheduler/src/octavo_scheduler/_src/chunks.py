"""How much prompt a step takes: `C_chunk` and `C_avail` under each chunk policy, and what `slo` learns of the cost of a step.

Knows counts and times; knows no sequence and no block.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from octavo_core.plan import StepResult
from octavo_scheduler._src.config import SchedulerConfig

STEPS: Final = ((-1, 2048), (32, 1024), (64, 512))
"""`adaptive`: above so many decode rows a chunk is so long; the last that applies."""

DECODE_STEPS: Final = 2.5
"""`slo` without a target: a step with prompt tokens lasts as long as so many without any."""

_SCALE: Final = (1.0, 1.0 / 64.0, 1.0 / 1024.0)
"""Units of the fit, so that its three unknowns are of one size."""

_FORGET: Final = 0.97
_DOUBT: Final = 1e-3
"""Weight of what is assumed at the start, against 1 for each step seen."""


def chunk_limit(num_decodes: Int32[Array, ""], config: SchedulerConfig) -> Int32[Array, ""]:
    """`C_chunk`: most prompt tokens of one sequence in this step."""
    size = jnp.int32(config.chunk_tokens)
    if config.chunk_policy == "adaptive":
        for above, tokens in STEPS:
            size = jnp.where(num_decodes > above, min(tokens, config.chunk_tokens), size)
    return size


def available(
    num_decodes: Int32[Array, ""], costs: Float32[Array, "4 4"], config: SchedulerConfig, block_size: int
) -> Int32[Array, ""]:
    """`C_avail`: prompt tokens of all sequences together, `max(0, T_budget − N_decode)` or what `slo` leaves of it.

    `slo`: the largest `Σc_p` with `t_base + α·N_decode + β·Σc_p ≤ target`, at least one block; with nobody decoding nobody waits for
    the step and the budget stands. Where the device pads steps, one of its sizes is filled.
    """
    room = jnp.maximum(config.token_budget - num_decodes, 0)
    if config.chunk_policy != "slo":
        return room
    base_s, decode_s, token_s = solve(costs)
    idle_s = base_s + decode_s * num_decodes
    target_s = config.target_itl_ms / 1e3 if config.target_itl_ms else DECODE_STEPS * idle_s
    fits = jnp.clip((target_s - idle_s) / jnp.maximum(token_s, 1e-9), block_size, config.token_budget).astype(jnp.int32)
    if config.step_sizes:
        sizes = jnp.array(config.step_sizes, jnp.int32)
        least = jnp.min(jnp.where(sizes >= num_decodes + block_size, sizes, config.token_budget))
        fits = jnp.maximum(jnp.max(jnp.where(sizes <= num_decodes + fits, sizes, 0)), least) - num_decodes
    return jnp.where(num_decodes > 0, jnp.minimum(room, fits), room)


def assumed(config: SchedulerConfig) -> Float32[Array, "4 4"]:
    """What steps cost before one was seen: normal equations of nothing, then the assumption. It is a value of the state and no
    constant of the program, so that a device timed anew at every start finds its compiled step again."""
    prior = jnp.array(config.slo_prior_us, jnp.float32) * 1e-6 / jnp.array(_SCALE, jnp.float32)
    return jnp.zeros((4, 4), jnp.float32).at[3, :3].set(prior)


def learn(costs: Float32[Array, "4 4"], result: StepResult) -> Float32[Array, "4 4"]:
    """Take in how long a step took: the normal equations of `t_base + α·N_decode + β·Σc_p`, older steps fading.

    Source: recursive least squares with exponential forgetting, kept as its normal equations.
    """
    x = jnp.stack([jnp.float32(1), result.num_decodes.astype(jnp.float32), result.num_prefill_tokens.astype(jnp.float32)])
    x = x * jnp.array(_SCALE, jnp.float32)
    row = jnp.append(x, result.step_s)
    seen = jnp.concatenate([_FORGET * costs[:3] + x[:, None] * row, costs[3:]])
    return jnp.where((result.step_s > 0) & jnp.isfinite(result.step_s), seen, costs)


def solve(costs: Float32[Array, "4 4"]) -> tuple[Float32[Array, ""], ...]:
    """`t_base`, `α` and `β` in seconds, none negative. Where steps say little of one of them, the assumption of the start stands."""
    scale = jnp.array(_SCALE, jnp.float32)
    prior = costs[3, :3]
    normal = costs[:3, :3] + _DOUBT * jnp.eye(3, dtype=jnp.float32)
    right = costs[:3, 3] + _DOUBT * prior
    a, b, c = normal
    cross = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])  # rows of the adjugate of a symmetric matrix
    found = cross @ right / jnp.maximum(jnp.dot(a, cross[0]), 1e-12)
    found = jnp.maximum(jnp.where(jnp.isfinite(found), found, prior), 0) * scale
    return found[0], found[1], found[2]
