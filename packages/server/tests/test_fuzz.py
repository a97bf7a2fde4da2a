"""Whatever comes, the answer is 2xx or a clean 4xx, and the next request is answered."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.sampled_from([2**31, 2**63, -(2**70), 10**400]),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.sampled_from(["x", "user", "text", "the fox", "org/toy", "\u2028", "\x00"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "5", "a"]), inner, max_size=4),
    max_leaves=6,
)  # fmt: skip
FIELDS = st.sampled_from(
    ["model", "prompt", "messages", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias",
     "min_tokens", "max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "logprobs", "top_logprobs", "echo", "best_of",
     "prompt_logprobs", "cache_salt", "priority", "tools", "response_format", "chat_template_kwargs", "continue_final_message",
     "repetition_penalty", "ignore_eos", "return_token_ids", "tokens", "content", "add_special_tokens", "truncate_prompt_tokens"]
)  # fmt: skip
PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
STARTS = {
    "/v1/completions": {"prompt": "the fox", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "the fox"},
    "/detokenize": {"tokens": [5]},
}


def check(api, path: str, body) -> None:
    response = api.post(path, body)
    assert response.status_code in (200, 400, 404, 413), response.text
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert '"error"' not in response.text or response.status_code != 200
    assert not api.engine._live


SETTINGS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=120)


@pytest.mark.parametrize("path", PATHS)
@SETTINGS
@given(changes=st.dictionaries(FIELDS, VALUES, max_size=3))
def test_any_fields_get_a_clean_answer(api, path: str, changes) -> None:
    check(api, path, json.dumps({**STARTS[path], **changes}))


@pytest.mark.parametrize("path", PATHS)
@SETTINGS
@given(body=st.binary(max_size=60))
def test_any_bytes_get_a_clean_answer(api, path: str, body: bytes) -> None:
    check(api, path, body)


@SETTINGS
@given(cut=st.integers(0, 90), flip=st.integers(0, 90), byte=st.integers(0, 255))
def test_a_damaged_body_gets_a_clean_answer(api, cut: int, flip: int, byte: int) -> None:
    body = bytearray(
        json.dumps({"prompt": "the fox é", "max_tokens": 2, "stop": ["a"], "logit_bias": {"5": 1}}, ensure_ascii=False).encode()
    )
    body[flip % len(body)] = byte
    check(api, "/v1/completions", bytes(body[: max(cut, 20)]))
