"""Log-probabilities of the model's own scores, as clients ask for them.

Knows raw scores: before bias, penalties and temperature. Knows nothing of how a token was chosen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from octavo_kernels._src.vocab import finite


def score_tokens(
    logits: Float32[Array, "tokens vocab"], targets: Int32[Array, " tokens"], max_logprobs: int
) -> tuple[
    Float32[Array, " tokens"],
    Int32[Array, " tokens"],
    Int32[Array, "tokens max_logprobs"],
    Float32[Array, "tokens max_logprobs"],
]:
    """How likely each target was, and what was likelier.

    Args:
        logits: Scores from which each target could have been drawn; NaN counts as the lowest score.
        targets: Ids; outside the vocabulary (pads) the answers are finite and mean nothing.
        max_logprobs: Alternatives, static.

    Returns:
        Log-probability and rank (1: none is likelier) of each target; ids and log-probabilities of the likeliest tokens, in falling
        order, lower ids first among equals.
    """
    scores = finite(logits)
    norm = jax.nn.logsumexp(scores, axis=-1)
    safe = jnp.clip(targets, 0, logits.shape[1] - 1)
    chosen = jnp.take_along_axis(scores, safe[:, None], axis=1)[:, 0]
    rank = 1 + (scores > chosen[:, None]).sum(axis=-1, dtype=jnp.int32)
    top, ids = lax.top_k(scores, max_logprobs) if max_logprobs else (scores[:, :0], jnp.zeros((len(targets), 0), jnp.int32))
    return chosen - norm, rank, ids.astype(jnp.int32), top - norm[:, None]
