"""A real server process: sockets, signals, keep-alive, disconnects."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from octavo_core.testing.patience import PATIENCE_S

SCRIPT = Path(__file__).with_name("server_process.py")
LONG = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def start(checkpoint):
    processes = []

    def run(port: int = 0, *, wait: bool = True, **settings):
        command = [sys.executable, str(SCRIPT), str(port), str(checkpoint), json.dumps(settings)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        if not wait:
            return process
        line = process.stdout.readline()
        assert line.startswith("ready "), line + process.stderr.read()
        return process, line.split()[1]

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_port() -> int:
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def gauge(url: str, name: str = "num_requests_in_flight") -> float:
    return float(re.search(rf"octavo:{name}\{{[^}}]*\}} (\S+)", httpx.get(url + "/metrics").text)[1])


def wait_for(condition, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def test_a_served_stream_then_sigterm_ends_with_status_zero_and_no_jax(start) -> None:
    process, url = start()
    with httpx.Client(base_url=url) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": True}) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "stopped False" in out
    assert "Traceback" not in err


@pytest.mark.parametrize("stream", [False, True])
def test_running_requests_finish_after_sigterm(start, stream: bool) -> None:
    process, url = start()
    answers = []
    body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body)))
    thread.start()
    wait_for(lambda: gauge(url) == 1)
    process.send_signal(signal.SIGTERM)
    thread.join(PATIENCE_S)
    assert process.wait(PATIENCE_S) == 0
    assert answers[0].status_code == 200
    assert answers[0].text.endswith("[DONE]\n\n") if stream else answers[0].json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_shutdown_timeout_is_told_so(start, stream: bool) -> None:
    process, url = start(shutdown_timeout=0.3, delay_s=0.02)
    answers = []
    body = {**LONG, "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url + "/v1/completions", json=body)))
    thread.start()
    wait_for(lambda: gauge(url) == 1)
    process.send_signal(signal.SIGINT)
    thread.join(PATIENCE_S)
    assert process.wait(PATIENCE_S) == 0
    assert answers[0].status_code == (200 if stream else 503)
    assert '"code":"aborted"' in answers[0].text
    assert not stream or answers[0].text.endswith("data: [DONE]\n\n")


def test_a_port_in_use_is_found_before_the_model_is_loaded(start) -> None:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(taken.getsockname()[1], wait=False, load_s=10 * PATIENCE_S)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "ConfigError: cannot listen on 127.0.0.1" in err.splitlines()[-1]
    assert "--port" in err.splitlines()[-1]


def test_while_loading_health_is_503_and_sigterm_stops_at_once(start) -> None:
    port = free_port()
    process = start(port, wait=False, load_s=10 * PATIENCE_S)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url + "/health").status_code == 503
        return False

    wait_for(answers)
    response = httpx.post(url + "/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_ready"
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


def test_a_model_that_cannot_be_loaded_ends_the_server(start) -> None:
    process = start(wait=False, fails=True)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.splitlines()[-1].endswith("the checkpoint is damaged")


@pytest.mark.parametrize("stream", [True, False])
def test_A12_dropped_connections_free_their_requests(start, stream: bool) -> None:
    _, url = start(delay_s=0.02)
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    sockets = [socket.create_connection((host, int(port))) for _ in range(24)]
    for sock in sockets:
        sock.sendall(head + body)
    wait_for(lambda: gauge(url) == 24)
    for sock in sockets:
        sock.close()
    wait_for(lambda: gauge(url) == 0 and gauge(url, "num_requests_running") == 0)
    assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_connection_survives_errors_and_goes_on(start) -> None:
    _, url = start()
    with httpx.Client(base_url=url) as client:
        for body in (b"{", b'{"prompt": [-1]}', b'{"prompt": "\xff"}', b'{"prompt": "x", "max_tokens": 1}'):
            status = client.post("/v1/completions", content=body).status_code
        assert status == 200


def test_an_oversized_body_is_read_off_and_refused(start) -> None:
    _, url = start()
    response = httpx.post(url + "/v1/completions", content=b'{"prompt": "' + b"x" * (40 * 2**20) + b'"}')
    assert response.status_code == 413


def test_the_official_client_works(start) -> None:
    openai = pytest.importorskip("openai")
    _, url = start()
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("org/toy").id == "org/toy"
        messages = [{"role": "user", "content": "hi"}]
        plain = client.chat.completions.create(model="org/toy", messages=messages, max_tokens=8, temperature=0)
        options = {"include_usage": True}
        with client.chat.completions.create(
            model="org/toy", messages=messages, max_tokens=8, temperature=0, stream=True, stream_options=options
        ) as stream:
            events = list(stream)
        assert "".join(c.delta.content or "" for e in events for c in e.choices) == plain.choices[0].message.content
        assert events[-1].usage.total_tokens == plain.usage.total_tokens
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="nobody", prompt="x")
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="org/toy", prompt=[5] * 5000)
