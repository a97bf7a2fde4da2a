"""`octavo serve` as it is started by default: frontends and an engine core in processes of their own, over real sockets."""

import contextlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_engine._src.process.folders import user_folder
from octavo_server._src import bench_large

CORE = "octavo_core.testing.step_core:build"
LONG = {"prompt": [7], "max_tokens": 4000, "ignore_eos": True}


def test_only_the_core_is_large_and_everything_ends_with_status_zero(start) -> None:
    served = start("--api-server-count=2")
    assert len(served.children("octavo-frontend")) == 2
    assert served.core.cmdline()[0].startswith("octavo-engine-core")
    for child in [psutil.Process(served.process.pid), *served.children("octavo-frontend")]:
        maps = {Path(one.path).name for one in child.memory_maps()}
        assert not any("jaxlib" in name or "libjax" in name for name in maps)
        assert child.memory_info().rss < 150 * 2**20
    texts = [served.complete(stream=stream, prompt=[7], max_tokens=30).text for stream in (False, True)]
    pieces = [json.loads(line[6:]) for line in texts[1].splitlines() if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == json.loads(texts[0])["choices"][0]["text"]
    log, pids = served.log, [child.pid for child in psutil.Process(served.process.pid).children()]
    assert served.stop() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "Traceback" not in log.read_text()
    assert re.search(r"frontends\s*│ 2", log.read_text())


def _or_error(work):
    try:
        return work()
    except httpx.HTTPError as error:
        return error


def test_a_frontend_that_is_killed_is_replaced_and_its_sequences_end(start, wait_for, in_threads) -> None:
    served = start("--api-server-count=2")
    victim, other = served.children("octavo-frontend")
    threads, _ = in_threads(8, lambda i: _or_error(lambda: served.complete(**LONG)))
    wait_for(lambda: served.gauge() == 8)
    victim.kill()
    wait_for(lambda: len(served.children("octavo-frontend")) == 2 and other in served.children("octavo-frontend"))
    wait_for(lambda: served.gauge() == sum(thread.is_alive() for thread in threads))
    assert served.status("/health") == 200
    assert served.complete().status_code == 200
    served.stop()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_children_end_when_the_server_is_killed(start) -> None:
    served = start()
    children = psutil.Process(served.process.pid).children()
    served.process.kill()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ([], "broken", "CheckpointError|the checkpoint is damaged"),
        (["--chat-template=/no/such/file"], None, "--chat-template is a readable"),
        (["--api-keys-file=/no/such/file"], None, "--api-keys-file /no/such/file cannot be read"),
        (["--in-process", "--api-server-count=2"], None, "--in-process keeps everything in one process"),
    ],
)
def test_what_cannot_be_served_ends_with_one_line(checkpoint, options, model, message) -> None:
    command = [
        sys.executable,
        "-m",
        "octavo_server.cli",
        "serve",
        str(model or checkpoint),
        f"--core={CORE}",
        "--port=0",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert re.search(message, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_anything_starts(checkpoint) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "octavo_server.cli", "serve", str(checkpoint), "--host=127.0.0.1"]
        done = subprocess.run([*command, f"--port={taken.getsockname()[1]}"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert "cannot listen on 127.0.0.1" in done.stderr


def test_an_idle_server_uses_little_of_a_core(start) -> None:
    served = start()
    served.complete()
    processes = [psutil.Process(served.process.pid), *psutil.Process(served.process.pid).children()]
    time.sleep(0.5)

    def used():
        return sum(sum(one.cpu_times()[:2]) for one in processes)

    before, began = used(), time.monotonic()
    time.sleep(4)
    share = (used() - before) / (time.monotonic() - began)
    assert share < 0.05, f"{100 * share:.1f} % of a core"


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [("text", 1_000_000), *(pytest.param(one, 6_000_000, marks=pytest.mark.slow) for one in bench_large.KINDS)],
)
def test_a_large_prompt_holds_up_neither_health_nor_other_streams(start, tmp_path, kind, num_bytes) -> None:
    bench_large.write_tokenizer(tmp_path)
    served = start("--max-model-len=8000000", "--disable-access-log", model=tmp_path, step_ms=20)
    alone, beside = bench_large.watched(served.port, []), bench_large.watched(served.port, [kind], num_bytes)
    # Work that keeps the event loop, or Python's lock, holds everybody up for as long as it takes. Part of that time is nobody's fault.
    most_s = max(beside.took[0] / 2, 10 * max(*alone.health, *alone.gap))
    assert max(beside.health) < most_s
    assert max(beside.gap) < most_s
    assert len(beside.health) > 10


def test_os_processes_inherit_a_raised_file_limit(start) -> None:
    served = start()
    soft, hard = psutil.Process(served.children("octavo-frontend")[0].pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def folders():
    return set(user_folder().glob("s-*"))


def test_a_killed_server_leaves_nothing_that_the_next_one_does_not_remove_and_a_living_one_is_left_alone(start, wait_for) -> None:
    before = folders()
    living, doomed = start(), start()
    assert len(folders() - before) == 2
    doomed.process.kill()
    doomed.process.wait()
    wait_for(lambda: not any(one.is_running() for one in doomed.processes))
    third = start()
    assert len(folders() - before) == 2
    assert [one.complete().status_code for one in (living, third)] == [200, 200]
    assert [one.stop() for one in (living, third)] == [0, 0]
    assert not folders() - before


def test_a_signal_at_any_moment_of_the_start_ends_everything_and_leaves_nothing(checkpoint) -> None:
    before = folders()
    command = [
        sys.executable,
        "-m",
        "octavo_server.cli",
        "serve",
        str(checkpoint),
        f"--core={CORE}",
        "--port=0",
        "--host=127.0.0.1",
    ]
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP)
    kept = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run under nohup would hand on that it is ignored
    try:
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in signals]
    finally:
        signal.signal(signal.SIGHUP, kept)
    for delay_s, sig, process in zip((0.1, 0.5, 0.5, 0.9), signals, processes, strict=True):
        time.sleep(delay_s)
        process.send_signal(sig)
    for sig, process in zip(signals, processes, strict=True):
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, -sig), out
    assert not folders() - before


def test_a_port_in_use_leaves_no_folder(checkpoint) -> None:
    before = folders()
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "octavo_server.cli", "serve", str(checkpoint), "--host=127.0.0.1"]
        subprocess.run([*command, f"--port={taken.getsockname()[1]}"], capture_output=True, timeout=PATIENCE_S)
    assert not folders() - before


@pytest.mark.slow
def test_a_frontend_that_hangs_is_replaced(start, wait_for) -> None:
    served = start("--api-server-count=2")
    hung = served.children("octavo-frontend")[0]
    hung.send_signal(signal.SIGSTOP)
    wait_for(lambda: not hung.is_running() or hung.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: len(served.children("octavo-frontend")) == 2)
    assert [served.complete().status_code for _ in range(8)] == [200] * 8
    assert "has not come round" in served.log.read_text()
    assert served.stop() == 0
