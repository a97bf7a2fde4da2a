"""A toy engine behind the real application, with a small real tokenizer; real servers in a thread and in processes."""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

install_import_hook("octavo_server", "beartype.beartype")

import httpx
import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo_core.testing.engine import ToyEngine
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, SpecialTokens, Tokenizer
from octavo_server import ServerConfig, create_app
from octavo_server._src.http_server import HttpServer
from octavo_server._src.sockets import bind, url_of
from octavo_server._src.state import ServerState
from octavo_server._src.text import Text

# A client waits by default as long as a test does.
for _part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _part, PATIENCE_S)

CORE = "octavo_core.testing.step_core:build"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}{{ prefix or '' }}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog and the cat", "once upon a time there was a village near the sea"] * 4


def build_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|eos|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    strings = {"eos_token": "<|eos|>"}
    return Tokenizer(backend, SpecialTokens(eos_id=0, strings=strings))


@dataclasses.dataclass
class Stream:
    """A fully read event stream."""

    status: int
    events: list[dict[str, Any]]
    num_done: int

    def text(self, index: int = 0) -> str:
        choices = [choice for event in self.events for choice in event.get("choices", []) if choice["index"] == index]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    def finishes(self, index: int = 0) -> list[str]:
        choices = [choice for event in self.events for choice in event.get("choices", []) if choice["index"] == index]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


class Api:
    """The application, called in process."""

    def __init__(self, engine: ToyEngine, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self.engine = engine
        template = ChatTemplate(TEMPLATE, special_tokens=tokenizer.special.strings) if tokenizer is not None else None
        self.app = create_app(engine, engine.card, tokenizer, template, config)
        self.tokenizer = tokenizer

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(go())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if isinstance(body, bytes | str):
            return self.request("POST", path, content=body, **kwargs)
        return self.request("POST", path, json=body, **kwargs)

    def complete(self, prompt: Any = "the fox", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, content: Any = "the fox", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", self.chat_body(content, **fields))
        assert response.status_code == 200, response.text
        return response.json()

    @staticmethod
    def chat_body(content: Any = "the fox", **fields: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8, **fields}

    def stream(self, path: str, **fields: Any) -> Stream:
        response = self.post(path, {"temperature": 0, "stream": True, **fields})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.text.split("\n\n")
        assert blocks[-1] == ""
        data = [block.removeprefix("data: ") for block in blocks[:-1]]
        return Stream(response.status_code, [json.loads(one) for one in data if one != "[DONE]"], data.count("[DONE]"))

    def stream_completion(self, prompt: Any = "the fox", **fields: Any) -> Stream:
        return self.stream("/v1/completions", prompt=prompt, **fields)

    def stream_chat(self, content: Any = "the fox", **fields: Any) -> Stream:
        return self.stream("/v1/chat/completions", **self.chat_body(content, **fields))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture
def make_api(tokenizer: Tokenizer):
    """Builds an `Api`; `says`: a text the engine is to generate, ended by the end-of-sequence token."""

    def make(*, says: str | None = None, config: ServerConfig | None = None, card: dict[str, Any] | None = None, **toy: Any) -> Api:
        config = config or ServerConfig()
        fields = {"name": "org/toy", "root": "", "max_model_len": 512, "vocab_size": 512, "eos_token_ids": (0,), **(card or {})}
        script = [*tokenizer.encode(says), 0] if says is not None else ()
        engine = ToyEngine(ModelCard(**fields), script=script, **toy)
        return Api(engine, None if config.skip_tokenizer_init else tokenizer, config)

    return make


@pytest.fixture
def api(make_api) -> Api:
    return make_api()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with the tokenizer and template, as a checkpoint has them."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|eos|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Served:
    """A server and its processes."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log
        self.port = int(url.rsplit(":", 1)[1])
        self.processes = psutil.Process(process.pid).children()

    def children(self, title):
        found = []
        for one in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                found += [one] if title in " ".join(one.cmdline()) else []
        return found

    @property
    def core(self):
        return next(iter(self.children("octavo-engine-core")), None)

    def complete(self, **fields):
        return httpx.post(self.url + "/v1/completions", json={"prompt": [7], "max_tokens": 4, **fields})

    def status(self, path):
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(self.url + path).status_code

    def gauge(self, name="num_requests_running"):
        return float(re.search(rf"octavo:{name}\{{[^}}]*\}} (\S+)", httpx.get(self.url + "/metrics").text)[1])

    def stop(self, timeout=PATIENCE_S):
        self.process.terminate()
        return self.process.wait(timeout)


@pytest.fixture
def start(checkpoint, tmp_path):
    """Starts `octavo serve` over a core without a model."""
    made = []

    def run(*options, model=None, step_ms=2, port=0):
        log = tmp_path / f"log-{len(made)}"
        command = [
            sys.executable,
            "-m",
            "octavo_server.cli",
            "serve",
            str(model or checkpoint),
            "--core",
            CORE,
        ]
        command += ["--port", str(port), "--host", "127.0.0.1", f"--seed={step_ms}", f"--flight-recorder-dir={tmp_path}", *options]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        made.append(process)

        def ready():
            assert process.poll() is None, log.read_text()
            return re.search(r"ready on (https?://\S+)", log.read_text())

        return Served(process, _wait_for(ready)[1], log)

    yield run
    for process in made:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_for(condition, timeout_s=PATIENCE_S):
    """Wait for so long, not counting pauses of this whole process."""
    left_s, last_s = timeout_s, time.monotonic()
    while not (found := condition()):
        now_s = time.monotonic()
        left_s, last_s = left_s - min(now_s - last_s, 0.5), now_s
        assert left_s > 0, "timed out"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def wait_for():
    return _wait_for


@pytest.fixture(scope="session")
def in_threads():
    return _in_threads


def _in_threads(count, work):
    results = [None] * count

    def one(index):
        results[index] = work(index)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


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
        assert self._up.wait(PATIENCE_S)

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
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def connect(self):
        sock = socket.create_connection(("127.0.0.1", self.port))
        self._sockets.append(sock)
        return sock

    def idle(self):
        end = time.monotonic() + PATIENCE_S
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
