"""What connections may take: HTTP/1.1 and HTTP/2, with TLS and without, slow and many clients. Real sockets, the toy engine.

Size: the stories share one running server and its clients.
"""

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import threading
import time

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from octavo_core.errors import ConfigError
from octavo_server import ServerConfig
from octavo_server._src.http_server import HttpServer
from octavo_server._src.sockets import bind, url_of
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text
from octavo_server._src.tls import tls_context

BODY = {"prompt": "the fox", "max_tokens": 6, "temperature": 0}


class Running:
    """A server in a thread."""

    def __init__(self, api, config):
        self.state = ServerState(config)
        self.engine = api.engine
        self.state.become_ready(api.engine, api.engine.card, Text(api.tokenizer, None, api.engine.card.max_model_len))
        self.sock = bind("127.0.0.1", 0)
        self.port = self.sock.getsockname()[1]
        self.url = url_of("127.0.0.1", self.port, scheme=config.scheme)
        self._up = threading.Event()
        self._sockets = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(config)))
        self._thread.start()
        assert self._up.wait(10)

    async def _run(self, config):
        self.loop = asyncio.get_running_loop()
        self.server = HttpServer(config, self.state)

        async def bring_up():
            while not self.server._server.started:
                await asyncio.sleep(0.01)
            self._up.set()
            await asyncio.Event().wait()

        await self.server.run([self.sock], bring_up)

    def close(self):
        for sock in self._sockets:
            sock.close()
        self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def connect(self):
        sock = socket.create_connection(("127.0.0.1", self.port))
        self._sockets.append(sock)
        return sock

    def idle(self):
        end = time.monotonic() + 10
        while self.state.answering or self.engine.stats().num_running:
            assert time.monotonic() < end, "a request was not freed"
            time.sleep(0.01)


@pytest.fixture
def run(make_api):
    running = []

    def start(*, toy=None, **config):
        one = Running(make_api(**(toy or {})), ServerConfig(**{"shutdown_timeout": 1.0, **config}))
        running.append(one)
        return one

    yield start
    for one in running:
        one.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    trustme = pytest.importorskip("trustme")
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    own, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client")
    own.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    client.private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder


def trusting(certificates, *, client=False):
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    if client:
        context.load_cert_chain(certificates / "client.pem")
    return context


def test_http2_with_and_without_tls_answers_as_http1_does(run, certificates) -> None:
    plain = run()
    secure = run(ssl_certfile=str(certificates / "server.pem"))
    with httpx.Client(http1=True) as one, httpx.Client(http1=False, http2=True) as two:
        first, second = one.post(plain.url + "/v1/completions", json=BODY), two.post(plain.url + "/v1/completions", json=BODY)
        assert (first.http_version, second.http_version) == ("HTTP/1.1", "HTTP/2")
        assert first.json()["choices"] == second.json()["choices"]
    with httpx.Client(http2=True, verify=trusting(certificates)) as both:
        third = both.post(secure.url + "/v1/completions", json=BODY)
        assert third.http_version == "HTTP/2"
        assert third.json()["choices"] == first.json()["choices"]
        streamed = both.post(secure.url + "/v1/completions", json={**BODY, "stream": True})
        pieces = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == first.json()["choices"][0]["text"]
        assert both.get(secure.url + "/nothing").status_code == 404
        assert both.head(secure.url + "/health").text == ""
        assert both.post(secure.url + "/v1/completions", content=b"{").status_code == 400
    with httpx.Client(http2=False, verify=trusting(certificates)) as one:
        assert one.get(secure.url + "/health").http_version == "HTTP/1.1"


def test_http2_can_be_switched_off(run, certificates) -> None:
    secure = run(ssl_certfile=str(certificates / "server.pem"), http2=False)
    with httpx.Client(http2=True, verify=trusting(certificates)) as client:
        assert client.get(secure.url + "/health").http_version == "HTTP/1.1"


def test_a_client_without_a_certificate_is_refused_where_one_is_required(run, certificates) -> None:
    server = run(ssl_certfile=str(certificates / "server.pem"), ssl_ca_certs=str(certificates / "ca.pem"))
    with httpx.Client(verify=trusting(certificates)) as nobody, pytest.raises(httpx.HTTPError):
        nobody.get(server.url + "/health")
    with httpx.Client(verify=trusting(certificates, client=True), http2=True) as known:
        assert known.get(server.url + "/health").status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ssl_certfile": "/no/such/file"}, "no certificate and its key"),
        ({"ssl_certfile": "CERT", "ssl_ca_certs": "/no/such/file"}, "holds no certificates"),
    ],
)
def test_tls_files_that_are_none_are_named(certificates, fields, message) -> None:
    fields = {name: str(certificates / "server.pem") if value == "CERT" else value for name, value in fields.items()}
    with pytest.raises(ConfigError, match=message):
        tls_context(ServerConfig(**fields))


@pytest.mark.parametrize("fields", [{"ssl_keyfile": "x"}, {"ssl_ca_certs": "x"}, {"ssl_cert_reqs": 2}, {"ssl_cert_reqs": 7}])
def test_tls_settings_that_cannot_work_are_refused(fields) -> None:
    with pytest.raises(ConfigError, match="--ssl"):
        ServerConfig(**fields)


class H2Client:
    """A client that does what well-behaved ones do not."""

    def __init__(self, running, *, window=65535):
        self.sock = running.connect()
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.flush()

    def flush(self):
        self.sock.sendall(self.h2.data_to_send())

    def post(self, body, path="/v1/completions"):
        stream = self.h2.get_next_available_stream_id()
        head = [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "x")]
        self.h2.send_headers(stream, head)
        self.h2.send_data(stream, json.dumps(body).encode(), end_stream=True)
        self.flush()
        return stream

    def events(self, timeout_s=5.0):
        self.sock.settimeout(timeout_s)
        data = self.sock.recv(65536)
        if not data:
            raise EOFError
        found = self.h2.receive_data(data)
        self.flush()
        return found

    def until(self, kind, timeout_s=5.0):
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for event in self.events(timeout_s):
                if isinstance(event, kind):
                    return event
        raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize("stream", [True, False])
def test_A12_a_reset_stream_frees_its_sequence_and_the_connection_goes_on(run, stream) -> None:
    running = run(toy={"delay_s": 0.01})
    client = H2Client(running)
    first = client.post({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream})
    end = time.monotonic() + 5
    while not running.engine.stats().num_running:
        assert time.monotonic() < end
        time.sleep(0.01)
    client.h2.reset_stream(first)
    client.flush()
    running.idle()
    second = client.post({"prompt": "x", "max_tokens": 2})
    assert client.until(h2.events.StreamEnded).stream_id == second


def test_a_closed_http2_connection_frees_every_stream(run) -> None:
    running = run(toy={"delay_s": 0.01})
    client = H2Client(running)
    for _ in range(8):
        client.post({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True})
    client.until(h2.events.DataReceived)
    client.sock.close()
    running.idle()


def test_an_answer_waits_for_the_clients_window_and_not_for_ever(run) -> None:
    running = run(toy={"delay_s": 0.001}, write_timeout=0.5)
    client = H2Client(running, window=100)
    first = client.post({"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True})
    got = client.until(h2.events.DataReceived)
    assert len(got.data) <= 100
    assert client.until(h2.events.StreamReset).stream_id == first
    running.idle()


def test_a_client_that_resets_as_fast_as_it_opens_is_cut_off(run) -> None:
    running = run(toy={"delay_s": 0.01})
    client = H2Client(running)

    def flood():
        for _ in range(400):
            client.h2.reset_stream(client.post({"prompt": "x", "max_tokens": 400, "ignore_eos": True}))
            client.flush()
        client.until(h2.events.ConnectionTerminated)
        raise EOFError

    with pytest.raises((EOFError, ConnectionError, h2.exceptions.ProtocolError)):
        flood()
    running.idle()
    assert httpx.get(running.url + "/health").status_code == 200


def test_bytes_that_are_no_http2_frames_close_the_connection_only(run) -> None:
    running = run()
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64)
        sock.settimeout(5)
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass
    assert httpx.get(running.url + "/health").status_code == 200


def test_bytes_that_are_no_http_get_an_error_body(run) -> None:
    with contextlib.closing(run().connect()) as sock:
        sock.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def _closed_after(sock, timeout_s=5.0):
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
    assert 0.1 < seconds < 3


def test_a_second_head_on_a_kept_connection_has_no_more_time_than_the_first(run) -> None:
    running = run(header_timeout=0.3)
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        sock.sendall(b"GET /hea")
        seconds, _ = _closed_after(sock)
    assert 0.1 < seconds < 3


def test_a_body_that_does_not_come_is_408(run) -> None:
    running = run(body_timeout=0.3)
    with contextlib.closing(running.connect()) as sock:
        sock.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"prompt"')
        seconds, answer = _closed_after(sock)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer
    assert seconds < 3
    running.idle()


def test_a_client_that_reads_nothing_is_cut_off_and_its_sequence_freed(run) -> None:
    running = run(write_timeout=0.5)
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 40}).encode()
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.connect(("127.0.0.1", running.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    end = time.monotonic() + 5
    while not running.state.answering:
        assert time.monotonic() < end
        time.sleep(0.01)
    end = time.monotonic() + 20
    while running.state.answering:
        assert time.monotonic() < end, "a client that reads nothing holds its sequence"
        time.sleep(0.05)
    sock.close()
    running.idle()


def test_a_connection_too_many_is_told_so(run) -> None:
    running = run(max_connections=3)
    held = [running.connect() for _ in range(3)]
    time.sleep(0.1)
    answer = httpx.get(running.url + "/health")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "overloaded"
    for sock in held:
        sock.close()
    time.sleep(0.1)
    assert httpx.get(running.url + "/health").status_code == 200


def test_six_megabytes_of_prompt_hold_up_neither_health_nor_other_streams(run) -> None:
    running = run(toy={"delay_s": 0.005})
    gaps, waits = [], []
    done = threading.Event()

    def stream():
        last = time.monotonic()
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data"):
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

    def health():
        with httpx.Client() as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get(running.url + "/health").status_code == 200
                waits.append(time.monotonic() - began)
                time.sleep(0.01)

    threads = [threading.Thread(target=stream), threading.Thread(target=health)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    body = json.dumps({"prompt": "the quick brown fox " * 300_000}).encode()
    assert len(body) > 6_000_000
    for path in ("/v1/completions", "/tokenize"):
        assert httpx.post(running.url + path, content=body, timeout=60).status_code in (200, 400)
    done.set()
    for thread in threads:
        thread.join(60)
    assert sorted(waits)[len(waits) * 9 // 10] < 0.1
    assert sorted(gaps)[len(gaps) * 9 // 10] < 0.2


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
        answer = await asyncio.wait_for(reader.read(), 90)
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
