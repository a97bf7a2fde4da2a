"""Routing and grouping by expert against the plain thing: every expert for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from octavo_models import ModelConfig
from octavo_models._src.model_config import MoEConfig
from octavo_models._src.moe import Choice, MoE, choose

CONFIG = ModelConfig("MixtralForCausalLM", 40, 32, 64, 1, 4, 2, 8)
SOFTMAX = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=24)
GROUPED = MoEConfig(8, 3, 16, scoring="sigmoid", scale=2.5, num_groups=4, groups_per_token=2, shared_size=16)
CLAMPED = MoEConfig(5, 2, 24, bias=True, swiglu_alpha=1.702, swiglu_limit=0.5)


def filled(moe, dtype="float32"):
    module = MoE(CONFIG, moe, dtype=dtype)
    keys = iter(jax.random.split(jax.random.key(0), 20))
    nnx.update(module, jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape).astype(a.dtype) / 4, nnx.state(module)))
    return module


def every_expert(module, x):
    """The same sum from all experts' answers, in float64."""
    moe = module.moe
    correction = None if module.correction is None else module.correction[...]
    choice = choose(module.router(x), correction, moe)
    wide, out = np.asarray(x, np.float64), np.zeros(x.shape)
    for e in range(moe.num_experts):
        weight = np.where(np.asarray(choice.experts) == e, choice.weights, 0).sum(-1)
        y = wide @ np.asarray(module.expert_gate_up[...][e], np.float64).T
        y = y if module.expert_gate_up_bias is None else y + np.asarray(module.expert_gate_up_bias[...][e])
        gate, up = np.split(y, 2, axis=-1)
        if moe.swiglu_alpha is None:
            y = gate / (1 + np.exp(-gate)) * up
        else:
            gate, up = np.minimum(gate, moe.swiglu_limit), np.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
            y = (up + 1) * gate / (1 + np.exp(-moe.swiglu_alpha * gate))
        y = y @ np.asarray(module.expert_down[...][e], np.float64).T
        out += weight[:, None] * (y if module.expert_down_bias is None else y + np.asarray(module.expert_down_bias[...][e]))
    return out if module.shared is None else out + np.asarray(module.shared(x))


@pytest.mark.parametrize("moe", [SOFTMAX, GROUPED, CLAMPED], ids=["softmax", "grouped", "clamped"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_computing_only_chosen_experts_gives_what_computing_all_would(moe, tokens):
    module = filled(moe)
    x = jax.random.normal(jax.random.key(tokens), (tokens, 32))
    np.testing.assert_allclose(jax.jit(module.__call__)(x), every_expert(module, x), atol=2e-5, rtol=0)


def test_a_token_gets_the_same_answer_whoever_stands_beside_it():
    module, x = filled(SOFTMAX), jax.random.normal(jax.random.key(1), (40, 32))
    together = module(x)
    np.testing.assert_allclose(together[5:6], module(x[5:6]), atol=1e-6)


def test_all_tokens_may_want_the_same_expert():
    module = filled(SOFTMAX)
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(2), (1, 32)), (100, 32))
    np.testing.assert_allclose(module(x), every_expert(module, x), atol=2e-5)


def test_softmax_weights_are_normalised_where_the_family_says_so():
    scores = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    plain = choose(scores, None, MoEConfig(4, 2, 8, normalise=False))
    whole = np.exp(scores[0]) / np.exp(scores[0]).sum()
    assert plain.experts.tolist() == [[3, 2]]
    np.testing.assert_allclose(plain.weights[0], whole[jnp.array([3, 2])], rtol=1e-6)
    assert float(choose(scores, None, MoEConfig(4, 2, 8)).weights.sum()) == pytest.approx(1.0)


def test_the_correction_chooses_and_does_not_weigh():
    moe = MoEConfig(4, 1, 8, scoring="sigmoid", normalise=False)
    choice = choose(jnp.array([[1.0, 0.0, 0.0, 0.0]]), jnp.array([0.0, 0.0, 5.0, 0.0]), moe)
    assert choice.experts.tolist() == [[2]]
    assert float(choice.weights[0, 0]) == pytest.approx(0.5)


def test_experts_come_from_the_groups_whose_two_best_add_up_to_most():
    moe = MoEConfig(6, 2, 8, scoring="sigmoid", normalise=False, num_groups=3, groups_per_token=1)
    # The best expert of all is in the first group, the best pair in the second.
    choice = choose(jnp.array([[4.0, -4.0, 2.0, 2.0, 1.0, 1.0]]), jnp.zeros(6), moe)
    assert sorted(choice.experts[0].tolist()) == [2, 3]


def test_experts_elsewhere_count_nothing():
    module, x = filled(SOFTMAX), jax.random.normal(jax.random.key(3), (9, 32))
    choice = choose(module.router(x), None, SOFTMAX)
    whole = module._compute(x, choice, module.expert_gate_up[...], module.expert_down[...])
    shares = [
        module._compute(
            x,
            Choice(choice.experts - first, choice.weights),
            module.expert_gate_up[...][first : first + 2],
            module.expert_down[...][first : first + 2],
        )
        for first in (0, 2, 4)
    ]
    np.testing.assert_allclose(sum(shares), whole, atol=1e-5)


def test_nothing_is_chosen_outside_the_best_groups_even_where_all_inside_are_below_zero():
    moe = MoEConfig(4, 2, 8, scoring="sigmoid", normalise=False, num_groups=2, groups_per_token=1)
    choice = choose(jnp.array([[0.0, 0.0, -1.0, -1.0]]), jnp.full(4, -2.0), moe)
    assert sorted(choice.experts[0].tolist()) == [0, 1]
