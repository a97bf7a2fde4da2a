import pytest

from octavo_core.testing.engine import ToyEngine
from octavo_core.wire import ModelCard
from octavo_server import create_app

FOX = "the quick brown fox"


def test_a_chat_completion_has_the_required_fields(make_api) -> None:
    body = make_api(says=FOX).chat(max_tokens=50)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": FOX, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None


def test_a_stream_opens_with_the_role_and_ends_with_the_reason(make_api) -> None:
    api = make_api(says=FOX)
    stream = api.stream_chat(max_tokens=50)
    deltas = [event["choices"][0]["delta"] for event in stream.events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert stream.events[-1]["choices"][0]["finish_reason"] == "stop"
    assert stream.text() == FOX
    assert stream.num_done == 1
    assert len({event["id"] for event in stream.events}) == 1


def test_text_parts_are_joined(api) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    assert api.chat(parts)["choices"] == api.chat("the fox")["choices"]


def test_tokens_are_limited_by_either_name_and_the_newer_wins(api) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "temperature": 0}
    for fields, count in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 9, "max_completion_tokens": 4}, 4),
    ):
        answer = api.post("/v1/chat/completions", {**body, **fields}).json()
        assert answer["usage"]["completion_tokens"] == count


def test_without_a_limit_an_answer_goes_on_to_the_end_of_the_context(make_api) -> None:
    api = make_api(card={"max_model_len": 64})
    usage = api.chat("x", max_tokens=None, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 64


def test_logprobs_have_bytes_and_as_many_alternatives_as_asked(make_api) -> None:
    api = make_api(says=FOX)
    choice = api.chat(logprobs=True, top_logprobs=3, max_tokens=4)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == choice["message"]["content"]
    for entry in entries:
        scores = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert entry["logprob"] == scores[0]
    assert all(entry["top_logprobs"] == [] for entry in api.chat(logprobs=True)["choices"][0]["logprobs"]["content"])


def test_every_counted_token_has_an_entry_the_ending_one_too(make_api) -> None:
    body = make_api(says=FOX).chat(logprobs=True, max_tokens=50)
    assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]


def test_streamed_logprobs_join_to_the_plain_ones(make_api) -> None:
    api = make_api(says=FOX)
    fields = {"logprobs": True, "top_logprobs": 2, "stop": ["fox"], "max_tokens": 50}
    plain = api.chat(**fields)["choices"][0]["logprobs"]["content"]
    scored = [event["choices"][0]["logprobs"] for event in api.stream_chat(**fields).events]
    assert [entry for one in scored if one for entry in one["content"]] == plain


def test_turns_enter_the_prompt_and_developer_means_system(api) -> None:
    user = {"role": "user", "content": "hello"}

    def count(messages) -> int:
        return api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]

    system, developer = ({"role": role, "content": "be brief"} for role in ("system", "developer"))
    assert count([user]) < count([system, user]) == count([developer, user])


def test_a_final_message_can_be_continued(api) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "return_token_ids": True}
    answer = api.post("/v1/chat/completions", body).json()
    assert api.tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False).endswith("assistant\nthe quick")
    body["messages"] = messages[:1]
    assert api.post("/v1/chat/completions", body).status_code == 400


def test_template_variables_reach_the_template_and_reserved_ones_do_not(api) -> None:
    body = api.chat_body(chat_template_kwargs={"prefix": "the lazy dog"}, return_token_ids=True)
    answer = api.post("/v1/chat/completions", body).json()
    assert "the lazy dog" in api.tokenizer.decode(answer["prompt_token_ids"])
    for kwargs in ({"messages": "x"}, {"self": "x"}, {"eos_token": "x"}, {"a b": 1}, {"a": {"b": 1}}, {"a": "x" * 5000}):
        response = api.post("/v1/chat/completions", api.chat_body(chat_template_kwargs=kwargs))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs"


def test_n_choices_each_have_a_role_and_an_end(api) -> None:
    stream = api.stream_chat(n=2, temperature=1.0, seed=1)
    for index in (0, 1):
        deltas = [event["choices"][0]["delta"] for event in stream.events if event["choices"][0]["index"] == index]
        assert sum("role" in delta for delta in deltas) == 1
        assert len(stream.finishes(index)) == 1
    assert stream.text(0) != stream.text(1)


def test_a_model_without_a_template_refuses_chat(make_api, tokenizer) -> None:
    engine = ToyEngine(ModelCard(name="toy", root="", max_model_len=64, vocab_size=512))
    api = make_api()
    api.app = create_app(engine, engine.card, tokenizer, None)
    response = api.post("/v1/chat/completions", api.chat_body())
    assert response.status_code == 400
    assert "chat template" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_tokenize_counts_what_chat_counts(api, path: str) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    counted = api.post("/tokenize", {"messages": messages}).json()["count"]
    assert counted == api.chat("the fox")["usage"]["prompt_tokens"]
