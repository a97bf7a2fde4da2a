"""What connections over HTTP/1.1 may take: slow ones, broken ones, many. Real sockets, the toy engine."""

import asyncio
import contextlib
import json
import resource
import socket
import time

import httpx
import pytest

from octavo_core.testing.patience import PATIENCE_S

BODY = {"prompt": "the fox", "max_tokens": 6, "temperature": 0}


def test_bytes_that_are_no_http_get_an_error_body(run) -> None:
    with contextlib.closing(run().connect()) as sock:
        sock.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def _closed_after(sock, timeout_s=PATIENCE_S):
    began = time.monotonic()
    sock.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            data += more
    return time.monotonic() - began, data


@pytest.mark.parametrize("beginning", [b"", b"POST /v1/comp", b"PRI * HTT"])
def test_a_head_that_does_not_come_closes_the_connection(run, beginning) -> None:
    running = run(header_timeout=0.3)
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(beginning)
        seconds, _ = _closed_after(sock)
    assert 0.1 < seconds < 15


def test_a_second_head_on_a_kept_connection_has_no_more_time_than_the_first(run) -> None:
    running = run(header_timeout=0.3)
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        sock.sendall(b"GET /hea")
        seconds, _ = _closed_after(sock)
    assert 0.1 < seconds < 15


def test_a_body_that_does_not_come_is_408(run) -> None:
    running = run(body_timeout=0.3)
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"prompt"')
        seconds, answer = _closed_after(sock)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    assert seconds < 15
    running.idle()


def test_a_client_that_reads_nothing_is_cut_off_and_its_sequence_freed(run) -> None:
    running = run(write_timeout=0.5)
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}).encode()
    running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # and so of every connection
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", running.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    end = time.monotonic() + PATIENCE_S
    while not running.state.answering:
        assert time.monotonic() < end
        time.sleep(0.01)
    end = time.monotonic() + PATIENCE_S
    while running.state.answering:
        assert time.monotonic() < end, "a client that reads nothing holds its sequence"
        time.sleep(0.05)
    sock.close()
    running.idle()


def test_a_connection_too_many_is_told_so(run, wait_for) -> None:
    running = run(max_connections=3)
    held = [running.connect() for _ in range(3)]
    answer = httpx.get(running.url + "/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"
    for sock in held:
        sock.close()
    wait_for(lambda: httpx.get(running.url + "/health").status_code == 200)


@pytest.mark.slow
def test_two_thousand_connections_at_once_are_all_answered(run) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    running = run(toy={"max_running": 32, "max_waiting": 256, "delay_s": 0.001})

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer

    async def all_of_them():
        return await asyncio.gather(*(one() for _ in range(2000)))

    answers = asyncio.run(all_of_them())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    served = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    shed = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer]
    assert len(served) + len(shed) == 2000
    assert len(served) >= 100
    running.idle()
