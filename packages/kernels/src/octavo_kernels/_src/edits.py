"""What a request may do to the model's scores before a token is chosen: bias, bans, penalties.

Knows the arithmetic only; which rows want what is the caller's knowledge. Ids of −1 are ignored everywhere.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int16, Int32

Logits = Float32[Array, "rows vocab"]


def add_bias(logits: Logits, ids: Int32[Array, "rows max_bias"], values: Float32[Array, "rows max_bias"]) -> Logits:
    """Add a value to some scores of each row."""
    rows, vocab = logits.shape
    return logits.at[jnp.arange(rows)[:, None], _or_beyond(ids, vocab)].add(values, mode="drop")


def ban(logits: Logits, ids: Int32[Array, "rows max_stop"], where: Bool[Array, " rows"]) -> Logits:
    """Give some ids of the rows in `where` no chance at all."""
    rows, vocab = logits.shape
    ids = jnp.where(where[:, None], ids, -1)
    return logits.at[jnp.arange(rows)[:, None], _or_beyond(ids, vocab)].set(-jnp.inf, mode="drop")


def penalise(
    logits: Logits,
    prompt_seen: Bool[Array, "rows vocab"],
    output_count: Int16[Array, "rows vocab"],
    repetition: Float32[Array, " rows"],
    frequency: Float32[Array, " rows"],
    presence: Float32[Array, " rows"],
) -> Logits:
    """Lower the scores of tokens that were there already.

    Repetition divides positive and multiplies negative scores of tokens of prompt and output; frequency is taken off once per
    occurrence in the output, presence once.

    Source: CTRL (Keskar et al. 2019, section 4.1) with the sign rule of Hugging Face's processor; OpenAI's API for the other two.
    """
    appeared = output_count > 0
    factor = jnp.where(prompt_seen | appeared, repetition[:, None], 1.0)
    scaled = jnp.where(logits > 0, logits / factor, logits * factor)
    return scaled - frequency[:, None] * output_count.astype(jnp.float32) - presence[:, None] * appeared


def _or_beyond(ids: Int32[Array, "rows ids"], vocab: int) -> Int32[Array, "rows ids"]:
    """−1 would count from the end; an index beyond the end is dropped."""
    return jnp.where(ids < 0, vocab, ids)
