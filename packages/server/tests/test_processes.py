"""`octavo serve` as it is started by default: frontends and an engine core in processes of their own, over real sockets.

Size: the stories share one way of starting a server.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from octavo_server._src.sockets import url_of

TESTS = Path(__file__).parent
STUCK, EXIT = 501, 504
LONG = {"prompt": [7], "max_tokens": 4000, "ignore_eos": True}


class Served:
    """A server and its processes."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log
        self.port = int(url.rsplit(":", 1)[1])

    def children(self, title):
        found = []
        for one in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found += [one] if title in " ".join(one.cmdline()) else []
        return found

    @property
    def core(self):
        return next(iter(self.children("octavo-engine-core")), None)

    def complete(self, timeout=60, **fields):
        return httpx.post(self.url + "/v1/completions", json={"prompt": [7], "max_tokens": 4, **fields}, timeout=timeout)

    def status(self, path):
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + path, timeout=5).status_code

    def gauge(self, name="num_requests_running"):
        return float(re.search(rf"octavo:{name}\{{[^}}]*\}} (\S+)", httpx.get(self.url + "/metrics").text)[1])

    def stop(self, timeout=30):
        self.process.terminate()
        return self.process.wait(timeout)


@pytest.fixture
def start(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    made = []

    def run(*options, model=None, step_ms=2, port=0):
        log = tmp_path / f"log-{len(made)}"
        command = [sys.executable, "-m", "octavo_server.cli", "serve", str(model or checkpoint), "--core", "octavo_core.testing.step_core:build"]
        command += ["--port", str(port), "--host", "127.0.0.1", f"--seed={step_ms}", f"--flight-recorder-dir={tmp_path}", *options]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        made.append(process)

        def ready():
            assert process.poll() is None, log.read_text()
            return re.search(r"ready on (https?://\S+)", log.read_text())

        return Served(process, wait_for(ready, 60)[1], log)

    yield run
    for process in made:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for(condition, timeout_s=15.0):
    """Wait for so long, not counting pauses of this whole process."""
    left_s, last_s = timeout_s, time.monotonic()
    while not (found := condition()):
        now_s = time.monotonic()
        left_s, last_s = left_s - min(now_s - last_s, 0.5), now_s
        assert left_s > 0, "timed out"
        time.sleep(0.02)
    return found


def in_threads(count, work):
    results = [None] * count

    def one(index):
        results[index] = work(index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


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


def harm_kill(served):
    served.core.send_signal(signal.SIGKILL)


def harm_stop(served):
    served.core.send_signal(signal.SIGSTOP)


def harm_stuck(served):
    threading.Thread(target=lambda: served.complete(prompt=[STUCK])).start()


def harm_exit(served):
    threading.Thread(target=lambda: served.complete(prompt=[EXIT])).start()


@pytest.mark.parametrize(
    "harm", [harm_stop, *(pytest.param(harm, marks=pytest.mark.slow) for harm in (harm_kill, harm_stuck, harm_exit))]
)
def test_A17_a_dead_or_hung_core_turns_health_red_in_five_seconds_and_is_replaced(start, harm) -> None:
    served = start("--api-server-count=2")
    old = served.core.pid
    threads, answers = in_threads(6, lambda i: served.complete(**LONG | {"stream": i % 2 == 0}))
    wait_for(lambda: served.gauge() == 6)
    assert (served.status("/health"), served.status("/ready")) == (200, 200)
    began = time.monotonic()
    harm(served)
    wait_for(lambda: served.status("/health") == 503, 5.0)
    assert served.status("/ready") == 503
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "a request hangs"
    assert time.monotonic() - began < 7
    for index, answer in enumerate(answers):
        if index % 2 == 0:
            assert answer.status_code == 200
            *_, error, done = answer.text.strip().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert done == "data: [DONE]"
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert answer.headers["retry-after"]
    wait_for(lambda: served.status("/health") == 200, 20)
    assert not psutil.pid_exists(old)
    assert served.core.pid != old
    assert served.complete().status_code == 200
    assert served.stop() == 0


def test_a_full_queue_answers_503_with_retry_after_and_health_stays_green(start) -> None:
    served = start("--max-num-queued-reqs=4", step_ms=50)
    threads, _ = in_threads(1, lambda i: served.complete(**LONG | {"n": 4, "stream": True}))
    wait_for(lambda: served.gauge() == 4)
    for _ in range(20):
        answer = served.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "overloaded"
        assert (served.status("/health"), served.status("/ready")) == (200, 200)
    assert served.gauge() == 4
    answer = served.complete(n=5)
    assert answer.status_code == 503, "of five sequences none may run"
    served.stop()
    threads[0].join(20)


def test_a_frontend_that_is_killed_is_replaced_and_its_sequences_end(start) -> None:
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
        thread.join(20)


def _or_error(work):
    try:
        return work()
    except httpx.HTTPError as error:
        return error


def test_running_requests_finish_after_sigterm_and_new_ones_are_sent_elsewhere(start) -> None:
    served = start(step_ms=5)
    threads, answers = in_threads(4, lambda i: served.complete(max_tokens=400, stream=i % 2 == 0))
    wait_for(lambda: served.gauge() == 4)
    served.process.terminate()
    wait_for(lambda: served.status("/ready") == 503)
    assert served.status("/health") == 200
    late = served.complete()
    assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
    assert late.headers["connection"] == "close"
    assert served.process.wait(30) == 0
    for index, (thread, answer) in enumerate(zip(threads, answers, strict=True)):
        thread.join(10)
        assert answer.status_code == 200
        assert answer.text.endswith("[DONE]\n\n") if index % 2 == 0 else answer.json()["usage"]["completion_tokens"] == 400


def test_what_outlives_the_shutdown_timeout_is_told_so_and_a_second_signal_ends_at_once(start) -> None:
    served = start("--shutdown-timeout=0.5", step_ms=5)
    threads, answers = in_threads(2, lambda i: served.complete(**LONG | {"stream": i == 0}))
    wait_for(lambda: served.gauge() == 2)
    assert served.stop() == 0
    for thread in threads:
        thread.join(10)
    assert [answer.status_code for answer in answers] == [200, 503]
    assert all('"code":"aborted"' in answer.text for answer in answers)

    served = start("--shutdown-timeout=60", step_ms=5)
    threads, _ = in_threads(1, lambda i: _or_error(lambda: served.complete(**LONG)))
    wait_for(lambda: served.gauge() == 1)
    children = [child.pid for child in psutil.Process(served.process.pid).children()]
    served.process.terminate()
    time.sleep(0.3)
    began = time.monotonic()
    assert served.stop(10) == 0
    assert time.monotonic() - began < 5
    assert not any(psutil.pid_exists(pid) for pid in children)
    threads[0].join(10)


class Proxy:
    """Round robin over servers: one that refuses, breaks off before its answer or answers 503 is passed over for the next."""

    def __init__(self, ports):
        self.ports, self._next = ports, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result()
        self.url = url_of("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        request = re.sub(rb"(?i)connection: keep-alive", b"connection: close", head) + await reader.readexactly(length)
        for _ in range(200):
            self._next += 1
            if await self._try(self.ports[self._next % len(self.ports)], request, writer):
                break
            await asyncio.sleep(0.02)
        writer.close()

    async def _try(self, port, request, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, upstream = await asyncio.open_connection("127.0.0.1", port)
            upstream.write(request)
            status = await reader.readuntil(b"\r\n")
            if b" 503 " in status:
                upstream.close()
                return False
            writer.write(status)
            while data := await reader.read(65536):
                writer.write(data)
            upstream.close()
            return True
        return False

    def close(self):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.mark.slow
def test_a_rolling_restart_under_load_drops_no_request(start) -> None:
    replicas = [start("--shutdown-timeout=30") for _ in range(2)]
    proxy, done, failures, count = Proxy([one.port for one in replicas]), threading.Event(), [], [0]

    def load(index):
        while not done.is_set():
            stream = index % 2 == 0
            answer = httpx.post(
                proxy.url + "/v1/completions", json={"prompt": [7], "max_tokens": 60, "stream": stream}, timeout=120
            )
            count[0] += 1
            whole = answer.text.endswith("[DONE]\n\n") if stream else answer.json()["usage"]["completion_tokens"] == 60
            if answer.status_code != 200 or not whole or '"error"' in answer.text:
                failures.append((answer.status_code, answer.text[-300:]))

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for replica in replicas:
        time.sleep(1)
        assert replica.stop() == 0
        start("--shutdown-timeout=30", port=replica.port)
    time.sleep(1)
    done.set()
    for thread in threads:
        thread.join(60)
    proxy.close()
    assert not failures
    assert count[0] > 50


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_two_thousand_connections_at_once_are_all_answered(start, count) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    served = start(f"--api-server-count={count}", "--max-num-queued-reqs=256", "--disable-access-log")
    body = json.dumps({"prompt": [7], "max_tokens": 20}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        return answer

    async def everybody():
        return await asyncio.gather(*(one() for _ in range(2000)))

    answers = asyncio.run(everybody())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    done = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    shed = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503") and b"retry-after: 3" in answer]
    assert len(done) + len(shed) == 2000
    assert len(done) >= 256
    assert served.status("/health") == 200
    wait_for(lambda: served.gauge() == 0)
    assert served.stop() == 0


def test_limits_of_a_key_hold_over_all_frontends(start, tmp_path) -> None:
    entries = [
        {"name": "one", "sha256": hashlib.sha256(b"k1").hexdigest(), "max_concurrent_requests": 3},
        {"name": "two", "sha256": hashlib.sha256(b"k2").hexdigest(), "max_tokens_per_minute": 50},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    served = start("--api-server-count=2", f"--api-keys-file={tmp_path / 'keys.json'}")

    def complete(key, **fields):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(served.url + "/v1/completions", json={"prompt": [7], **fields}, headers=headers, timeout=60)

    threads, answers = in_threads(12, lambda i: complete("k1", max_tokens=600))
    for thread in threads:
        thread.join(60)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * codes.count(200) + [429] * codes.count(429)
    assert 3 <= codes.count(200) < 12
    assert complete("k1", max_tokens=1).status_code == 200
    assert complete("k2", max_tokens=60).status_code == 200
    refused = [complete("k2", max_tokens=1) for _ in range(4)]
    assert [answer.status_code for answer in refused] == [429] * 4
    assert int(refused[0].headers["retry-after"]) >= 10
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert complete("k1", max_tokens=1).status_code == 200


def test_children_end_when_the_server_is_killed(start) -> None:
    served = start()
    children = psutil.Process(served.process.pid).children()
    served.process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
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
def test_what_cannot_be_served_ends_with_one_line(checkpoint, monkeypatch, options, model, message) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    command = [
        sys.executable,
        "-m",
        "octavo_server.cli",
        "serve",
        str(model or checkpoint),
        "--core=octavo_core.testing.step_core:build",
        "--port=0",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(message, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_found_before_anything_starts(checkpoint) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "octavo_server.cli", "serve", str(checkpoint), "--host=127.0.0.1"]
        done = subprocess.run([*command, f"--port={taken.getsockname()[1]}"], capture_output=True, text=True, timeout=60)
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


def test_os_processes_inherit_a_raised_file_limit(start) -> None:
    served = start()
    soft, hard = psutil.Process(served.children("octavo-frontend")[0].pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
