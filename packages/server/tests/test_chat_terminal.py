"""`octavo chat` in a real terminal (a pty) against real servers."""

import contextlib
import io
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from octavo_core.errors import ConfigError
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.testing.terminal import start_in_terminal
from octavo_server import ServerConfig, cli
from octavo_server._src import chat_client, chat_command, chat_lines
from octavo_server._src.chat_client import ChatClientError, api_base, parse_setting
from octavo_server._src.chat_embedded import embedded_server
from octavo_server._src.sockets import bind, url_of

CORE = "octavo_core.testing.step_core:build"
SENTENCE = "the quick brown fox jumps over the lazy dog"


class Terminal:
    """`octavo chat` with these words, in a terminal."""

    def __init__(self, *words: str, **variables: str) -> None:
        program = [sys.executable, "-m", "octavo_server.cli", "chat", *words]
        self.pid, self._end = start_in_terminal(*program, PYTHONWARNINGS="ignore", **variables)
        self.told = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def line(self, text: str, prompt: str = "> ") -> None:
        """Type a line once it is asked for; what is told from now on is new."""
        self.wait_for(prompt, at_end=True)
        self.told = ""
        self.type(text + "\r")

    def wait_for(self, wanted: str, timeout_s: float = PATIENCE_S, *, at_end: bool = False) -> str:
        end = time.monotonic() + timeout_s
        while not (self.told.endswith(wanted) if at_end else wanted in self.told):
            assert time.monotonic() < end, self.told
            if select.select([self._end], [], [], 0.2)[0]:
                try:
                    self.told += os.read(self._end, 4096).decode(errors="replace").replace("\r", "")
                except OSError:
                    assert wanted in self.told, self.told
        return self.told

    def exit_status(self, timeout_s: float = PATIENCE_S) -> int:
        """Read what is left until it ends; killed where it does not."""
        end = time.monotonic() + timeout_s
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise AssertionError(f"it goes on: {self.told}")
            if select.select([self._end], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.told += os.read(self._end, 4096).decode(errors="replace").replace("\r", "")
        os.close(self._end)
        return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture
def serve_toy(make_api):
    """Starts servers in threads; answers the API and the address of each."""
    running = []

    def start(**options):
        api = make_api(**options)
        sock = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(api.app, log_level="error", ws="none", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        running.append((server, thread, sock))
        while not server.started:
            time.sleep(0.01)
        return api, url_of("127.0.0.1", sock.getsockname()[1])

    yield start
    for server, thread, sock in running:
        server.should_exit = True
        thread.join()
        sock.close()


def test_a_conversation_in_a_terminal(serve_toy, tmp_path: Path) -> None:
    api, url = serve_toy(says=SENTENCE)
    terminal = Terminal("--url", url, "--temperature", "0")
    assert "org/toy" in terminal.wait_for("> ")
    terminal.line("hello")
    terminal.wait_for(SENTENCE)
    terminal.line("/set temperature 0.5")
    terminal.line("/set")
    assert "model org/toy" in terminal.wait_for("temperature 0.5")
    terminal.line('"""two')
    terminal.line('lines"""', ". ")
    terminal.wait_for(SENTENCE)
    terminal.line("one \\")
    terminal.line("two", ". ")
    terminal.wait_for(SENTENCE)
    terminal.line(f"/save {tmp_path / 'talk.json'}")
    terminal.wait_for("6 messages in")
    saved = json.loads((tmp_path / "talk.json").read_text())
    questions = [message["content"] for message in saved["messages"] if message["role"] == "user"]
    assert questions == ["hello", "two\nlines", "one \ntwo"]
    terminal.line("/reset")
    terminal.line("/history")
    terminal.wait_for("nothing yet")
    terminal.line(f"/load {tmp_path / 'talk.json'}")
    terminal.wait_for("6 messages from")
    terminal.line("/history")
    terminal.wait_for("user: one \ntwo")
    terminal.line("/quit")
    assert terminal.exit_status() == 0
    assert api.engine.stats().num_running == 0


def test_ctrl_c_stops_the_answer_and_not_the_program(serve_toy) -> None:
    api, url = serve_toy(says=" ".join([SENTENCE] * 20), delay_s=0.05, card={"max_model_len": 4096})
    terminal = Terminal("--url", url, "--temperature", "0")
    terminal.line("go on")
    terminal.wait_for("the quick")
    terminal.type("\x03")
    terminal.wait_for(" …\n> ")
    assert SENTENCE * 2 not in terminal.told
    end = time.monotonic() + PATIENCE_S
    while api.engine.stats().num_running:
        assert time.monotonic() < end, "the server goes on computing"
        time.sleep(0.05)
    terminal.line("/history")
    assert "user: go on" in terminal.wait_for("assistant: the quick")
    terminal.wait_for("> ", at_end=True)
    terminal.type("half a question")
    terminal.wait_for("question")
    terminal.type("\x03")
    terminal.wait_for("\n> ", at_end=True)
    terminal.line("/quit")
    assert terminal.exit_status() == 0


def test_errors_are_one_line_and_the_conversation_goes_on(serve_toy) -> None:
    _, url = serve_toy(says=SENTENCE)
    terminal = Terminal("--url", url, "--temperature", "0")
    terminal.wait_for("> ")
    for line, wanted in {
        "/hepl": "octavo: unknown command '/hepl'; did you mean '/help'?",
        "/set temperatur 1": "octavo: no setting is called 'temperatur'; did you mean 'temperature'?",
        "/set temperature hot": "octavo: temperature is a number, got 'hot'",
        "/load /no/such/file": "octavo: /no/such/file cannot be read: No such file or directory",
        "/save": "octavo: /save takes the name of a file",
        "/set temperature 99": "> ",
        "hello": "octavo: the server answered HTTP 400:",
    }.items():
        terminal.line(line)
        assert "Traceback" not in terminal.wait_for(wanted)
    terminal.line("/set temperature none")
    terminal.line("/set seed 1")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_status() == 0


def test_a_server_that_dies_in_the_middle_is_told_and_the_program_stays(checkpoint: Path, tmp_path: Path) -> None:
    with embedded_server([str(checkpoint), "--core", CORE, "--max-model-len", "4096"]) as url:
        terminal = Terminal("--url", url, "--temperature", "0", "--max-tokens", "3000")
        terminal.line("hello")
        children = [child for child in psutil.Process().children(recursive=True) if child.pid != terminal.pid]
        for child in children:
            child.send_signal(signal.SIGKILL)
        terminal.wait_for("octavo: ")
        terminal.line("/history")
        terminal.wait_for("nothing yet")
        terminal.line("/quit")
        assert terminal.exit_status() == 0


def test_an_embedded_engine_is_started_and_ended(checkpoint: Path) -> None:
    with embedded_server([str(checkpoint), "--core", CORE]) as url:
        assert httpx.get(url + "/health").status_code == 200
        with httpx.Client(base_url=url + "/v1") as client:
            assert chat_client.Conversation(client, {"max_tokens": 4}).ask("hello", lambda piece: None) is not None
        children = psutil.Process().children(recursive=True)
        assert children
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


def test_an_embedded_engine_that_cannot_start_is_one_line(capsys) -> None:
    assert cli.main(["chat", "--embedded", "--model", "/no/such/model", "hi"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("octavo: the engine did not start: ")
    assert "/no/such/model" in told


def test_a_key_is_sent_and_openais_only_to_openai(serve_toy, monkeypatch, capsys) -> None:
    _, url = serve_toy(says=SENTENCE, config=ServerConfig(api_key=("secret",)))
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert cli.main(["chat", "--url", url, "hi"]) == 1
    assert "HTTP 401" in capsys.readouterr().err
    assert cli.main(["chat", "--url", url, "--api-key", "secret", "--temperature", "0", "hi"]) == 0
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert cli.main(["chat", "--url", url, "--temperature", "0", "hi"]) == 0
    assert capsys.readouterr().out == f"{SENTENCE}\n{SENTENCE}\n"
    assert chat_command._key_for("https://api.openai.com/v1", is_own=False) == "secret"
    assert chat_command._key_for("https://openai.com.example/v1", is_own=False) == "secret"  # its own variable's
    monkeypatch.delenv("OCTAVO_API_KEY")
    assert chat_command._key_for("https://openai.com.example/v1", is_own=False) is None


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("https://api.openai.com/v1", "https://api.openai.com/v1"),
        ("https://example.org/v1beta/openai/", "https://example.org/v1beta/openai"),
    ],
)
def test_an_address_names_the_api(url: str, base: str) -> None:
    assert api_base(url) == base


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:y"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="wanted a server's address"):
        api_base(url)


def test_settings_are_read_by_kind() -> None:
    assert parse_setting("max-tokens", "7") == 7
    assert parse_setting("stop", "a\\nb") == ["a\nb"]
    with pytest.raises(ConfigError, match="whole number"):
        parse_setting("seed", "1.5")


def of_lines(*lines: bytes, status: int = 200) -> chat_client.Conversation:
    """A conversation with a server that answers so."""
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=b"\n\n".join(lines)))
    return chat_client.Conversation(httpx.Client(transport=transport, base_url="http://x/v1"), {"model": "m"})


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        ([b'data: {"choices": [{"delta": {"content": "a"}}]}'], "in the middle"),
        ([b"data: {"], "no JSON"),
        ([b"data: 5"], "no event"),
        ([b'data: {"choices": [5]}'], "no chunk of an answer"),
        ([b'data: {"choices": [{"delta": {"content": [1]}}]}'], "no chunk of an answer"),
        ([b'data: {"choices": 5}'], "no chunk of an answer"),
        ([b'data: {"error": {"message": "lost"}}'], "lost"),
        ([b'data: {"error": "lost"}'], "lost"),
    ],
)
def test_an_answer_that_breaks_off_is_no_answer(lines: list[bytes], wanted: str) -> None:
    chat = of_lines(*lines)
    with pytest.raises(ChatClientError, match=wanted):
        chat.ask("hi", lambda piece: None)
    assert chat.messages == []


def chunk(text: str, *, last: bool = False) -> bytes:
    event = {"choices": [{"delta": {"content": text}, "finish_reason": "stop" if last else None}]}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_only_what_ends_lines_of_events_does(end: bytes) -> None:
    """Python's `splitlines`, by which HTTP clients read, also splits at U+2028 and its like, which servers send inside JSON."""
    texts = ["a\u2028b", "\x85c\x7f", "😀\u2029", "d"]
    whole = end.join([b": hello", *(chunk(text) + end for text in texts), chunk("", last=True) + end, b"data: [DONE]"]) + end * 2
    for size in (1, 3, 10_000):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        transport = httpx.MockTransport(lambda request, parts=parts: httpx.Response(200, content=iter(parts)))
        chat = chat_client.Conversation(httpx.Client(transport=transport, base_url="http://x/v1"), {"model": "m"})
        shown: list[str] = []
        assert chat.ask("hi", shown.append) == "".join(texts) == "".join(shown)


def test_what_a_terminal_cannot_show_is_a_question_mark(monkeypatch) -> None:
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", latin)
    chat_lines.print_piece("é 😀 \ud83d")
    assert latin.buffer.getvalue() == b"\xe9 ? ?"


def test_a_file_that_is_no_conversation_changes_nothing() -> None:
    chat = of_lines()
    chat.set_system("be brief")
    for text in ("", "[]", '{"messages": [{"role": "tool", "content": "x"}], "settings": {}}', '{"messages": 1}'):
        with pytest.raises(ConfigError, match="no saved conversation"):
            chat.from_json(text)
    assert chat.system == "be brief"
    again = of_lines()
    again.from_json(chat.to_json())
    assert (again.messages, again.settings) == (chat.messages, chat.settings)
