"""What a real engine tells its followers: every block its cache holds, no other, through eviction, aborts and reused slots."""

import json
import time

import numpy as np
import pytest

from octavo_core.keys import block_keys, namespace_of
from octavo_core.wire import EngineRequest, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
STOPS = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=11, stop_token_ids=(50,), logit_bias={50: 100.0}, ignore_eos=True)
"""Also ends after 12 tokens, but nobody knows before: a step more is computed, and its block is filed as the sequence leaves."""


def resident(core):
    """Blocks the cache of an idle engine keeps."""
    return core.stats().num_blocks - 1 - core.stats().num_free_blocks


def test_a_follower_of_a_real_engine_knows_its_blocks_through_eviction_and_slot_reuse(layout, make_llm, is_idle):
    options = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
    llm = make_llm(num_gpu_blocks_override=21, max_num_seqs=4, kv_events_config=json.dumps(options))
    assert llm.core.planner.spec.max_sequences == 8  # for 54 requests
    events = llm._built.kv_events
    follower = layout.Follower(events)
    try:
        time.sleep(0.3)
        rng, asked = np.random.default_rng(3), []
        for round_ in range(6):  # 20 blocks, and a prompt takes up to 8: each round evicts what an earlier one left
            lengths = [3, 4, 5, 20, 21, 37, int(rng.integers(60, 110))]  # with 12 more tokens several end where a block does
            prompts = [rng.integers(0, 96, n).tolist() for n in lengths] + [[7] * 40, [7] * 55]
            namespace = namespace_of(cache_salt=str(round_ % 2))
            for i, prompt in enumerate(prompts):
                ends = {"sampling": GREEDY if i % 2 == round_ % 2 else STOPS, "namespace": namespace}
                llm.core.add(EngineRequest(request_id=f"{round_}-{i}", prompt_ids=prompt, **ends))
            answers = {f"{round_}-{i}": [] for i in range(len(prompts))}
            while llm.core.has_work:
                for output in llm.core.turn():
                    answers[output.request_id] += output.token_ids
                if round_ == 2 and answers["2-1"]:
                    llm.core.abort("2-1")
            asked += [(p + answers[f"{round_}-{i}"], namespace) for i, p in enumerate(prompts)]
            is_idle(llm.core)
            follower.drain()
            assert len(follower.held) == resident(llm.core) > 10

        assert follower.numbers == list(range(len(follower.numbers)))
        assert not follower.has_cleared
        assert len(follower.numbers) > 10
        every = {key: tokens for tokens, space in asked for key, tokens in keyed(tokens, space)}
        assert set(follower.tokens) <= set(every), "a key of tokens nobody sent"
        assert all(every[key] == tokens for key, tokens in follower.tokens.items())
        assert len(follower.tokens) > len(follower.held), "nothing was ever evicted: the test tests too little"
        assert llm.core.stats().kv_event_batches_dropped == 0

        again = follower.replay(follower.numbers[-5])
        assert [number for number, _ in again] == follower.numbers[-5:]
        late = layout.Follower(events)
        try:
            for number, payload in late.replay(0):
                late.follow(number, payload)
            assert late.held == follower.held
        finally:
            late.close()
    finally:
        follower.close()


def keyed(tokens, namespace):
    keys = block_keys(tokens, namespace, 16)
    return [(key, tokens[: 16 * (i + 1)]) for i, key in enumerate(keys)]


def test_what_a_follower_calls_held_is_found_by_the_next_request_and_nothing_else_is(layout, make_llm):
    options = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
    llm = make_llm(num_gpu_blocks_override=21, kv_events_config=json.dumps(options))
    follower = layout.Follower(llm._built.kv_events)
    try:
        time.sleep(0.3)
        rng = np.random.default_rng(4)
        prompts = [rng.integers(0, 96, 90).tolist() for _ in range(5)]
        llm.generate(prompts, GREEDY)
        for prompt in prompts:
            follower.drain(0.2)
            keys = block_keys(prompt, namespace_of(), 16)
            held = [(0, key) in follower.held for key in keys]
            (done,) = llm.generate([prompt], GREEDY)
            assert done.num_cached_tokens // 16 == (held.index(False) if False in held else len(held))
    finally:
        follower.close()


def test_a_publisher_that_fails_stops_no_request(make_llm, caplog):
    options = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "max_queue_size": 1}
    llm = make_llm(num_gpu_blocks_override=21, kv_events_config=json.dumps(options))
    events = llm._built.kv_events
    events._context.destroy(linger=0)  # as if the network stack went away
    prompts = [[i] * 50 for i in range(20)]
    assert all(len(done.token_ids) == 12 for done in llm.generate(prompts, GREEDY))
    assert "was not published" in caplog.text
