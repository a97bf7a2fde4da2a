from pathlib import Path

import msgspec
import pytest

from octavo_core.records import RequestRecord, StepRecord, read_log

STEP = StepRecord(
    step=3,
    time_s=1.5,
    num_decodes=2,
    num_prefills=1,
    prefill_tokens=30,
    context_tokens=99,
    bucket_tokens=64,
    bucket_rows=8,
    device_s=0.02,
    host_s=0.0005,
    plan_s=0.0002,
    output_s=0.0001,
    num_running=3,
    num_waiting=0,
    num_free_blocks=17,
)
REQUEST = RequestRecord(
    request_id="cmpl-1",
    arrival_s=0.5,
    prompt_tokens=10,
    cached_tokens=0,
    output_tokens=0,
    queue_s=None,
    ttft_s=None,
    e2e_s=0.1,
    preemptions=0,
    finish_reason="abort",
)


@pytest.mark.parametrize("record", [STEP, REQUEST])
def test_a_log_is_read_as_it_was_written(record: msgspec.Struct, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for _ in range(3)) + b"\n")
    assert list(read_log(path, type(record))) == [record] * 3


def test_every_field_of_a_record_is_written_under_its_name() -> None:
    of_flight_records = {"calls", "found", "keyframe"}
    assert set(msgspec.json.decode(msgspec.json.encode(STEP))) == set(StepRecord.__struct_fields__) - of_flight_records


def test_a_line_of_another_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(msgspec.json.encode(REQUEST))
    with pytest.raises(msgspec.DecodeError):
        list(read_log(path, StepRecord))


def test_a_field_of_a_newer_version_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(STEP), "later": 1}))
    assert list(read_log(path, StepRecord)) == [STEP]
