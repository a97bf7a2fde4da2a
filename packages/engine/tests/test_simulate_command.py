"""`octavo simulate` from the command line to its files."""

import argparse
import csv
import json

import msgspec
import pytest

from octavo_core.errors import ConfigError
from octavo_core.records import RequestRecord, StepRecord, read_log
from octavo_engine._src.process import flight
from octavo_engine.commands import simulate

COST = "base=5e-3,decode=1e-4,prefill=5e-5,context=1e-7,host=1e-3"


def octavo_simulate(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    simulate.add_arguments(parser)
    return simulate.run(parser.parse_args([*map(str, words)]))


@pytest.fixture
def conversation(tmp_path):
    """Three requests, the second of which begins like the first, which has ended by then."""
    path = tmp_path / "conversation.jsonl"
    rows = [(0, 1_200, [0, 1, 2]), (2_000, 1_100, [0, 1, 3]), (2_000, 300, [9])]
    lines = [{"timestamp": t, "input_length": n, "output_length": 6, "hash_ids": ids} for t, n, ids in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


SMALL = ("--max-num-seqs", 4, "--token-budget", 256, "--blocks", 160, "--cost", COST)


@pytest.mark.slow
def test_a_conversation_finds_its_beginning_in_the_cache_that_serves(conversation, tmp_path, capsys):
    assert octavo_simulate(conversation, *SMALL, "--json", tmp_path / "o.json", "--step-log", tmp_path / "steps") == 0
    assert "the cache that serves" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "o.json").read_text())
    assert found["cached_share"] == pytest.approx(1_024 / 2_600)
    steps = list(read_log(tmp_path / "steps", StepRecord))
    assert sum(s.prefill_tokens for s in steps) == 1_200 + 76 + 300
    assert len(steps) == found["steps"]


def test_a_sweep_has_a_row_for_every_combination_and_a_page(conversation, tmp_path):
    words = (
        "--cache",
        "counts",
        "--sweep",
        "token_budget=64:256,load=1:2",
        "--csv",
        tmp_path / "o.csv",
        "--html",
        tmp_path / "o.html",
    )
    assert octavo_simulate(conversation, *SMALL, *words) == 0
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert [(row["set_token_budget"], row["set_load"]) for row in rows] == [
        ("64", "1.0"),
        ("64", "2.0"),
        ("256", "1.0"),
        ("256", "2.0"),
    ]
    assert float(rows[0]["ttft_s_p50"]) > float(rows[2]["ttft_s_p50"])
    assert (tmp_path / "o.html").read_text().count("<svg") == 4


def test_what_was_fitted_to_a_simulated_run_is_the_cost_it_was_simulated_with_and_replays_it(conversation, tmp_path, capsys):
    octavo_simulate(conversation, *SMALL, "--cache", "counts", "--step-log", tmp_path / "steps")
    assert octavo_simulate("fit", tmp_path / "steps", "--output", tmp_path / "cost.json") == 0
    cost = json.loads((tmp_path / "cost.json").read_text())
    steps = list(read_log(tmp_path / "steps", StepRecord))
    terms = [
        cost["decode_s"] * s.num_decodes + cost["prefill_s"] * s.prefill_tokens + cost["context_s"] * s.context_tokens
        for s in steps
    ]
    pairs = [cost["pairs_s"] * s.prefill_pairs for s in steps]
    assert cost["base_s"][-1] + terms[-1] + pairs[-1] == pytest.approx(steps[-1].device_s, rel=0.02)
    requests = tmp_path / "requests"
    requests.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in recorded()))
    capsys.readouterr()
    assert octavo_simulate("replay", tmp_path / "steps", "--requests", requests, *SMALL) == 0
    of_log = capsys.readouterr().out
    assert "median TTFT: recorded 100.0 ms, simulated" in of_log
    # The same steps as a core that died leaves them: the recorder's file, and the dump of it that its supervisor writes.
    recorder = flight.FlightRecorder(tmp_path / "flight")
    for step in steps:
        recorder.step(step)
    recorder.close()
    assert flight.dump(tmp_path / "flight", tmp_path / "dump.jsonl") == len(steps)
    for name in ("flight", "dump.jsonl"):
        assert octavo_simulate("replay", tmp_path / name, "--requests", requests, *SMALL) == 0
        assert capsys.readouterr().out.split("from, s")[1] == of_log.split("from, s")[1], name


def test_a_cluster_has_a_row_for_each_route(conversation, tmp_path, capsys):
    words = ("--replicas", 2, "--route", "round-robin,kv-aware", "--tier", "1e5:1e9:1e-4:shared", "--json", tmp_path / "c.json")
    assert octavo_simulate("cluster", conversation, *SMALL, *words) == 0
    found = {row["set"]["route"]: row for row in json.loads((tmp_path / "c.json").read_text())}
    assert list(found) == ["round-robin", "kv-aware"]
    assert found["round-robin"]["requests"] == 3
    assert "busiest replica" in capsys.readouterr().out


def recorded():
    return [
        RequestRecord(
            request_id=str(i),
            arrival_s=at,
            prompt_tokens=length,
            cached_tokens=0,
            output_tokens=6,
            queue_s=0.0,
            ttft_s=0.1,
            e2e_s=0.2,
            preemptions=0,
            finish_reason="length",
        )
        for i, (at, length) in enumerate([(0.0, 1_200), (2.0, 1_100), (2.0, 300)])
    ]


@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (["absent.jsonl"], "wanted a trace to read, got absent.jsonl"),
        (["fit"], "octavo simulate fit takes a step log, got nothing"),
        (["fit", "absent"], "wanted a log of StepRecords"),
        (["replay", "absent"], "wanted a log of StepRecords"),
        (["replay", "STEPS"], "give the same run's --request-log as --requests FILE"),
        (["TRACE", "--sweep", "polcy"], "nothing to sweep is called 'polcy'; did you mean 'policy'"),
        (["TRACE", "--cost", "bse=1"], "got 'bse'"),
        (["TRACE", "--blocks", "20"], "raise blocks and max_len, or leave them out"),
        (["TRACE", "--leave-out-longer", "100"], "has no request to replay"),
        (["TRACE", "--load", "0"], "load is above 0"),
        (["cluster", "TRACE", "--tier", "many"], "a tier is TOKENS:BYTES_PER_S"),
        (["cluster", "TRACE", "--route", "best"], "route is one of"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_compiled(conversation, tmp_path, words, finding):
    steps = tmp_path / "steps.jsonl"
    names = [name for name in StepRecord.__struct_fields__ if name not in ("preempted", "calls", "found", "keyframe")]
    steps.write_bytes(msgspec.json.encode(StepRecord(**dict.fromkeys(names, 0))))
    files = {"TRACE": str(conversation), "STEPS": str(steps)}
    with pytest.raises(ConfigError, match=finding):
        octavo_simulate(*[files.get(word, word) for word in words])
