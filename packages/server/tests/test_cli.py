import io
import os
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import httpx
import pytest
import uvicorn

from octavo_core.errors import ConfigError
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import ModelCard
from octavo_server import __version__, cli
from octavo_server._src import chat_client
from octavo_server._src.config import ServerConfig
from octavo_server._src.sockets import bind, url_of
from octavo_server._src.texts import load_frontend


@pytest.fixture
def served(make_api):
    """The URL of a server in a thread that says one sentence."""
    app = make_api(says="the quick brown fox").app
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield url_of("127.0.0.1", sock.getsockname()[1])
    server.should_exit = True
    thread.join()
    sock.close()


def test_help_lists_every_command_and_shows_a_broken_one_as_such(capsys, monkeypatch) -> None:
    entries = [EntryPoint("serve", "octavo_server.commands:serve", cli.GROUP), EntryPoint("broken", "no_such_module:x", cli.GROUP)]
    monkeypatch.setattr(cli, "entry_points", lambda group: entries)
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "serve a model over an OpenAI-compatible HTTP API" in out
    assert "broken not available: ModuleNotFoundError" in out
    assert cli.main([]) == 2


def test_an_unknown_command_names_the_nearest(capsys) -> None:
    assert cli.main(["chta"]) == 2
    assert "did you mean 'chat'?" in capsys.readouterr().err


def test_an_unknown_option_names_the_nearest(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["chat", "--modell=x"])
    assert end.value.code == 2
    assert "unknown option '--modell'; did you mean '--model'?" in capsys.readouterr().err


def test_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"octavo {__version__}"


def test_an_error_is_one_line_and_a_traceback_only_for_debugging(capsys, monkeypatch) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9", "hi"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("octavo: cannot talk to http://127.0.0.1:9")
    with pytest.raises(chat_client.ChatClientError):
        cli.main(["chat", "--debug", "--url", "http://127.0.0.1:9", "hi"])
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(chat_client.ChatClientError):
        cli.main(["chat", "--url", "http://127.0.0.1:9", "hi"])


def test_ctrl_c_is_no_traceback(monkeypatch) -> None:
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["chat"]) == 130


def test_underscores_in_option_names_are_dashes_and_values_stay() -> None:
    assert cli._with_dashes(["--api_key=a_b", "--max_tokens", "x_y", "m_n"]) == ["--api-key=a_b", "--max-tokens", "x_y", "m_n"]


def test_one_question_is_answered(served, capsys) -> None:
    assert cli.main(["chat", "--url", served + "/v1", "--temperature", "0", "hello"]) == 0
    assert capsys.readouterr().out == "the quick brown fox\n"


def test_a_conversation_goes_line_by_line(served, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/clear\n\nagain\n/exit\nnever\n"))
    assert cli.main(["chat", "--url", served, "--temperature", "0", "--system", "be brief", "--max-tokens", "2"]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len([line for line in lines if line]) == 2


def test_a_refusal_is_told_and_the_conversation_goes_on(served, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{'word ' * 2000}\nhello\n"))
    assert cli.main(["chat", "--url", served, "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert "maximum context length" in captured.err
    assert "the quick brown fox" in captured.out


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(served) -> None:
    shown = []

    def show(piece: str) -> None:
        shown.append(piece)
        if len("".join(shown)) > 5 and " …" not in shown:
            raise KeyboardInterrupt

    with httpx.Client(base_url=f"{served}/v1/") as client:
        chat = chat_client.Conversation(client, {"temperature": 0.0})
        said = chat.ask("hello", show)
    assert said
    assert "the quick brown fox".startswith(said)
    assert chat.messages[-1] == {"role": "assistant", "content": said}


def test_a_ctrl_c_that_a_finaliser_swallows_stops_the_answer_all_the_same(served, monkeypatch) -> None:
    shown = []

    class Finaliser:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the interpreter looks for signals

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == 1:
            Finaliser()

    swallowed = []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)
    with httpx.Client(base_url=f"{served}/v1/") as client:
        chat = chat_client.Conversation(client, {"temperature": 0.0})
        said = chat.ask("hello", show)
    assert [type(lost.exc_value) for lost in swallowed] == [KeyboardInterrupt]
    assert shown == [said, " …"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("value", ["{{ messages[0].content }}!", "file"])
def test_a_chat_template_is_given_as_text_or_file(checkpoint: Path, tmp_path: Path, value: str) -> None:
    class Engine:
        card = ModelCard(name="toy", root=str(checkpoint), max_model_len=64, vocab_size=512)

    if value == "file":
        path = tmp_path / "template.jinja"
        path.write_text("{{ messages[0].content }}!")
        value = str(path)
    _, template = load_frontend(Engine().card, ServerConfig(chat_template=value))
    assert template.render([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ConfigError, match="--chat-template"):
        load_frontend(Engine().card, ServerConfig(chat_template="/no/such/file"))
    assert load_frontend(Engine().card, ServerConfig(skip_tokenizer_init=True)) == (None, None)


@pytest.mark.parametrize("fields", [{"port": 70000}, {"max_body_bytes": 5}, {"shutdown_timeout": -1.0}, {"root_path": "x"}, {"root_path": "/x/"}, {"api_key": ("",)}, {"api_key": ("a b",)}])  # fmt: skip
def test_settings_that_cannot_work_are_refused(fields) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**fields)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        bind("no-such-host.invalid", 0)


ENGINE = """
from octavo_core.testing.engine import ToyEngine
from octavo_core.wire import ModelCard

class Fork:
    @staticmethod
    def start(config):
        return ToyEngine(ModelCard(name=config.model, root=config.model, max_model_len=64, vocab_size=512, eos_token_ids=(0,)))
"""


def test_serve_runs_a_forks_engine_by_dotted_name_and_needs_no_jax(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("octavo_engine.config")
    (tmp_path / "fork.py").write_text(ENGINE)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from octavo_server import cli\n"
        "status = cli.main(sys.argv[2:]); print('jax' in sys.modules, status)\n"
    )
    words = ["serve", str(checkpoint), "--engine", "fork:Fork", "--port", "0", "--host", "127.0.0.1", "--api-key", "a", "--served-model-name", "toy"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), *words], stdout=subprocess.PIPE, text=True)
    told = ""
    while "Octavo is ready on http://127.0.0.1:" not in told:
        line = process.stdout.readline()
        assert line, told
        told += line
    process.terminate()
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert "served as" in told
    assert rest.strip().endswith("False 0")


def test_a_model_given_twice_or_an_engine_that_is_none_is_one_line(capsys) -> None:
    pytest.importorskip("octavo_engine.config")
    assert cli.main(["serve", "a", "--model", "b"]) == 1
    assert "given twice" in capsys.readouterr().err
    assert cli.main(["serve", "a", "--port", "0", "--engine", "no_such:thing"]) == 1
    assert "cannot be loaded" in capsys.readouterr().err.splitlines()[-1]


def test_importing_the_server_imports_no_jax() -> None:
    code = "import sys, octavo_server, octavo_server.cli, octavo_server._src.serve_command; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
