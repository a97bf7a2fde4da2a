"""Several devices, which are eight of one CPU: in a process of their own, since JAX counts devices once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "packages" / "models" / "tests" / "fixtures"
HEADER = """
import dataclasses
import jax
import numpy as np
from octavo_core.errors import ConfigError
from octavo_core.testing import attention
from octavo_engine._src.mesh import DividedAttention, device_mesh, local_group
from octavo_kernels import attention_backend
from octavo_models import Placement
from octavo_models.checkpoints import read_model_config
assert len(jax.devices()) == 8
"""


def with_devices(*command):
    """Output of a program that sees eight devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=1500, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def python(code):
    return with_devices("-c", HEADER + code)


PARITY = {
    "heads": ["llama", "--tensor-parallel-size", "2"],
    "KV heads on several devices each": ["qwen2", "--tensor-parallel-size", "4"],
    "windows": ["gemma3", "--tensor-parallel-size", "2"],
    "latents": ["deepseek-v3", "--tensor-parallel-size", "2"],
    "sinks and shares of experts": ["gpt-oss", "--tensor-parallel-size", "2"],
    "whole experts": ["mixtral", "--tensor-parallel-size", "2", "--expert-parallel"],
    "whole experts, some shared": ["deepseek-v3", "--tensor-parallel-size", "4", "--expert-parallel"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PARITY)
def test_divided_models_give_the_logits_of_the_reference(case):
    name, *options = PARITY[case]
    out = with_devices("tools/models-parity", str(FIXTURES / name), "--block-size", "16", *options)
    assert out.rstrip().endswith("ok")


@pytest.mark.slow
def test_divided_attention_keeps_the_promises_of_the_seam():
    python(
        """
for name in ("reference", "xla"):
    backend = DividedAttention(attention_backend(name).backend, device_mesh(2))
    cases = [c for c in (*attention.CASES, *attention.RULE_CASES, *attention.LATENT_CASES)
             if c.name in ("mixed step", "window, sinks and cap together", "latent, mixed step")]
    for case in cases:
        attention.check_parity(backend, case)
    attention.check_moved_blocks(backend, cases[0])
    attention.check_dropped_writes(backend, cases[0])
"""
    )


def test_a_device_keeps_its_own_heads_and_all_of_a_latent():
    python(
        f"""
mesh = device_mesh(4)
case = attention.CASES[0]
assert local_group(dataclasses.replace(case.spec(), kv_heads=8), mesh).kv_heads == 2
assert local_group(dataclasses.replace(case.spec(), kind="latent", kv_heads=1), mesh).kv_heads == 1
assert local_group(case.spec(), None) == case.spec()
kv = DividedAttention(attention_backend("xla").backend, mesh).init_kv(dataclasses.replace(case.spec(), kv_heads=8), 3)
for pool in jax.tree.leaves(kv):
    assert pool.shape[:3] == (4, 3, 2) and len(pool.sharding.device_set) == 4
assert device_mesh(1) is None
try:
    device_mesh(9)
except ConfigError as error:
    assert "needs as many devices, JAX sees 8" in str(error)

def refused(name, size, *, divide_experts=False):
    config = read_model_config(__import__("pathlib").Path({str(FIXTURES)!r}) / name / "config.json")
    try:
        Placement(device_mesh(size), divide_experts=divide_experts).check(config)
    except ConfigError as error:
        return str(error)

assert "does not divide 4 attention heads" in refused("llama", 8)
assert "needs a model with experts" in refused("llama", 2, divide_experts=True)
assert "attention heads nor 2 KV heads" in refused("llama", 3)
assert refused("llama", 4) is None
assert refused("qwen3-moe", 4, divide_experts=True) is None
"""
    )


@pytest.mark.slow
def test_experts_that_do_not_divide_are_filled_up_with_some_that_nobody_chooses():
    python(
        f"""
from flax import nnx
from octavo_models import Decoder
config = read_model_config(__import__("pathlib").Path({str(FIXTURES)!r}) / "mixtral" / "config.json")
config = dataclasses.replace(config, num_layers=1, moe=dataclasses.replace(config.moe, num_experts=5))
alone, divided = (Decoder(config, dtype="float32") for _ in range(2))
place = Placement(device_mesh(4), divide_experts=True).of(divided)
rng = np.random.default_rng(0)
for (one, _), (other, _) in zip(list(alone.weight_parts()), list(divided.weight_parts()), strict=True):
    values = rng.normal(size=one.shape).astype(np.float32) / 8
    one.set_value(jax.numpy.asarray(values))
    other.set_value(place(other, values))
assert divided.blocks[0].mlp.expert_down.shape[0] == 8
x = jax.numpy.asarray(rng.normal(size=(16, config.hidden_size)), np.float32)
np.testing.assert_allclose(divided.blocks[0].mlp(x), alone.blocks[0].mlp(x), atol=1e-5)
"""
    )


@pytest.mark.slow
def test_a_divided_model_with_tiers_says_what_it_says_without():
    """Prompts that do not fit together, asked twice, and again by an engine that finds them on disk."""
    python(
        f"""
import tempfile
from octavo_core.wire import SamplingParams
from octavo_engine import LLM
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
texts = [t.tolist() for t in np.random.default_rng(7).integers(3, 90, (5, 100))]
options = dict(dtype="float32", skip_tokenizer_init=True, tensor_parallel_size=2, block_size=16, num_gpu_blocks_override=17,
               max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, compilation_cache_dir=None)

def ask(tiers=None, rounds=2):
    llm = LLM({str(FIXTURES / "llama")!r}, **options, **({{"kv_offload": tiers}} if tiers else {{}}))
    offload = llm.core.offload
    if offload is not None:
        offload.token_s, offload.learns = 10.0, False
    said = [[out.token_ids for t in texts for out in llm.generate([t], greedy)] for _ in range(rounds)]
    counts = [] if offload is None else [(s.name, s.hits, s.corrupt) for s in offload.stats()]
    llm.close()
    return said, counts

plain, _ = ask(rounds=1)
with tempfile.TemporaryDirectory() as folder:
    tiers = f"host=4M,disk={{folder}}:16M"
    said, counts = ask(tiers)
    assert said == plain * 2, (said, plain)
    assert counts[0][1] > 0 and not any(corrupt for _, _, corrupt in counts), counts
    said, counts = ask(tiers, rounds=1)
    assert said == plain, (said, plain)
    assert counts[1][0] == "disk" and counts[1][1] >= 6 and not counts[1][2], counts
"""
    )
