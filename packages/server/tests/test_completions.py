import math

import pytest

from octavo_server import ServerConfig

LONG = "the quick brown fox jumps over the lazy dog and the cat near the sea"


def test_a_completion_has_the_required_fields(api) -> None:
    body = api.complete(max_tokens=5)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "org/toy"
    assert [choice["index"] for choice in body["choices"]] == [0]
    assert body["choices"][0]["logprobs"] is None
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_cuts_exactly(make_api, count: int) -> None:
    body = make_api(says=LONG).complete(max_tokens=count)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == count


def test_without_max_tokens_sixteen_come(api) -> None:
    assert api.complete(ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_near_the_end_of_the_context_the_default_shrinks(make_api) -> None:
    api = make_api(card={"max_model_len": 20})
    assert api.complete([5] * 15, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_the_end_of_sequence_token_ends_the_text_and_counts(make_api) -> None:
    api = make_api(says="the cat")
    body = api.complete(max_tokens=50)
    assert body["choices"][0]["text"] == "the cat"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(api.tokenizer.encode("the cat")) + 1


def test_token_ids_are_used_as_they_are(api) -> None:
    ids = api.tokenizer.encode("the fox")
    assert api.complete(ids)["choices"][0]["text"] == api.complete("the fox")["choices"][0]["text"]
    assert api.complete(ids)["usage"]["prompt_tokens"] == len(ids)


def test_choices_are_ordered_by_prompt_and_seeds_differ_between_choices(api) -> None:
    body = api.complete(["the fox", "the dog"], n=2, temperature=1.0, seed=3, max_tokens=6)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    again = api.complete("the dog", n=2, temperature=1.0, seed=3, max_tokens=6)
    assert [choice["text"] for choice in again["choices"]] == texts[2:]


def test_a_prompt_counts_once_however_many_choices_it_has(api) -> None:
    one = api.complete(max_tokens=3)["usage"]
    three = api.complete(max_tokens=3, n=3)["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 9


def test_echo_puts_the_prompt_first(api) -> None:
    text = api.complete(max_tokens=4)["choices"][0]["text"]
    body = api.complete(max_tokens=4, echo=True)
    assert body["choices"][0]["text"] == "the fox" + text
    assert body["usage"]["completion_tokens"] == 4


def test_echo_without_new_tokens_scores_the_prompt_only(api) -> None:
    body = api.complete(max_tokens=0, echo=True, logprobs=2)
    choice = body["choices"][0]
    assert choice["text"] == "the fox" == "".join(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    assert api.post("/v1/completions", {"prompt": "x", "max_tokens": 0}).status_code == 400


def test_A7_prompt_scores_do_not_depend_on_what_is_cached(api) -> None:
    ids = [3 + i % 200 for i in range(33)]
    runs = [api.complete(ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"] for _ in range(2)]
    api.complete(ids, max_tokens=1)
    runs.append(api.complete(ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"])
    for scores in runs:
        assert scores["token_logprobs"][0] is None
        assert scores["top_logprobs"][0] is None
        assert len(scores["token_logprobs"]) == 34
        assert all(score is not None for score in scores["token_logprobs"][1:])
        assert scores == runs[0]


def test_logprobs_lists_are_aligned_and_offsets_index_the_text(make_api) -> None:
    choice = make_api(says=LONG).complete(max_tokens=12, logprobs=3)["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    for token, logprob, top, offset in zip(
        *(scores[k] for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")), strict=True
    ):
        assert math.isfinite(logprob)
        assert logprob <= 0
        assert top[token] == logprob == max(top.values())
        assert choice["text"][offset:].startswith(token)


def test_logprobs_zero_tells_the_chosen_token_only(api) -> None:
    scores = api.complete(max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in scores["top_logprobs"]] == [[token] for token in scores["tokens"]]


def test_tokens_of_half_characters_are_told_as_bytes(make_api) -> None:
    choice = make_api(says="日").complete(max_tokens=3, logprobs=0)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0]
    assert choice["text"] == "日"


@pytest.mark.parametrize("where", ["request", "server"])
def test_tokens_can_be_written_as_ids(make_api, where: str) -> None:
    config = ServerConfig(return_tokens_as_token_ids=where == "server")
    fields = {"return_tokens_as_token_ids": True} if where == "request" else {}
    choice = make_api(config=config).complete(max_tokens=2, logprobs=1, return_token_ids=True, **fields)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)


def test_prompt_logprobs_come_by_token_id(api) -> None:
    choice = api.complete(max_tokens=1, prompt_logprobs=1)["choices"][0]
    ids = api.tokenizer.encode("the fox")
    assert choice["prompt_logprobs"][0] is None
    assert [str(token) in one for token, one in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)] == [True] * (len(ids) - 1)


def test_cached_tokens_are_reported_and_salts_do_not_share(api) -> None:
    cached = [api.complete([7] * 40, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert cached == [0, 32]
    salted = api.complete([7] * 40, max_tokens=1, cache_salt="mine")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_special_tokens_show_only_when_asked(make_api) -> None:
    api = make_api(says="<|start|>a")
    assert api.complete(max_tokens=9)["choices"][0]["text"] == "a"
    assert api.complete(max_tokens=9, skip_special_tokens=False)["choices"][0]["text"] == "<|start|>a"


def test_the_checkpoints_sampling_defaults_apply_unless_the_request_says_otherwise(make_api) -> None:
    api = make_api(card={"sampling_defaults": {"temperature": 0.0}})
    plain = {"prompt": "the fox", "max_tokens": 6}
    texts = {api.post("/v1/completions", plain).json()["choices"][0]["text"] for _ in range(3)}
    hot = {api.post("/v1/completions", {**plain, "temperature": 2.0}).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    assert len(hot) > 1


def test_without_a_tokenizer_token_ids_go_in_and_out(make_api) -> None:
    api = make_api(config=ServerConfig(skip_tokenizer_init=True))
    body = api.complete([5, 6, 7], max_tokens=3, logprobs=1, echo=True)
    choice = body["choices"][0]
    assert choice["text"] == ""
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [5, 6, 7, *choice["token_ids"]]]
    assert len(choice["token_ids"]) == 3
    streamed = api.stream_completion([5, 6, 7], max_tokens=3)
    assert [t for event in streamed.events for t in event["choices"][0]["token_ids"]] == choice["token_ids"]
    for path, bad in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": [5], "stop": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
    ):
        assert api.post(path, bad).status_code == 400
