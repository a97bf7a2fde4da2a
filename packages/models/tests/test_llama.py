"""What the model promises beside its numbers: pure, cheap to merge, blind to pads and chunks, dtypes as documented."""

import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo_core.errors import UnsupportedModelError
from octavo_models import Decoder, ModelConfig, RopeConfig
from octavo_models._src.layers import dot_out_in, dot_out_in_split
from octavo_models._src.rope import inverse_frequencies, rotate, rotation

CONFIG = ModelConfig("LlamaForCausalLM", 40, 32, 64, 3, 4, 2, 8)


def filled(config, dtype="float32"):
    """A model with random weights."""
    model = Decoder(config, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    nnx.update(model, jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape).astype(a.dtype) / 8, nnx.state(model)))
    return model


def own_token_only(kv, q, k, v):
    """Attention over a context of one: the token's own V. Notes the dtypes it was called with."""
    group = q.shape[1] // v.shape[1]
    return (q.dtype, k.dtype, v.dtype), jnp.repeat(v, group, axis=1).astype(q.dtype)


def run(model, token_ids):
    """KV of the last layer, final hidden states, logits."""
    ids, kv = jnp.asarray(token_ids, jnp.int32), None
    stream = model.begin(ids, jnp.arange(len(ids), dtype=jnp.int32))
    for layer in model.layers():
        kv, stream = layer(kv, stream, own_token_only)
    hidden = model.hidden(stream)
    return kv, hidden, model.logits(hidden)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_keeps_the_models_dtype_and_logits_are_float32(dtype):
    kv, hidden, logits = run(filled(CONFIG, dtype), [1, 2, 3])
    assert kv == (jnp.float32, jnp.dtype(dtype), jnp.dtype(dtype))
    assert (hidden.dtype, hidden.shape) == (jnp.dtype(dtype), (3, 32))
    assert (logits.dtype, logits.shape) == (jnp.float32, (3, 40))


def test_a_tied_head_is_the_embedding_itself():
    tied = filled(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    assert tied.head is None
    _, hidden, logits = run(tied, [5])
    np.testing.assert_allclose(logits, hidden @ tied.embed.weight[...].T, rtol=1e-4, atol=1e-5)


def test_biases_are_added():
    config = dataclasses.replace(CONFIG, attention_bias=True, mlp_bias=True)
    model = filled(config)
    _, _, with_bias = run(model, [3])
    for block in model.blocks:
        for linear in (block.attention.qkv, block.attention.out, block.mlp.gate_up, block.mlp.down):
            linear.bias.set_value(jnp.zeros_like(linear.bias[...]))
    _, _, without = run(model, [3])
    assert np.abs(with_bias - without).max() > 1e-2


def test_a_token_does_not_see_its_neighbours_in_the_step():
    model = filled(CONFIG)
    _, _, together = run(model, [7, 8, 9, 0, 0, 0, 0, 0])
    _, _, padded_otherwise = run(model, [7, 8, 9, 39, 39, 39, 39, 39])
    np.testing.assert_array_equal(together[:3], padded_otherwise[:3])


def test_token_ids_outside_the_vocabulary_stay_finite():
    _, _, logits = run(filled(CONFIG), [-1, 40, 2**31 - 1])
    assert np.isfinite(logits).all()


def test_kv_is_one_full_group_over_all_layers():
    (group,) = Decoder(CONFIG, dtype="float32").kv_groups(block_size=16, dtype="bfloat16")
    assert (group.kind, group.layers, group.kv_heads, group.head_dim) == ("full", (0, 1, 2), 2, 8)
    assert (group.dtype, group.block_size, group.window) == ("bfloat16", 16, None)


def test_split_parameters_are_plain_arrays_and_merging_them_is_cheap():
    graphdef, params = nnx.split(Decoder(dataclasses.replace(CONFIG, num_layers=30), dtype="float32"))
    leaves = jax.tree.leaves(params)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert len(leaves) == 30 * 6 + 3
    start = time.perf_counter()
    for _ in range(10):
        nnx.merge(graphdef, params)
    assert (time.perf_counter() - start) / 10 < 0.5


def test_layers_have_one_structure_so_that_one_compiled_program_serves_all():
    model = filled(CONFIG)
    traces = 0

    @partial(jax.jit, static_argnums=0)
    def step(graphdef, params, kv, stream):
        nonlocal traces
        traces += 1
        return nnx.merge(graphdef, params)(kv, stream, lambda kv, q, k, v: (kv, q))

    stream = model.begin(jnp.arange(8, dtype=jnp.int32), jnp.arange(8, dtype=jnp.int32))
    for layer in model.layers():
        _, stream = step(*nnx.split(layer), None, stream)
    assert traces == 1


def test_a_split_dot_does_not_round_its_input():
    x = jax.random.normal(jax.random.key(2), (5, 64))
    weight = jax.random.normal(jax.random.key(3), (32, 64)).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    split, plain = (np.abs(np.asarray(jax.jit(dot)(x, weight)) - exact).max() for dot in (dot_out_in_split, dot_out_in))
    assert split < 2e-3 < plain


def test_rotation_keeps_length_and_depends_on_distance_only():
    frequencies = inverse_frequencies(RopeConfig(theta=100.0), 8)
    heads = jax.random.normal(jax.random.key(1), (2, 1, 8))

    def score(q_position, k_position):
        q, k = rotate(heads, *rotation(jnp.array([q_position, k_position], jnp.int32), frequencies))
        return float((q * k).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_linear_scaling_divides_positions():
    plain = inverse_frequencies(RopeConfig(theta=100.0), 8)
    scaled = inverse_frequencies(RopeConfig(theta=100.0, kind="linear", factor=4.0), 8)
    np.testing.assert_allclose(np.array(scaled) * 4, plain, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    rope = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    plain = np.array(inverse_frequencies(RopeConfig(500000.0), 128))
    scaled = np.array(inverse_frequencies(rope, 128))
    turns = 8192 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4], rtol=1e-6)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()


def test_proportional_rotation_leaves_the_last_pairs_where_they_are():
    plain = np.array(inverse_frequencies(RopeConfig(theta=100.0), 16))
    scaled = np.array(inverse_frequencies(RopeConfig(theta=100.0, kind="proportional", factor=2.0, share=0.5), 16))
    np.testing.assert_allclose(scaled, np.concatenate([plain[:4] / 2, np.zeros(4)]), rtol=1e-6)


def test_longrope_divides_each_frequency_by_its_own():
    plain = np.array(inverse_frequencies(RopeConfig(theta=100.0), 8))
    scaled = inverse_frequencies(RopeConfig(theta=100.0, kind="longrope", divisors=(1.0, 1.5, 2.0, 4.0)), 8)
    np.testing.assert_allclose(scaled, plain / [1, 1.5, 2, 4], rtol=1e-6)


def test_a_checkpoints_own_divisors_replace_the_scaling():
    rope = RopeConfig(theta=100.0, kind="linear", factor=4.0)
    plain = np.array(inverse_frequencies(RopeConfig(theta=100.0), 8))
    np.testing.assert_allclose(inverse_frequencies(rope, 8, (1.0, 2.0, 3.0, 4.0)), plain / [1, 2, 3, 4], rtol=1e-6)


def test_an_unknown_scaling_is_named():
    rope = RopeConfig()
    object.__setattr__(rope, "kind", "spiral")  # The configuration readers refuse it before it comes here.
    with pytest.raises(UnsupportedModelError, match="spiral"):
        inverse_frequencies(rope, 8)
