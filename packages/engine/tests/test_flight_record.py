"""The flight recorder: what lies in its file, and a record of a core that died in earnest, planned again step by step."""

import argparse
import asyncio
import contextlib
import os
import signal

import msgspec
import pytest

from octavo_core.errors import EngineDeadError
from octavo_core.records import StepRecord, read_log
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine._src.compose import build
from octavo_engine._src.process.flight import NUM_SLOTS, SLOT_BYTES, FlightRecorder
from octavo_engine.commands import simulate
from octavo_engine.config import EngineConfig
from octavo_engine.process import ProcessConfig, RemoteEngine, Supervisor, read_flight
from octavo_scheduler import simulate as sim


def test_the_flight_recorder_keeps_the_newest_thousand_steps_and_leaves_out_half_a_slot(tmp_path) -> None:
    known = [name for name in StepRecord.__struct_fields__ if name not in ("calls", "found", "keyframe")]
    fields = dict.fromkeys(known, 0) | {"preempted": "r" * 300}
    recorder = FlightRecorder(tmp_path / "flight")
    for step in range(2500):
        recorder.step(StepRecord(**fields | {"step": step}))
    assert [record.step for record in read_flight(tmp_path / "flight")] == list(range(1500, 2500))
    data = bytearray((tmp_path / "flight").read_bytes())
    data[7 * SLOT_BYTES + 40] = 0
    (tmp_path / "flight").write_bytes(data)
    assert len(read_flight(tmp_path / "flight")) == NUM_SLOTS - 1
    assert read_flight(tmp_path / "none") == []


def _dump_after(tmp_path, checkpoint, number, prompts, **engine):
    """The flight record of a core with a model that is ended by a signal while it works."""
    options = {
        "skip_tokenizer_init": True,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_events_config": None,
    }
    config = EngineConfig(model=str(checkpoint), **options | engine)
    patience_s = 30.0 if number == signal.SIGSTOP else 600.0  # a stopped core is only missed
    kept = ProcessConfig(flight_recorder_dir=str(tmp_path), watchdog_timeout=patience_s)

    async def go():
        with Supervisor(config, kept) as supervisor:
            remote = await RemoteEngine.start(supervisor.folder, supervisor.ipc)
            await remote.ready()
            short = [SamplingParams(max_tokens=5 + 7 * (i % 4), ignore_eos=True) for i in range(len(prompts))]
            requests = [
                EngineRequest(request_id=f"r{i}", prompt_ids=p, sampling=s)
                for i, (p, s) in enumerate(zip(prompts, short, strict=True))
            ]
            await asyncio.gather(*(_drain(stream) for one in requests for stream in remote.submit([one])))
            endless = SamplingParams(max_tokens=130, ignore_eos=True)
            streams = remote.submit(
                [EngineRequest(request_id=f"e{i}", prompt_ids=p, sampling=endless) for i, p in enumerate(prompts)]
            )
            await anext(streams[0])
            await streams[1].aclose()
            await anext(streams[0])
            ended = [asyncio.create_task(_drain(stream)) for stream in streams]
            os.kill(supervisor.core_pid, number)
            await asyncio.gather(*ended)
            while not list(tmp_path.glob("octavo-flight-*.jsonl")):
                await asyncio.sleep(0.05)
            await remote.aclose()

    asyncio.run(asyncio.wait_for(go(), PATIENCE_S))
    (log,) = tmp_path.glob("octavo-flight-*.jsonl")
    return log


async def _drain(stream):
    with contextlib.suppress(EngineDeadError):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    ("number", "engine"),
    [
        (signal.SIGKILL, {"num_gpu_blocks_override": 200}),
        pytest.param(signal.SIGSTOP, {"num_gpu_blocks_override": 200}, marks=pytest.mark.slow),
        pytest.param(signal.SIGSEGV, {"num_gpu_blocks_override": 21, "kv_reservation": "none"}, marks=pytest.mark.slow),
        pytest.param(
            signal.SIGKILL,
            {"num_gpu_blocks_override": 200, "scheduling_policy": "priority", "async_scheduling": False},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_record_of_a_core_that_died_is_planned_again_and_every_step_agrees(
    tmp_path, checkpoint, prompts, capsys, number, engine
) -> None:
    log = _dump_after(tmp_path, checkpoint, number, prompts, **engine)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    simulate.add_arguments(parser)
    assert simulate.run(parser.parse_args(["replay", str(log)])) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert "every step agrees" in said
    records = list(read_log(log, StepRecord))
    assert f"{len(records)} planned again, from step 0" in said.replace("\n", " ")
    assert any(record.preempted for record in records) == (engine["num_gpu_blocks_override"] == 21)
    # A record that says something else is found out.
    lines = log.read_bytes().splitlines(keepends=True)
    lines[7] = msgspec.json.encode(msgspec.structs.replace(records[7], num_decodes=records[7].num_decodes + 1)) + b"\n"
    log.write_bytes(b"".join(lines))
    assert simulate.run(parser.parse_args(["replay", str(log)])) == 1
    assert (
        f"step {records[7].step} differs: num_decodes was {records[7].num_decodes + 1}, is {records[7].num_decodes}"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_record_longer_than_what_is_kept_is_planned_again_from_a_keyframe_amid_the_work(tmp_path, checkpoint, prompts) -> None:
    recorder = FlightRecorder(tmp_path / "flight")
    options = {"skip_tokenizer_init": True, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    built = build(EngineConfig(model=str(checkpoint), num_gpu_blocks_override=25, compilation_cache_dir=None, **options), recorder)
    core, count = built.core, 0
    while core.stats().steps < 1150:
        if core.stats().num_running + core.stats().num_waiting < 10:
            sampling = SamplingParams(max_tokens=20 + count % 90, ignore_eos=True)
            core.add(EngineRequest(request_id=f"r{count}", prompt_ids=prompts[count % len(prompts)], sampling=sampling))
            count += 1
        core.turn()
    built.close()
    records = read_flight(tmp_path / "flight")
    found = sim.rerun(records)
    assert found.differences == []
    assert records[0].step < found.steps[0] < records[0].step + 260
    assert found.steps == [record.step for record in records[-len(found.steps) :]]
    assert any(record.preempted for record in records[-len(found.steps) :])
    recorder.close()
