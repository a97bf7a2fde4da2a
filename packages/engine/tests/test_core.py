"""Endings, scores, aborts, bounds and logs of the step loop."""

import pytest

from octavo_core.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from octavo_core.records import RequestRecord, StepRecord, read_log
from octavo_core.wire import EngineRequest, FinishReason, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def request(name, prompt, sampling=GREEDY, **fields):
    return EngineRequest(request_id=name, prompt_ids=prompt, sampling=sampling, **fields)


def test_max_tokens_ends_with_length(llm):
    (done,) = llm.generate([1, 2, 3], GREEDY)
    assert (len(done.token_ids), done.finish_reason) == (12, "length")


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
def test_prompts_around_every_bucket_and_block_boundary_are_served(llm, length, is_idle):
    (done,) = llm.generate([(i * 7) % 90 for i in range(length)], GREEDY)
    assert len(done.token_ids) == 12
    is_idle(llm.core)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 31, 32, 33, 40])
def test_batches_around_every_bucket_of_rows_are_served(llm, rows, is_idle):
    done = llm.generate([[i % 90, 3] for i in range(rows)], GREEDY)
    assert [len(d.token_ids) for d in done] == [12] * rows
    is_idle(llm.core)


def test_a_stop_token_ends_with_stop(llm):
    tokens = llm.generate([4, 5], GREEDY)[0].token_ids
    stop = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(tokens[3],))
    (done,) = llm.generate([4, 5], stop)
    assert done.finish_reason == "stop"
    assert done.token_ids == tokens[: tokens.index(tokens[3]) + 1]


def test_min_tokens_keeps_stop_tokens_from_being_sampled(llm):
    tokens = llm.generate([4, 5], GREEDY)[0].token_ids
    (done,) = llm.generate([4, 5], SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8, stop_token_ids=(tokens[0],)))
    assert tokens[0] not in done.token_ids[:8]
    assert len(done.token_ids) >= 8


def test_a_bias_forces_a_token(llm):
    (done,) = llm.generate([1, 2], SamplingParams(temperature=1.0, max_tokens=5, ignore_eos=True, logit_bias={50: 100.0}))
    assert done.token_ids == [50] * 5


def test_scores_of_sampled_tokens_lead_under_greedy(llm):
    (done,) = llm.generate([1, 2], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3))
    assert [s.token_id for s in done.logprobs] == done.token_ids
    assert all(s.rank == 1 and s.top_ids[0] == s.token_id and len(s.top_ids) == 3 for s in done.logprobs)


def test_prompt_scores_are_the_same_cold_cached_and_after_a_plain_request(llm):
    """Cached positions have no logits: asking for scores recomputes them."""
    prompt = [(i * 11) % 90 for i in range(33)]
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    cold, warm = (llm.generate(prompt, scored)[0].prompt_logprobs for _ in range(2))
    llm.generate([*prompt, 1], GREEDY)
    after = llm.generate([*prompt, 1], scored)[0].prompt_logprobs
    assert cold[0] is None
    assert [s.token_id for s in cold[1:]] == prompt[1:]
    assert cold == warm
    assert after[:33] == cold
    assert len(after) == 34


def test_a_prompt_of_one_token_has_one_absent_score(llm):
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    assert llm.generate([5], scored)[0].prompt_logprobs == [None]


def test_a_batch_larger_than_a_servers_queue_is_run(llm):
    assert len(llm.generate([[1]] * 1100, SamplingParams(temperature=0.0, max_tokens=1))) == 1100


def test_an_interrupted_step_ends_the_llm_rather_than_risk_a_wrong_token(make_llm, monkeypatch):
    broken = make_llm(max_num_seqs=4, max_num_batched_tokens=16)
    with monkeypatch.context() as patch:
        patch.setattr(broken.core._runner, "dispatch", lambda plan: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            broken.generate([1, 2, 3], GREEDY)
    with pytest.raises(EngineDeadError, match="make a new LLM"):
        broken.generate([1, 2, 3], GREEDY)


def test_a_full_disk_ends_the_log_and_not_the_engine(make_llm):
    logged = make_llm(step_log="/dev/full", request_log="/dev/full", max_num_seqs=4, max_num_batched_tokens=16)
    for _ in range(20):
        assert len(logged.generate([[1] * 30], GREEDY)[0].token_ids) == 12
        logged._built.logs.flush()


def test_the_engines_seed_repeats_unseeded_samples(make_llm):
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first, second = (
        make_llm(seed=7, max_num_seqs=4, max_num_batched_tokens=16).generate([1, 2], sampling)[0].token_ids for _ in range(2)
    )
    assert first == second


def test_penalties_break_a_repetition(llm):
    forced = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias={50: 100.0, 51: 95.0}, frequency_penalty=2.0
    )
    assert set(llm.generate([1, 2], forced)[0].token_ids) == {50, 51}


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 9])
def test_an_abort_at_any_moment_frees_everything(llm, turns, is_idle):
    llm.core.add(request("gone", [3] * 100))
    llm.core.add(request("stays", [4] * 10))
    outputs = [o for _ in range(turns) for o in llm.core.turn()]
    llm.core.abort("gone")
    while llm.core.has_work:
        outputs += llm.core.turn()
    last = {o.request_id: o for o in outputs if o.finish_reason}
    assert last["gone"].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert last["stays"].finish_reason is FinishReason.LENGTH
    is_idle(llm.core)


def test_an_abort_while_queued_behind_others_leaves_no_trace(make_llm, is_idle):
    small = make_llm(max_num_seqs=1, max_num_batched_tokens=16)
    for i in range(6):
        small.core.add(request(f"r{i}", [i + 1] * 20))
    small.core.turn()
    for i in range(1, 6):
        small.core.abort(f"r{i}")
    done = [
        o.request_id for _ in range(60) if small.core.has_work for o in small.core.turn() if o.finish_reason is FinishReason.LENGTH
    ]
    assert done == ["r0"]
    is_idle(small.core)


def test_outputs_of_a_reused_slot_never_reach_its_earlier_owner(llm):
    for round_ in range(5):
        for i in range(20):
            llm.core.add(request(f"{round_}-{i}", [i + 1, round_ + 1]))
        llm.core.turn()
        llm.core.turn()
        for i in range(0, 20, 2):
            llm.core.abort(f"{round_}-{i}")
    counts = {}
    while llm.core.has_work:
        for output in llm.core.turn():
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.token_ids)
    assert all(n <= 12 for n in counts.values())


def test_a_prompt_larger_than_the_pool_is_refused_at_once_and_the_next_is_served(make_llm):
    small = make_llm(num_gpu_blocks_override=6, max_num_seqs=4, max_num_batched_tokens=16)
    assert small.card.max_model_len == 5 * 16
    with pytest.raises(ContextLengthError, match="80 tokens"):
        small.generate([1] * 100, GREEDY)
    assert len(small.generate([1] * 5, GREEDY)[0].token_ids) == 12
    assert len(small.generate([1] * 79, SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids) == 1


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {99999999: 5.0}}, "token ids are 0 to 96"),
        ({"logit_bias": {-1: 5.0}}, "token ids are 0 to 96"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_tokens": 10**400}, "a much larger number"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"logprobs": 21}, "logprobs is 0 to 20"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": (97,)}, "token ids"),
    ],
)
def test_bad_sampling_is_refused_before_the_step_loop(llm, sampling, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([1, 2], SamplingParams(**sampling))


def test_the_largest_legal_numbers_are_served(llm):
    big = SamplingParams(
        max_tokens=3,
        min_tokens=2**31 - 1,
        top_k=2**31 - 1,
        seed=-(2**63),
        temperature=1e30,
        repetition_penalty=100.0,
        logit_bias={0: -100.0},
    )
    llm.core.check([request("big", [1, 2], big, priority=-(2**80))])
    llm.core.add(request("big", [1, 2], big, priority=-(2**80)))
    tokens = []
    while llm.core.has_work:
        tokens += [t for o in llm.core.turn() for t in o.token_ids]
    assert len(tokens) == 3


@pytest.mark.parametrize("prompt", [[-1], [97], [10**6], [2**40], []])
def test_bad_prompts_are_refused_and_leave_later_ones_untouched(llm, prompt):
    before = llm.generate([1, 2, 3], GREEDY)[0].token_ids
    with pytest.raises(RequestError):
        llm.generate([prompt], GREEDY)
    assert llm.generate([1, 2, 3], GREEDY)[0].token_ids == before


def test_a_full_queue_refuses_with_numbers(make_llm):
    small = make_llm(max_num_queued_reqs=3, max_num_seqs=1, max_num_batched_tokens=16)
    small.core._queue._max_requests = 3
    with pytest.raises(OverloadedError, match="the queue holds 3"):
        small.core.check([request(f"r{i}", [1]) for i in range(4)])
    small.core.check([request(f"r{i}", [1]) for i in range(3)])


def test_priority_lets_the_urgent_first(make_llm):
    small = make_llm(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=16)
    for name, priority in (("later", 5), ("soon", 1), ("now", -3)):
        small.core.add(request(name, [1, 2], priority=priority))
    done = []
    while small.core.has_work:
        done += [o.request_id for o in small.core.turn() if o.finish_reason]
    assert done == ["now", "soon", "later"]


def test_nothing_compiles_after_ready(llm, prompts):
    before = llm._built.compiles.count  # another engine of this session may have compiled since this one was ready
    llm.generate(prompts, GREEDY)
    scored = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, max_tokens=3, logprobs=5, prompt_logprobs=2, presence_penalty=1.0
    )
    llm.generate(prompts[:9], scored)
    assert llm._built.compiles.count == before


def test_logs_hold_typed_records_of_steps_and_requests(make_llm, tmp_path):
    logged = make_llm(
        step_log=str(tmp_path / "steps"), request_log=str(tmp_path / "requests"), max_num_seqs=4, max_num_batched_tokens=16
    )
    logged.generate([[1] * 30, [2] * 3], GREEDY)
    logged.close()
    steps, requests = list(read_log(tmp_path / "steps", StepRecord)), list(read_log(tmp_path / "requests", RequestRecord))
    # Chunks of 16, 14 + 2 and 1 tokens, the last of which counts as a decode.
    assert sum(s.prefill_pairs for s in steps) == 30 * 31 // 2 + 2 * 3 // 2
    assert [s.step for s in steps] == list(range(len(steps)))
    assert sum(s.prefill_tokens for s in steps) >= 30
    assert {(r.prompt_tokens, r.output_tokens, r.finish_reason) for r in requests} == {(30, 12, "length"), (3, 12, "length")}
    assert all(0 <= r.queue_s <= r.ttft_s <= r.e2e_s for r in requests)
