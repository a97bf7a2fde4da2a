"""Clients that mean harm: floods of headers, half of everything, bytes that are nothing. Each costs its own connection only."""

import asyncio
import contextlib
import json
import random
import resource
import socket
import threading
import time

import httpx
import pytest

from octavo_core.testing.patience import PATIENCE_S

BODY = json.dumps({"prompt": "the fox", "max_tokens": 4}).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY


def answer_to(running, data, timeout_s=PATIENCE_S):
    """All that comes back for some bytes, until the server closes or goes silent."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", running.port))) as sock:
        sock.settimeout(timeout_s)
        got = b""
        with contextlib.suppress(OSError):
            sock.sendall(data)
            while more := sock.recv(65536):
                got += more
        return got


def serves(running):
    answer = httpx.post(running.url + "/v1/completions", content=BODY)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("line", [b"x-a: b\r\n", b"x-long: " + b"y" * 8000 + b"\r\n", b"cookie: a=b\r\n"])
def test_a_head_without_end_is_431_long_before_its_time_is_over(run, line) -> None:
    running = run()
    answer = answer_to(running, b"GET /health HTTP/1.1\r\n" + line * (2**20 // len(line)))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431"), "reset while it was still sending, or told"
    with contextlib.closing(running.connect()) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 2**20:
                sock.sendall(line)
                sent += len(line)
                time.sleep(0)
        assert sent < 2**20, "a megabyte of headers was taken"
    serves(running)


def test_a_head_as_large_as_allowed_is_read(run) -> None:
    answer = httpx.get(run().url + "/health", headers={f"x-{i}": "y" * 1000 for i in range(50)})
    assert answer.status_code == 200


SEEDS = range(4)


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_are_nothing_cost_their_connection_only(run, seed, caplog) -> None:
    rng, running = random.Random(seed), run()
    starts = [
        b"",
        REQUEST,
        b"GET / HTTP/1.1\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
    ]
    for _ in range(40):
        data = bytearray(rng.choice(starts) + rng.randbytes(rng.randrange(200)))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data)) if data else 0 : 1] = rng.randbytes(1)
        with contextlib.closing(socket.create_connection(("127.0.0.1", running.port))) as sock:
            sock.sendall(data)
            if rng.random() < 0.5:
                sock.shutdown(socket.SHUT_WR)
                sock.settimeout(2)
                with contextlib.suppress(OSError):
                    assert b"Traceback" not in sock.recv(65536)
    serves(running)
    running.idle()
    assert not [record for record in caplog.records if record.exc_info], "an error nobody foresaw"


def frames(rng):
    """HTTP/2 frames of every kind with payloads that seldom fit."""
    for _ in range(rng.randrange(1, 12)):
        payload = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 30)))
        kind, flags, stream = rng.randrange(12), rng.choice((0, 1, 4, 5, 8, 0x25)), rng.choice((0, 1, 2, 3, 5, 2**31 - 1))
        yield len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.mark.parametrize("seed", SEEDS)
def test_http2_frames_that_make_no_sense_cost_their_connection_only(run, seed, caplog) -> None:
    rng, running = random.Random(seed), run()
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    for _ in range(60):
        sock = socket.create_connection(("127.0.0.1", running.port))
        with contextlib.closing(sock), contextlib.suppress(OSError):
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + b"".join(frames(rng)))
            sock.settimeout(0.02)
            sock.recv(65536)
    serves(running)
    running.idle()
    assert not [record for record in caplog.records if record.exc_info], "an error nobody foresaw"


def test_half_open_connections_do_not_stay_and_others_are_served(run) -> None:
    running = run(header_timeout=0.5, body_timeout=0.5)
    halves = [
        b"",
        b"POST /v1",
        REQUEST[:-5],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[:10],
        REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0")[:-1],
    ]
    socks = [running.connect() for _ in range(100)]
    for i, sock in enumerate(socks):
        sock.sendall(halves[i % len(halves)])
    serves(running)
    for sock in socks:
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass
    running.idle()


def test_a_body_that_trickles_after_its_answer_holds_nothing_for_long(run) -> None:
    running = run(header_timeout=0.5)
    with contextlib.closing(running.connect()) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 405")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 40:
                sock.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - began < 15


def test_hundreds_of_requests_in_one_packet_are_answered_in_order_and_nobody_waits(run) -> None:
    running = run()
    count = 600
    with contextlib.closing(running.connect()) as sock:
        sock.settimeout(PATIENCE_S)
        sender = threading.Thread(target=sock.sendall, args=(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * count,))
        sender.start()
        serves(running)
        got = b""
        while got.count(b"HTTP/1.1 200") < count:
            got += sock.recv(2**20)
        sender.join()


def test_a_client_that_reads_a_byte_now_and_then_is_cut_off(run) -> None:
    running = run(write_timeout=0.5)
    running.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # and so of every connection
    fields = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 4}
    body = json.dumps(fields).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", running.port))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while sock.recv(1) and time.monotonic() - began < 40:
                if running.state.answering == 0 and time.monotonic() - began > 1:
                    break
                time.sleep(0.02)
    assert time.monotonic() - began < 40
    running.idle()


def test_all_bodies_together_have_a_bound(run, monkeypatch) -> None:
    running = run(max_body_bytes=2**20)
    sock = [running.connect() for _ in range(20)]
    for one in sock:
        one.sendall(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n" + b" " * 900_000)
    end = time.monotonic() + PATIENCE_S
    while running.state.bodies.held_bytes < 15 * 2**20 - 900_000 and time.monotonic() < end:
        time.sleep(0.01)
    assert 14 * 900_000 < running.state.bodies.held_bytes <= 16 * 2**20
    answer = httpx.post(running.url + "/tokenize", content=b" " * (2**20 - 10))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert answer.headers["retry-after"]
    assert httpx.get(running.url + "/health").status_code == 200
    for one in sock:
        one.close()
    end = time.monotonic() + PATIENCE_S
    while running.state.bodies.held_bytes:
        assert time.monotonic() < end, "bodies of clients that have gone are held"
        time.sleep(0.01)
    serves(running)


def test_few_files_are_no_reason_to_stop_answering(run, wait_for) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        running = run()
        most = running.server._server.config.http_protocol_class.bounds.connections
        assert most == (400 - 96) // 2
        held = [running.connect() for _ in range(most)]
        assert httpx.get(running.url + "/health").status_code == 503
        for sock in held:
            sock.close()
        wait_for(lambda: httpx.get(running.url + "/health").status_code == 200)
        serves(running)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_hundreds_of_tiny_requests_leave_nothing_behind(run) -> None:
    running = run()

    async def load():
        limits = httpx.Limits(max_connections=20)
        async with httpx.AsyncClient(limits=limits) as client:
            for _ in range(4):
                answers = await asyncio.gather(*(client.get(running.url + "/version") for _ in range(100)))
                assert {answer.status_code for answer in answers} == {200}

    asyncio.run(load())
    assert not running.server._server.server_state.tasks
    running.idle()
