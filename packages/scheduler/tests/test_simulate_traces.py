"""Reading traces: three formats, what is wrong named by its line."""

import json

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.records import RequestRecord
from octavo_scheduler._src.sim_turn import prompt_tokens
from octavo_scheduler.simulate import make_trace, read_trace

MOONCAKE = [
    {"timestamp": 2_000, "input_length": 600, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 500, "input_length": 512, "output_length": 0, "hash_ids": [0]},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2225670+00:00,879,55
"""


def record(number, output=5, cached=0):
    return RequestRecord(
        request_id=f"r{number}",
        arrival_s=3.0 + number,
        prompt_tokens=40,
        cached_tokens=cached,
        output_tokens=output,
        queue_s=0.0,
        ttft_s=0.1,
        e2e_s=0.5,
        preemptions=0,
        finish_reason="length",
    )


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_mooncake_requests_are_sorted_and_keep_the_names_of_their_parts(tmp_path):
    trace = read_trace(write(tmp_path / "moon.jsonl", map(json.dumps, MOONCAKE)))
    assert trace.name == "moon"
    assert trace.arrival_s.tolist() == [0.0, 1.5]
    assert trace.prompt_len.tolist() == [512, 600]
    assert trace.output_len.tolist() == [1, 7]
    assert trace.parts.tolist() == [[0, -1], [0, 3]]
    assert (trace.span, trace.names_parts) == (512, True)


def test_azure_times_have_seven_digits_and_maybe_a_zone(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert trace.arrival_s == pytest.approx([0, 4.314579, 4.541977])
    assert (trace.prompt_len.tolist(), trace.output_len.tolist()) == ([374, 396, 879], [44, 109, 55])
    assert not trace.names_parts
    assert len(read_trace(path, limit=2)) == 2


def test_a_request_log_says_what_was_cached_and_leaves_out_what_made_nothing(tmp_path):
    lines = [
        msgspec.json.encode(record(i, output, cached)).decode() for i, (output, cached) in enumerate([(5, 0), (0, 0), (9, 32)])
    ]
    trace = read_trace(write(tmp_path / "requests.jsonl", lines))
    assert trace.arrival_s.tolist() == [0, 2]
    assert (trace.output_len.tolist(), trace.cached_len.tolist()) == ([5, 9], [0, 32])


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("hello\n", "the first line is 'hello'"),
        ("", "the first line is ''"),
        (json.dumps(MOONCAKE[0]) + "\n{\n", r"t:2: wanted a JSON object with timestamp"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": [0]}) + "\n", r"t:1: wanted 2 hash_ids of 0 to 2\^31 for 600 tokens, got 1"),
        (json.dumps(MOONCAKE[0] | {"input_length": 0, "hash_ids": []}) + "\n", "t:1: wanted 0 hash_ids"),
        (AZURE + "yesterday,1,1\n", "t:5: wanted TIMESTAMP, ContextTokens, GeneratedTokens"),
        ('{"request_id": "x"}\n', "t:1: wanted a record of --request-log"),
    ],
)
def test_a_file_that_is_no_trace_is_named_with_its_line(tmp_path, text, finding):
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=finding):
        read_trace(path)
    with pytest.raises(ConfigError, match="wanted a trace to read"):
        read_trace(tmp_path / "absent")


def test_a_trace_is_checked_as_it_is_made():
    with pytest.raises(ConfigError, match="have at least 1 token, got 0 and 1"):
        make_trace("t", [0.0], [0], [1])
    with pytest.raises(ConfigError, match="output_len has an entry for each of the 1 requests, got 2"):
        make_trace("t", [0.0], [1], [1, 1])
    with pytest.raises(ConfigError, match="arrivals are times in seconds, got nan"):
        make_trace("t", [float("nan")], [1], [1])
    with pytest.raises(ConfigError, match="load is above 0, got 0"):
        make_trace("t", [0.0], [1], [1]).at_load(0.0)
    assert len(make_trace("t", np.zeros(0), np.zeros(0, int), np.zeros(0, int))) == 0


def test_tokens_are_equal_where_parts_are_and_differ_elsewhere():
    parts = np.array([[5, 6, 7], [5, 6, 8], [5, 9, 7]], np.int32)
    tokens = np.asarray(prompt_tokens(jnp.array(parts), 16, 48))
    same = [(tokens[0] == tokens[i]).reshape(3, 16).all(axis=1).tolist() for i in (1, 2)]
    assert same == [[True, True, False], [True, False, True]]
    assert len(np.unique(tokens[0])) == 48
    assert tokens.min() >= 0
