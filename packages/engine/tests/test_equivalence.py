"""The numerics promise in float32: a sequence's greedy tokens do not depend on how they came about."""

import numpy as np
import pytest

from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine._src.device import DevicePrograms

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(llm):
    """Greedy answers of prompts, each computed alone with no cached prefix."""
    known = {}

    def answer(prompt, sampling=GREEDY):
        key = (tuple(prompt), sampling.max_tokens)
        if key not in known:
            salt = np.random.default_rng(len(known)).bytes(8)
            llm.core.add(EngineRequest(request_id=f"alone-{len(known)}", prompt_ids=prompt, sampling=sampling, namespace=salt))
            known[key] = run(llm.core)[f"alone-{len(known)}"]
        return known[key]

    return answer


def run(core):
    """Tokens of every request, until nothing is left to do."""
    tokens = {}
    while core.has_work:
        for output in core.turn():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def test_a_batch_of_32_gives_the_tokens_of_each_alone(llm, prompts, alone):
    together = llm.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, together, strict=True):
        assert completion.token_ids == alone(prompt)


def test_chunks_of_odd_sizes_give_the_same_tokens(make_llm, prompts, alone, is_idle):
    chunked = make_llm(max_num_batched_tokens=37, chunked_prefill_size=11, max_num_seqs=5)
    for prompt, completion in zip(prompts[:12], chunked.generate(prompts[:12], GREEDY), strict=True):
        assert completion.token_ids == alone(prompt)
    is_idle(chunked.core)


def test_a_preempted_sequence_gives_the_same_tokens(tight, prompts, alone, is_idle):
    completions = tight.generate(prompts, GREEDY)
    assert tight.core.stats().preemptions > 0
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == alone(prompt)
    is_idle(tight.core)


def test_a_prefix_hit_gives_the_same_tokens(llm, alone):
    prompt = list(range(90))
    first = alone(prompt)
    cold, warm = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert warm.num_cached_tokens >= 80
    assert cold.token_ids == warm.token_ids == first


def test_a_prefix_that_ends_inside_a_block_is_copied_and_gives_the_same_tokens(llm, alone, is_idle):
    """Blocks of 16: the second prompt leaves the first's third block after five tokens, the third prompt after one."""
    first = [(7 * i) % 89 for i in range(80)]
    llm.generate(first, GREEDY)
    for common in (37, 33):
        prompt = [*first[:common], *((11 * i + 5) % 89 for i in range(30))]
        completion = llm.generate(prompt, GREEDY)[0]
        assert completion.num_cached_tokens == common
        assert completion.token_ids == alone(prompt)
    is_idle(llm.core)


@pytest.mark.parametrize("overlap", ["off", "in flight"])
def test_however_planning_is_overlapped_the_tokens_are_the_same(llm, prompts, alone, is_idle, overlap, monkeypatch):
    wanted = [alone(prompt) for prompt in prompts[:8]]
    monkeypatch.setattr(llm.core, "_overlap", overlap)
    assert [c.token_ids for c in llm.generate(prompts[:8], GREEDY)] == wanted
    is_idle(llm.core)


def test_equal_long_prompts_arriving_together_share_canonical_blocks_and_keep_their_tokens(tight, alone, is_idle):
    """Both compute the same prefix, a third allocates meanwhile: no block is read after it was given away."""
    prompt, other = [7, 3, 5] * 30, [11] * 50
    completions = tight.generate([prompt, prompt, other], GREEDY)
    assert [c.token_ids for c in completions] == [alone(prompt), alone(prompt), alone(other)]
    is_idle(tight.core)


def test_a_seeded_sample_does_not_depend_on_its_neighbours(llm, prompts):
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    solo = llm.generate(prompts[0], sampling)[0].token_ids
    crowd = llm.generate(prompts[:16], sampling)[0].token_ids
    assert solo == crowd


def test_unseeded_samples_differ(llm, prompts):
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    assert len({tuple(c.token_ids) for c in llm.generate([prompts[0]] * 4, sampling)}) > 1


def test_the_highest_block_of_the_pool_is_used_and_right(tight, prompts, alone, is_idle):
    """Requests that fill the pool to its last block id still get their own tokens."""
    batch = prompts[:6]
    for prompt, completion in zip(batch, tight.generate(batch, GREEDY), strict=True):
        assert completion.token_ids == alone(prompt)
    tables = np.asarray(tight.core.planner.state[1].radix.generation)
    assert (tables[..., 1:] > 0).all()
    is_idle(tight.core)


def test_layers_in_one_program_or_in_several_give_the_same_tokens(make_llm, prompts, alone, monkeypatch):
    split = DevicePrograms.of
    monkeypatch.setattr(DevicePrograms, "of", lambda *parts, **options: split(*parts, **{**options, "layers_per_segment": 2}))
    whole = make_llm()
    assert len(whole.core.runner.programs.segments) == 1
    for prompt, completion in zip(prompts[:12], whole.generate(prompts[:12], GREEDY), strict=True):
        assert completion.token_ids == alone(prompt)
