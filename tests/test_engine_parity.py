"""Logits of the paged path against transformers in float32, at every position, for every chunk and block size promised.

Logits reach the outside as log-probabilities of the whole vocabulary; a constant per position is all that this loses.
"""

from pathlib import Path

import numpy as np
import pytest

from octavo_core.wire import SamplingParams
from octavo_engine import LLM

FIXTURES = Path(__file__).parents[1] / "packages" / "models" / "tests" / "fixtures"
TOLERANCE = 2e-4
CLEAR_MARGIN = 1e-3


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)
UNLIKE_OTHERS = ["deepseek-v3", "gemma3", "gpt-oss", "qwen3-moe"]
"""Latents, windows, sinks and experts; what the others compute, these do too."""

ALIKE = ["mistral", "mixtral", "qwen2", "qwen3"]

CASES = [("llama", 16, 16), ("llama", 512, 32), ("llama3-rope", 16, 32)]
CASES += [pytest.param((name, 16, 32), marks=pytest.mark.slow) for name in UNLIKE_OTHERS]
CASES += [pytest.param(case, marks=NIGHTLY) for case in (("llama", 16, 32), ("llama", 512, 16), ("llama3-rope", 16, 16))]
CASES += [pytest.param(("llama3-rope", 512, block), marks=NIGHTLY) for block in (16, 32)]
CASES += [pytest.param((name, 16, 16), marks=NIGHTLY) for name in UNLIKE_OTHERS]
CASES += [pytest.param((name, 16, block), marks=NIGHTLY) for name in ALIKE for block in (16, 32)]


@pytest.fixture(scope="module", params=CASES, ids=lambda p: f"{p[0]}-chunk{p[1]}-block{p[2]}")
def served(request):
    name, chunk, block = request.param
    llm = LLM(
        str(FIXTURES / name),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_batched_tokens=chunk,
        block_size=block,
        max_logprobs=-1,
        max_num_seqs=8,
        num_gpu_blocks_override=200,
    )
    yield llm, dict(np.load(FIXTURES / name / "reference.npz"))
    llm.close()


def test_logits_equal_transformers_at_every_position(served):
    llm, reference = served
    lengths = reference["lengths"]
    prompts = [ids[:n].tolist() for ids, n in zip(reference["input_ids"], lengths, strict=True)]
    vocab = llm.card.vocab_size
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=vocab, logprobs=vocab)
    for done, logits, n in zip(llm.generate(prompts, scored), reference["logits"], lengths, strict=True):
        wide = logits[:n].astype(np.float64)
        wanted = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True)) - wide.max(-1, keepdims=True)
        for i, entry in enumerate([*done.prompt_logprobs[1:], done.logprobs[0]]):
            got = np.full(vocab, np.nan)
            got[entry.top_ids] = entry.top_logprobs
            np.testing.assert_allclose(got, wanted[i], atol=TOLERANCE, rtol=0)


def test_greedy_tokens_equal_transformers_until_a_margin_is_too_small_to_tell(served):
    llm, reference = served
    prompts = [ids[:n].tolist() for ids, n in zip(reference["input_ids"], reference["lengths"], strict=True)]
    greedy = SamplingParams(temperature=0.0, max_tokens=reference["greedy"].shape[1], ignore_eos=True)
    told = 0
    for done, wanted, margin in zip(llm.generate(prompts, greedy), reference["greedy"], reference["greedy_margin"], strict=True):
        small = np.flatnonzero(margin < CLEAR_MARGIN)
        upto = int(small[0]) if small.size else len(wanted)
        assert done.token_ids[:upto] == wanted[:upto].tolist()
        told += upto
    assert told > 24


def test_a_prompt_that_was_served_is_found_again_whatever_the_layers_keep(served):
    """Windows, latents and full attention: each group has what the rest of the prompt looks back to."""
    llm, reference = served
    ids, wanted, margin = (reference[key][0] for key in ("input_ids", "greedy", "greedy_margin"))
    prompt = ids[: reference["lengths"][0]].tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    llm.generate([prompt], greedy)
    done = llm.generate([prompt], greedy)[0]
    upto = int(np.argmax(np.append(margin, 0) < CLEAR_MARGIN))
    assert done.num_cached_tokens >= len(prompt) - 1 - 16
    assert done.token_ids[:upto] == wanted[: min(upto, 8)].tolist()
