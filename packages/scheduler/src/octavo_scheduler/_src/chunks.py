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
CROWD_STEPS: Final = 1.5
"""`slo` without a target: a step with prompt tokens lasts as long as so many without any, and so many more with as many prompts."""

LEAST: Final = 4
"""`slo` takes this part of a block at least: a whole one, 32 tokens late in a long prompt, is many decode steps on a CPU."""

_SCALE: Final = (1.0, 1.0 / 64.0, 1.0 / 64.0)
"""Units of the fit, so that its three unknowns are of one size."""

_FORGET: Final = 0.95
_FORGET_MIXED: Final = 0.9
_FADE: Final = 0.998
"""What is left of what steps said after one more of their kind, without prompt tokens or with some (whose cost rises while a prompt is
computed), and after one of the other kind."""
_DOUBT: Final = 3e-5
_SHARE: Final = 3e-6
"""Weight of what is assumed at the start, and more of it by the weight of all that was seen: float32 tells no smaller share."""


def chunk_limit(num_decodes: Int32[Array, ""], config: SchedulerConfig) -> Int32[Array, ""]:
    """`C_chunk`: most prompt tokens of one sequence in this step."""
    budget, chunk = jnp.int32(config.token_budget), jnp.int32(config.chunk_size)
    size = most = jnp.minimum(jnp.where(chunk == 0, budget, chunk), budget)
    if config.chunk_policy == "adaptive":
        for above, tokens in STEPS:
            size = jnp.where(num_decodes > above, jnp.minimum(tokens, most), size)
    return size


def available(
    num_decodes: Int32[Array, ""],
    costs: Float32[Array, "7 4"],
    config: SchedulerConfig,
    block_size: int,
    num_prompts: Int32[Array, ""] | int = 1,
) -> Int32[Array, ""]:
    """`C_avail`: prompt tokens of all sequences together, `max(0, T_budget − N_decode)` or what `slo` leaves of it.

    `slo`: the largest `Σc_p` with `t_base + α·N_decode + β·Σc_p ≤ target`, at least a quarter of a block; with nobody decoding nobody waits for
    the step and the budget stands. Where the device pads steps, one of its sizes is filled. `num_prompts` sequences have prompt to go: the
    more of them to those who decode, the longer may a step be that has no target, for they wait too.
    """
    room = jnp.maximum(config.token_budget - num_decodes, 0)
    if config.chunk_policy != "slo":
        return room
    base_s, decode_s, token_s = solve(costs)
    idle_s = base_s + decode_s * num_decodes
    crowd = jnp.clip((num_prompts - 1) / jnp.maximum(num_decodes, 1), 0, 1)
    own_s = (DECODE_STEPS + CROWD_STEPS * crowd) * idle_s
    target_s = jnp.where(config.target_itl_ms == 0, own_s, jnp.float32(config.target_itl_ms) / 1e3)
    least = max(block_size // LEAST, 1)
    fits = jnp.clip((target_s - idle_s) / jnp.maximum(token_s, 1e-9), least, config.token_budget).astype(jnp.int32)
    if config.step_sizes:
        sizes = jnp.array(config.step_sizes, jnp.int32)
        smallest = jnp.min(jnp.where(sizes >= num_decodes + least, sizes, config.token_budget))
        fits = jnp.maximum(jnp.max(jnp.where(sizes <= num_decodes + fits, sizes, 0)), smallest) - num_decodes
    return jnp.where(num_decodes > 0, jnp.minimum(room, fits), room)


def assumed(config: SchedulerConfig) -> Float32[Array, "7 4"]:
    """What steps cost before one was seen: normal equations of nothing, then the assumption. It is a value of the state and no
    constant of the program, so that a device timed anew at every start finds its compiled step again."""
    prior = jnp.array(config.slo_prior_us, jnp.float32) * 1e-6 / jnp.array(_SCALE, jnp.float32)
    return jnp.zeros((7, 4), jnp.float32).at[6, :3].set(prior)


def learn(costs: Float32[Array, "7 4"], result: StepResult) -> Float32[Array, "7 4"]:
    """Take in how long a step took: normal equations of `t_base + α·N_decode + β·Σc_p` (the relative error counts), older steps fading.

    Steps without prompt tokens and steps with some have equations of their own, which fade with their own kind, and are added to solve
    them: while a long prompt is computed every step is alike and says only what all of it takes, ever more as the context grows, and
    what a step takes without the prompt is not to be found in it. Forgotten, it would be taken to grow too, and the target with it.

    Source: recursive least squares with exponential forgetting, kept as its normal equations.
    """
    x = jnp.stack([jnp.float32(1), result.num_decodes.astype(jnp.float32), result.num_prefill_tokens.astype(jnp.float32)])
    unit_s = jnp.maximum(costs[6, 0] + costs[6, 1], 1e-3)
    row = jnp.append(x * jnp.array(_SCALE, jnp.float32), result.step_s) * (unit_s / result.step_s)
    mixed = result.num_prefill_tokens > 0
    plain = jnp.where(mixed, _FADE * costs[:3], _FORGET * costs[:3] + row[:3, None] * row)
    others = jnp.where(mixed, _FORGET_MIXED * costs[3:6] + row[:3, None] * row, _FADE * costs[3:6])
    seen = jnp.concatenate([plain, others, costs[6:]])
    return jnp.where((result.step_s > 0) & jnp.isfinite(result.step_s), seen, costs)


def solve(costs: Float32[Array, "7 4"]) -> tuple[Float32[Array, ""], ...]:
    """`t_base`, `α` and `β` in seconds, none negative. Where steps say little of one of them, the assumption of the start stands."""
    scale = jnp.array(_SCALE, jnp.float32)
    prior, seen = costs[6, :3], costs[:3] + costs[3:6]
    weight = jnp.diagonal(seen[:, :3])
    doubt = _DOUBT + _SHARE * weight
    even = 1 / jnp.sqrt(weight + doubt)  # so that the three are of one size for float32
    normal = (seen[:, :3] + jnp.diag(doubt)) * even[:, None] * even
    right = (seen[:, 3] + doubt * prior) * even
    a, b, c = normal
    cross = jnp.stack([jnp.cross(b, c), jnp.cross(c, a), jnp.cross(a, b)])  # rows of the adjugate of a symmetric matrix
    found = even * (cross @ right) / jnp.maximum(jnp.dot(a, cross[0]), 1e-20)
    found = jnp.maximum(jnp.where(jnp.isfinite(found), found, prior), 0) * scale
    return found[0], found[1], found[2]
