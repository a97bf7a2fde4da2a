import json
import time

import pytest

from octavo_server import ServerConfig

PATHS = ("/v1/completions", "/v1/chat/completions")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def refused(response, status: int = 400, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert "Traceback" not in response.text
    if param is not None:
        assert error["param"].split(".")[0] == param
    return error


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": ',
        b"[1,2]",
        b'"text"',
        b"42",
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800 x"}',
        b'{"prompt": "x"} trailing',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
    ids=lambda body: repr(body[:16]),
)
def test_what_is_no_json_object_is_400(api, path: str, body: bytes) -> None:
    assert refused(api.post(path, body))["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", True),
        ("n", "2"),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("max_tokens", 2.5),
        ("min_tokens", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("seed", "x"),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": "x"}),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 257),
        ("stop_token_ids", [1] * 129),
        ("stop_token_ids", [1.5]),
        ("stream", "maybe"),
        ("stream", 1),
        ("ignore_eos", "yes"),
        ("cache_salt", 5),
        ("cache_salt", ""),
        ("model", 5),
        ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "sound"}),
        ("response_format", "text"),
        ("priority", "high"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_values_out_of_range_are_refused_by_name(api, path: str, field: str, value) -> None:
    body = {**api.chat_body(), field: value} if "chat" in path else {"prompt": "x", field: value}
    assert field in refused(api.post(path, body), param=field)["message"] or field == "response_format"


def test_min_tokens_above_max_tokens_are_refused(api) -> None:
    refused(api.post("/v1/completions", {"prompt": "x", "max_tokens": 4, "min_tokens": 5}), param="min_tokens")


@pytest.mark.parametrize("messages", [None, "hi", [], [123], [{}], [{"role": "user"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 7}],
                                      [{"role": "user", "content": None}], [{"role": "king", "content": "x"}], [{"role": "user", "content": ["x"]}],
                                      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                                      [{"role": "user", "content": "x"}] * 4097])  # fmt: skip
def test_broken_messages_are_refused(api, messages) -> None:
    refused(api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))


@pytest.mark.parametrize("prompt", [None, 5, {}, [], [[]], [1.5], [True], ["x", 1], [[1], "x"], ["x"] * 1025, [[1, "x"]], ""])
def test_broken_prompts_are_refused(api, prompt) -> None:
    refused(api.post("/v1/completions", {"prompt": prompt}), param="prompt")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        {"tools": [{"type": "function", "function": 42}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_regex": "a"},
        {"guided_json": {}},
        {"regex": "a"},
        {"grammar": "a"},
        {"ebnf": "a"},
        {"truncate_prompt_tokens": 3},
        {"bad_words": ["x"]},
        {"use_beam_search": True},
    ],
    ids=str,
)
def test_what_is_not_served_yet_is_said_so(api, fields) -> None:
    assert "not supported yet" in refused(api.post("/v1/chat/completions", api.chat_body(**fields)))["message"]


def test_neutral_values_of_what_is_not_served_are_accepted(api) -> None:
    neutral = {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "bad_words": [], "use_beam_search": False}
    ignored = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    api.chat(**neutral, **ignored, max_completion_tokens=None, stop=None, seed=None, stream=None)


def test_an_unknown_field_is_refused_with_the_nearest_name(api) -> None:
    error = refused(api.post("/v1/chat/completions", api.chat_body(temprature=1)), param="temprature")
    assert "did you mean 'temperature'?" in error["message"]
    nested = api.chat_body(stream=True, stream_options={"include_usages": True})
    assert "did you mean 'include_usage'?" in refused(api.post("/v1/chat/completions", nested))["message"]


def test_unknown_fields_can_be_ignored(make_api) -> None:
    make_api(config=ServerConfig(ignore_unknown_fields=True)).chat(temprature=1)


def test_suffix_and_best_of_are_refused_not_ignored(api) -> None:
    refused(api.post("/v1/completions", {"prompt": "x", "suffix": "y"}), param="suffix")
    refused(api.post("/v1/completions", {"prompt": "x", "best_of": 3, "n": 2}), param="best_of")
    api.complete(best_of=2, n=2)
    api.complete(best_of=1, n=2)


def test_alternatives_are_bounded_by_the_card(api) -> None:
    refused(api.post("/v1/chat/completions", api.chat_body(logprobs=True, top_logprobs=21)), param="logprobs")
    refused(api.post("/v1/chat/completions", api.chat_body(top_logprobs=3)), param="top_logprobs")
    refused(api.post("/v1/completions", {"prompt": "x", "logprobs": -1}), param="logprobs")
    refused(api.post("/v1/completions", {"prompt": "x", "logprobs": 21}), param="logprobs")


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
def test_an_unknown_model_is_404(api, path: str) -> None:
    body = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}, PATHS[0]: {"prompt": "x"}}.get(path, api.chat_body())
    error = refused(api.post(path, {**body, "model": "org/toi"}), 404, "model")
    assert error["code"] == "model_not_found"
    assert "did you mean 'org/toy'?" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_as_clients_expect(api, stream: bool) -> None:
    for prompt, max_tokens in (([5] * 600, 4), ([5] * 512, None), ([5] * 500, 13)):
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        error = refused(api.post("/v1/completions", body), param="prompt")
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512 tokens" in error["message"]
    assert api.complete([5] * 500, max_tokens=12, ignore_eos=True)["usage"]["total_tokens"] == 512


def test_a_prompt_of_ten_megabytes_is_refused_quickly(api) -> None:
    start = time.monotonic()
    for body in (
        {"prompt": "lorem " * 1_700_000},
        {"prompt": [5] * 1_000_000},
        {"messages": [{"role": "user", "content": "x" * 10**7}]},
    ):
        path = PATHS["messages" in body]
        assert refused(api.post(path, body))["code"] == "context_length_exceeded"
    assert time.monotonic() - start < 10


def test_a_body_over_the_limit_is_413(make_api) -> None:
    api = make_api(config=ServerConfig(max_body_bytes=2048))
    response = api.post("/v1/completions", {"prompt": "x" * 3000})
    assert refused(response, 413)["code"] == "request_too_large"
    assert response.headers["connection"] == "close"


def test_too_many_sequences_are_refused(api) -> None:
    refused(api.post("/v1/completions", {"prompt": ["x"] * 100, "n": 100}), param="n")


def test_A3_bad_prompts_do_not_poison_later_ones(api) -> None:
    before = api.complete(["the fox", "the dog"])
    bodies = [{"prompt": [token]} for token in (-1, 512, 10**6, 2**40, 2**70)]
    raw = [json.dumps(body).encode() for body in bodies] + [b'{"prompt": "\\ud83d"}', b'{"prompt": "\xc3("}']
    for body in raw:
        refused(api.post("/v1/completions", body))
    assert api.complete(["the fox", "the dog"])["choices"] == before["choices"]
    assert api.complete("the fox")["choices"][0]["text"] == before["choices"][0]["text"]


@pytest.mark.parametrize("path", PATHS)
def test_A4_biases_and_stops_outside_the_vocabulary_are_refused(api, path: str) -> None:
    base = api.chat_body() if "chat" in path else {"prompt": "x"}
    for biases in ({"99999999": 5}, {"-1": 5}, {"abc": 5}, {"512": 5}, {"": 5}, {"1" * 30: 5}, {"٣": 5}):
        refused(api.post(path, {**base, "logit_bias": biases}), param="logit_bias")
    for token in (512, 2**31, -1):
        refused(api.post(path, {**base, "stop_token_ids": [token]}), param="stop_token_ids")
    refused(api.post("/detokenize", {"tokens": [512]}), param="tokens")


def test_biases_within_the_vocabulary_force_a_token(api) -> None:
    choice = api.complete(logit_bias={"300": 100}, max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [300] * 3


def test_top_p_zero_means_the_most_likely(api) -> None:
    assert api.complete(temperature=2, top_p=0)["choices"] == api.complete()["choices"]


def test_a_failure_nobody_foresaw_is_500_without_a_traceback(api, caplog) -> None:
    def broken(request):
        raise ZeroDivisionError("secret detail")

    api.engine.submit = broken
    response = api.post("/v1/completions", {"prompt": "x"})
    assert refused(response, 500)["code"] == "internal_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError" in caplog.text
