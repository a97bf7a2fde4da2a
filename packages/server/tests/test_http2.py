"""HTTP/2 with TLS and without, certificates of clients, and clients that behave badly. Real sockets, the toy engine."""

import contextlib
import json
import ssl
import time

import h2.config
import h2.connection
import h2.events
import httpx
import pytest

from octavo_core.errors import ConfigError
from octavo_core.testing.patience import PATIENCE_S
from octavo_server import ServerConfig
from octavo_server._src.tls import tls_context

BODY = {"prompt": "the fox", "max_tokens": 6, "temperature": 0}


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

    def events(self, timeout_s=PATIENCE_S):
        self.sock.settimeout(timeout_s)
        data = self.sock.recv(65536)
        if not data:
            raise EOFError
        found = self.h2.receive_data(data)
        self.flush()
        return found

    def until(self, kind, timeout_s=PATIENCE_S):
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
    end = time.monotonic() + PATIENCE_S
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
        sock.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            while sock.recv(65536):
                pass
    assert httpx.get(running.url + "/health").status_code == 200
