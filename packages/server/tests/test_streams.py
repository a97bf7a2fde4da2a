import asyncio

import pytest

from octavo_server._src.sse import encode_event

GLYPHS = "naïve 日本語 😀👍🏽 👨‍👩‍👧 กำ"
LONG = "the quick brown fox jumps over the lazy dog and the cat"


def test_A1_no_part_of_a_stop_string_is_shown(make_api) -> None:
    api = make_api(says=LONG)
    for start in range(len(LONG) - 8):
        stop = LONG[start : start + 8]
        stream = api.stream_completion(max_tokens=99, stop=[stop, "never ☃"])
        assert stream.text() == LONG[: LONG.find(stop)]
        assert stream.finishes() == ["stop"]
        assert stream.events[-1]["choices"][0]["stop_reason"] == stop
    assert api.engine.stats().num_running == 0


def test_A1_what_cannot_become_a_stop_string_is_released_at_the_end(make_api) -> None:
    api = make_api(says="the quick")
    stream = api.stream_completion(max_tokens=99, stop=["quick brown"])
    assert stream.text() == "the quick"
    assert stream.finishes() == ["stop"]
    assert stream.events[-1]["choices"][0]["stop_reason"] == 0


def test_a_stop_string_stays_in_the_text_when_asked(make_api) -> None:
    choice = make_api(says=LONG).complete(max_tokens=99, stop="brown", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "the quick brown"


def test_a_stop_string_ends_generation_in_the_engine(make_api) -> None:
    api = make_api(says=LONG)
    before = api.engine.stats().generation_tokens
    completion_tokens = api.complete(max_tokens=99, stop="quick")["usage"]["completion_tokens"]
    assert api.engine.stats().generation_tokens - before == completion_tokens


def test_A2_characters_split_over_tokens_stream_whole(make_api) -> None:
    api = make_api(says=GLYPHS)
    stream = api.stream_completion(max_tokens=99)
    assert stream.text() == GLYPHS
    assert not any("\ufffd" in choice["text"] for event in stream.events for choice in event["choices"])


@pytest.mark.parametrize("count", range(1, 31))
def test_A2_a_character_cut_by_max_tokens_is_treated_alike_in_both_modes(make_api, count: int) -> None:
    api = make_api(says=GLYPHS)
    text = api.stream_completion(max_tokens=count).text()
    assert text == api.complete(max_tokens=count)["choices"][0]["text"]
    assert GLYPHS.startswith(text)


@pytest.mark.parametrize(
    "options", [{}, {"stop": ["fox"]}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 1}, {"n": 3}]
)
def test_streamed_and_plain_answers_are_the_same(make_api, options) -> None:
    api = make_api(says=LONG)
    fields = {"max_tokens": 20, "seed": 5, **options}
    plain = api.complete(**fields)["choices"]
    stream = api.stream_completion(**fields)
    for choice in plain:
        index = choice["index"]
        assert stream.text(index) == choice["text"]
        assert stream.finishes(index) == [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            pieces = [c["logprobs"] for e in stream.events for c in e["choices"] if c["index"] == index and c["logprobs"]]
            for key, values in choice["logprobs"].items():
                assert [value for piece in pieces for value in piece[key]] == values


def test_usage_comes_last_and_once(make_api) -> None:
    api = make_api(says=LONG)
    plain = api.complete(max_tokens=9)["usage"]
    events = api.stream_completion(max_tokens=9, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == plain
    assert all(event["usage"] is None for event in events[:-1])
    assert all("usage" not in event for event in api.stream_completion(max_tokens=9).events)


def test_continuous_usage_rises(make_api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = make_api(says=LONG).stream_completion(max_tokens=9, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 9


def test_a_failure_in_the_middle_is_an_error_event_then_done(make_api) -> None:
    stream = make_api(says=LONG, fail_at=3).stream_completion(max_tokens=9)
    assert stream.events[-1]["error"]["message"] == "the toy was told to fail"
    assert stream.num_done == 1
    assert stream.finishes() == []


def test_a_failure_makes_a_plain_answer_an_http_error(make_api) -> None:
    response = make_api(says=LONG, fail_at=3).post("/v1/completions", {"prompt": "x", "max_tokens": 9})
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "the toy was told to fail",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


def test_one_failing_choice_of_several_ends_the_answer(make_api) -> None:
    response = make_api(says=LONG, fail_at=3).post("/v1/completions", {"prompt": ["x", "y"], "n": 2, "max_tokens": 9})
    assert response.status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after_also_for_streams(make_api, stream: bool) -> None:
    api = make_api(max_waiting=0)
    response = api.post("/v1/completions", {"prompt": "x", "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "overloaded"


def test_a_dead_engine_is_503(make_api) -> None:
    api = make_api()
    api.engine.close()
    response = api.post("/v1/completions", {"prompt": "x", "stream": True})
    assert response.status_code == 503
    assert api.get("/health").status_code == 503


def test_an_engine_dying_in_the_middle_is_told(make_api) -> None:
    api = make_api(says=LONG, delay_s=0.02)

    async def both():
        async def die() -> None:
            await asyncio.sleep(0.15)
            api.engine.close()

        import httpx

        async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://test") as client:
            body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
            answer, _ = await asyncio.gather(client.post("/v1/completions", json=body), die())
            return answer.text

    text = asyncio.run(both())
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")


def test_line_ends_of_unicode_cannot_cut_an_event() -> None:
    event = encode_event({"text": "a\u2028b\u2029c\u0085d日"})
    assert len(event.decode().strip().splitlines()) == 1
    assert "日" in event.decode()
