"""The engine core as a process of its own: streams, faults of every kind, restarts."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from octavo_core.errors import CheckpointError, EngineDeadError, OverloadedError, RequestError
from octavo_core.records import StepRecord, read_log
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.testing.step_core import CRASH, EXIT, MEMORY, NUM_TOKENS, STUCK
from octavo_core.wire import EngineRequest, FinishReason, SamplingParams
from octavo_engine.config import EngineConfig
from octavo_engine.process import ProcessConfig, RemoteEngine, Supervisor

TOY = "octavo_core.testing.step_core:build"
NOTICED_S = 5.0


def request(name, first=5, count=10**6, **fields):
    sampling = SamplingParams(max_tokens=count)
    return EngineRequest(request_id=name, prompt_ids=[first], sampling=sampling, **fields)


def run(body, tmp_path, *, ipc="auto", engine=None, **process):
    """Run `body(supervisor, engine)` against a toy core."""

    async def go():
        config = EngineConfig(**{"seed": 1, **(engine or {})})
        kept = ProcessConfig(**{"flight_recorder_dir": str(tmp_path), "ipc": ipc, **process})
        with Supervisor(config, kept, core=TOY) as supervisor:
            remote = await RemoteEngine.start(supervisor.folder, supervisor.ipc)
            await remote.ready()
            try:
                return await body(supervisor, remote)
            finally:
                await remote.aclose()

    return asyncio.run(asyncio.wait_for(go(), PATIENCE_S))


async def tokens(engine, one):
    return [token for output in [o async for o in engine.generate(one)] for token in output.token_ids]


async def until(condition, timeout_s=PATIENCE_S):
    """Wait for so long, not counting pauses of this whole process."""
    left_s, last_s = timeout_s, time.monotonic()
    while not condition():
        now_s = time.monotonic()
        left_s, last_s = left_s - min(now_s - last_s, 0.5), now_s
        assert left_s > 0, "timed out"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("ipc", ["iceoryx2", "sockets"])
def test_streams_side_by_side_each_get_their_own_tokens_in_order(tmp_path, ipc) -> None:
    async def body(supervisor, engine):
        answers = await asyncio.gather(*(tokens(engine, request(f"r{i}", i, 100)) for i in range(40)))
        assert answers == [list(range(i + 1, i + 101)) for i in range(40)]
        stats = engine.stats()
        assert (stats.is_ready, stats.num_running, stats.generation_tokens) == (True, 0, 4000)
        assert psutil.Process(supervisor.core_pid).cmdline()[0].startswith("octavo-engine-core")

    run(body, tmp_path, ipc=ipc)


def test_a_frontend_process_has_no_jax() -> None:
    program = "import octavo_engine.process, sys; assert not {'jax', 'jaxlib', 'flax', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_long_prompt_travels_in_parts(tmp_path) -> None:
    async def body(supervisor, engine):
        one = EngineRequest(request_id="long", prompt_ids=[7] * 400_000, sampling=SamplingParams(max_tokens=3))
        assert await tokens(engine, one) == [8, 9, 10]

    run(body, tmp_path)


def test_refusals_arrive_as_the_errors_they_are_and_a_group_is_queued_whole_or_not_at_all(tmp_path) -> None:
    async def body(supervisor, engine):
        with pytest.raises(RequestError, match="token ids") as wrong:
            await tokens(engine, request("wrong", 5000))
        assert wrong.value.param == "prompt"
        running = engine.submit([request(f"a{i}") for i in range(6)])
        await anext(running[0])
        for stream in engine.submit([request(f"b{i}") for i in range(3)]):
            with pytest.raises(OverloadedError) as full:
                await anext(stream)
            assert full.value.retry_after_s == 3
        await until(lambda: engine.stats().num_running == 6)
        assert await tokens(engine, request("c", 1, 3)) == [2, 3, 4]
        with pytest.raises(RequestError, match="in use"):
            engine.submit([request("a0")])
        for stream in running:
            await stream.aclose()
        await until(lambda: engine.stats().num_running == 0)

    run(body, tmp_path, engine={"max_num_queued_reqs": 8})


def test_closing_cancelling_and_aborting_free_the_core(tmp_path) -> None:
    async def body(supervisor, engine):
        async with aclosing(engine.generate(request("closed"))) as outputs:
            await anext(outputs)
        task = asyncio.create_task(tokens(engine, request("cancelled")))
        unread = engine.submit([request("unread")])
        await until(lambda: engine.stats().num_running == 2)
        task.cancel()
        await unread[0].aclose()
        stream = engine.submit([request("aborted")])[0]
        await anext(stream)
        await engine.abort("aborted")
        assert [o.finish_reason async for o in stream][-1] is FinishReason.ABORT
        await until(lambda: engine.stats().num_running == 0)

    run(body, tmp_path)


async def _fails(engine, supervisor, harm, pattern):
    """Streams end with an error in time, the old core is gone, the next one serves."""
    old = supervisor.core_pid
    streams = [asyncio.create_task(tokens(engine, request(f"s{i}", i))) for i in range(4)]
    await until(lambda: engine.stats().num_running == 4)
    start = time.monotonic()
    await harm(old)
    for stream in streams:
        with pytest.raises(EngineDeadError, match=pattern):
            await stream
    took = time.monotonic() - start
    assert took < NOTICED_S, f"noticed after {took:.1f} s"
    assert not engine.stats().is_ready
    assert engine.stats().error
    with pytest.raises(EngineDeadError):
        engine.submit([request("late")])
    await until(lambda: not psutil.pid_exists(old))
    await asyncio.wait_for(engine.ready(), PATIENCE_S)
    assert supervisor.core_pid != old
    assert await tokens(engine, request("after", 1, 3)) == [2, 3, 4]


def _signal(number):
    async def harm(pid):
        os.kill(pid, number)

    return harm


@pytest.mark.parametrize("ipc", ["iceoryx2", "sockets"])
@pytest.mark.parametrize(
    ("number", "pattern"), [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "not been heard of"), (signal.SIGSEGV, "signal 11")]
)
def test_A17_a_core_that_is_killed_stopped_or_crashes_is_noticed_and_replaced(tmp_path, ipc, number, pattern) -> None:
    async def body(supervisor, engine):
        await _fails(engine, supervisor, _signal(number), pattern)

    run(body, tmp_path, ipc=ipc)
    (log,) = tmp_path.glob("octavo-flight-*.jsonl")
    records = list(read_log(log, StepRecord))
    assert records
    assert [record.step for record in records] == list(range(records[0].step, records[0].step + len(records)))


@pytest.mark.parametrize(
    ("token", "pattern"),
    [(STUCK, "a step has not ended"), (CRASH, "ZeroDivisionError"), (MEMORY, "MemoryError"), (EXIT, "status 3")],
)
def test_A17_a_core_that_is_stuck_or_fails_in_a_step_is_noticed_and_replaced(tmp_path, token, pattern) -> None:
    async def body(supervisor, engine):
        async def harm(pid):
            engine.submit([request("harm", token)])

        await _fails(engine, supervisor, harm, pattern)

    run(body, tmp_path)
    assert list(tmp_path.glob("octavo-flight-*.jsonl"))


def test_a_core_that_dies_again_and_again_is_started_after_longer_and_longer_pauses(tmp_path) -> None:
    async def body(supervisor, engine):
        pauses = []
        for _ in range(3):
            old, start = supervisor.core_pid, time.monotonic()
            os.kill(old, signal.SIGKILL)
            await until(lambda gone=old: supervisor.core_pid not in (gone, None))
            pauses.append(time.monotonic() - start)
            await until(lambda: not engine.stats().is_ready)
            await asyncio.wait_for(engine.ready(), PATIENCE_S)
        assert pauses[2] > 2 * pauses[0]

    run(body, tmp_path)


def test_a_system_that_has_no_room_for_another_process_is_asked_again(tmp_path, monkeypatch) -> None:
    async def body(supervisor, engine):
        real, refused = subprocess.Popen, []

        def popen(*args, **kwargs):
            if len(refused) < 2:
                refused.append(args)
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            return real(*args, **kwargs)

        monkeypatch.setattr(subprocess, "Popen", popen)
        os.kill(supervisor.core_pid, signal.SIGKILL)
        await until(lambda: len(refused) == 2)
        assert not engine.stats().is_ready
        await asyncio.wait_for(engine.ready(), PATIENCE_S)
        assert await tokens(engine, request("after", 1, 3)) == [2, 3, 4]

    run(body, tmp_path)


def test_a_full_queue_is_no_illness(tmp_path) -> None:
    async def body(supervisor, engine):
        old = supervisor.core_pid
        streams = engine.submit([request(f"r{i}") for i in range(64)])
        end = time.monotonic() + 6
        while time.monotonic() < end:
            with pytest.raises(OverloadedError):
                await anext(engine.submit([request("more")])[0])
            assert engine.stats().is_ready
            await asyncio.sleep(0.05)
        assert supervisor.core_pid == old
        for stream in streams:
            await stream.aclose()

    run(body, tmp_path, engine={"max_num_queued_reqs": 64}, watchdog_timeout=4.0)


@pytest.mark.slow
def test_a_step_may_take_as_long_as_the_watchdog_allows_and_no_stream_ends(tmp_path) -> None:
    async def body(supervisor, engine):
        old = supervisor.core_pid
        assert await tokens(engine, request("slow", 1, 1)) == [2]
        assert supervisor.core_pid == old

    run(body, tmp_path, engine={"seed": 8000}, watchdog_timeout=PATIENCE_S)


def test_a_core_that_cannot_start_says_why_and_nothing_is_tried_again(tmp_path) -> None:
    with (
        Supervisor(EngineConfig(model="broken"), core=TOY) as supervisor,
        pytest.raises(CheckpointError, match="the checkpoint is damaged"),
    ):
        supervisor.wait_ready(600)
    with (
        Supervisor(EngineConfig(), core="no_such_module:build") as supervisor,
        pytest.raises(EngineDeadError, match="no_such_module"),
    ):
        supervisor.wait_ready(600)


def test_a_frontend_that_dies_gives_its_sequences_back_and_others_go_on(tmp_path) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from octavo_core.wire import EngineRequest, SamplingParams
        from octavo_engine.process import RemoteEngine
        async def main():
            engine = await RemoteEngine.start(sys.argv[1], sys.argv[2])
            await engine.ready()
            sampling = SamplingParams(max_tokens=10**6)
            streams = engine.submit([EngineRequest(request_id=f"x{i}", prompt_ids=[i], sampling=sampling) for i in range(5)])
            await anext(streams[0])
            print("running", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
    """)

    async def body(supervisor, engine):
        command = [sys.executable, "-c", program, supervisor.folder, supervisor.ipc]
        other = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        mine = asyncio.create_task(tokens(engine, request("mine", 1, 3000)))
        assert await other.stdout.readline() == b"running\n"
        await until(lambda: engine.stats().num_running == 6)
        other.kill()
        await other.wait()
        await until(lambda: engine.stats().num_running <= 1)
        assert await mine == [(i + 2) % NUM_TOKENS for i in range(3000)]

    run(body, tmp_path)


def test_a_frontend_that_takes_nothing_never_holds_up_the_others(tmp_path, monkeypatch) -> None:
    async def body(supervisor, engine):
        stopped = await RemoteEngine.start(supervisor.folder, supervisor.ipc)
        await stopped.ready()
        stopped.submit([request(f"x{i}") for i in range(50)])
        stopped._task.cancel()
        asyncio.get_running_loop().remove_reader(stopped._attachment.bell.fileno())
        assert len(await tokens(engine, request("mine", 1, 1000))) == 1000
        await until(lambda: engine.stats().num_running == 0)
        await stopped.aclose()

    run(body, tmp_path)


def test_lost_outputs_end_the_streams_of_that_frontend_and_it_attaches_anew(tmp_path) -> None:
    async def body(supervisor, engine):
        stream = engine.submit([request("cut")])[0]
        await anext(stream)
        engine._attachment.incoming._sequence += 1
        with pytest.raises(EngineDeadError, match="outputs of the engine core were lost"):
            [o async for o in stream]
        await asyncio.wait_for(engine.ready(), PATIENCE_S)
        assert await tokens(engine, request("after", 1, 3)) == [2, 3, 4]
        await until(lambda: engine.stats().num_running == 0)

    run(body, tmp_path)


def test_closing_ends_the_core_gently_and_leaves_nothing_behind(tmp_path) -> None:
    kept = {}

    async def body(supervisor, engine):
        kept.update(folder=supervisor.folder, pid=supervisor.core_pid)

    run(body, tmp_path)
    assert not Path(kept["folder"]).exists()
    assert not psutil.pid_exists(kept["pid"])
    assert not list(tmp_path.glob("octavo-flight-*"))


def test_a_core_ends_with_its_supervisor(tmp_path) -> None:
    program = textwrap.dedent("""
        import os, signal
        from octavo_engine.config import EngineConfig
        from octavo_engine.process import Supervisor
        supervisor = Supervisor(EngineConfig(), core="octavo_core.testing.step_core:build").start()
        supervisor.wait_ready(600)
        print(supervisor.core_pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(done.stdout)
    end = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)
