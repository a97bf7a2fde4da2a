"""A client that goes away frees its sequences at once: streamed or plain, running or queued, with every middleware on."""

import asyncio
import json
import threading

import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_models.text import Tokenizer
from octavo_server import ServerConfig

BODY = {"prompt": ["the fox", "the dog"], "n": 2, "max_tokens": 400, "ignore_eos": True}
HEADERS = [(b"authorization", b"Bearer k"), (b"content-type", b"application/json")]


class Client:
    """One ASGI connection that can be dropped."""

    def __init__(self, app, body, path: str = "/v1/completions") -> None:
        self.sent: list[dict] = []
        self.gone = asyncio.Event()
        self.blocks = False
        self._first = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self._scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": HEADERS,
            "root_path": "", "scheme": "http", "http_version": "1.1", "server": ("test", 80), "client": ("test", 1), "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.task = asyncio.create_task(app(self._scope, self._receive, self._send))

    async def _receive(self) -> dict:
        if self._first:
            return self._first.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        while self.blocks:
            await asyncio.sleep(0.005)
        self.sent.append(message)


async def until(condition, timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def busy(api) -> int:
    stats = api.engine.stats()
    return stats.num_running + stats.num_waiting


@pytest.fixture
def slow(make_api):
    return lambda **toy: make_api(config=ServerConfig(api_key=("k",)), **{"delay_s": 0.005, **toy})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_running", [64, 1])
def test_A12_A13_a_dropped_request_is_freed_running_or_queued(slow, stream: bool, max_running: int) -> None:
    api = slow(max_running=max_running)

    async def scenario() -> None:
        clients = [Client(api.app, {**BODY, "stream": stream}) for _ in range(6)]
        await until(lambda: busy(api) == 24)
        if stream:
            await until(lambda: any(client.sent for client in clients))
        for client in clients:
            client.gone.set()
        await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), PATIENCE_S)
        assert busy(api) == 0
        tokens = api.engine.stats().generation_tokens
        await asyncio.sleep(0.05)
        assert api.engine.stats().generation_tokens == tokens
        last = Client(api.app, {"prompt": "x", "max_tokens": 2})
        await asyncio.wait_for(last.task, PATIENCE_S)
        assert last.sent[0]["status"] == 200

    asyncio.run(scenario())
    assert 'octavo:request_success_total{finished_reason="abort",model_name="org/toy"} 24.0' in metrics(api)


def metrics(api) -> str:
    return api.get("/metrics", headers={"authorization": "Bearer k"}).text


def test_a_plain_answer_that_nobody_waits_for_is_not_sent(slow) -> None:
    api = slow()

    async def scenario() -> None:
        client = Client(api.app, BODY)
        await until(lambda: busy(api) == 4)
        client.gone.set()
        await asyncio.wait_for(client.task, PATIENCE_S)
        assert client.sent == []

    asyncio.run(scenario())


def test_a_client_gone_before_its_body_is_complete_is_forgotten(slow) -> None:
    api = slow()

    async def scenario() -> None:
        client = Client(api.app, BODY)
        client._first = []
        client.gone.set()
        await asyncio.wait_for(client.task, PATIENCE_S)
        assert client.sent == []

    asyncio.run(scenario())
    assert busy(api) == 0


def test_a_slow_reader_holds_back_its_own_stream_only(slow) -> None:
    api = slow(delay_s=0.0)

    async def scenario() -> None:
        client = Client(api.app, {**BODY, "max_tokens": 100, "stream": True})
        await until(lambda: len(client.sent) > 3)
        client.blocks = True
        held = -1
        while held != (held := api.engine.stats().generation_tokens):
            await asyncio.sleep(0.1)
        assert held < 300
        other = Client(api.app, {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
        await asyncio.wait_for(other.task, PATIENCE_S)
        assert api.engine.stats().generation_tokens == held + 3
        client.blocks = False
        await asyncio.wait_for(client.task, PATIENCE_S)
        assert client.sent[-1]["body"] == b"data: [DONE]\n\n"

    asyncio.run(scenario())


def test_cancelling_the_application_frees_the_request(slow) -> None:
    api = slow()

    async def scenario() -> None:
        client = Client(api.app, BODY)
        await until(lambda: busy(api) == 4)
        client.task.cancel()
        await asyncio.gather(client.task, return_exceptions=True)
        assert busy(api) == 0

    asyncio.run(scenario())


def test_large_prompts_wait_for_each_other_but_no_short_one_for_them_and_one_that_is_dropped_is_forgotten(
    slow, monkeypatch
) -> None:
    api = slow(card={"max_model_len": 200_000})
    encode, began, goes_on, seen = Tokenizer.encode, threading.Event(), threading.Event(), []

    def slowly(self, text, **options):
        seen.append(len(text))
        if len(text) > 65536:
            began.set()
            assert goes_on.wait(PATIENCE_S)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", slowly)

    async def scenario() -> None:
        dropped = [Client(api.app, {"prompt": "x" * (70_000 + i), "max_tokens": 1}) for i in range(20)]
        await asyncio.to_thread(began.wait, PATIENCE_S)
        short = Client(api.app, {"prompt": "the fox", "max_tokens": 1})
        await asyncio.wait_for(short.task, PATIENCE_S)
        assert short.sent[0]["status"] == 200
        for client in dropped:
            client.gone.set()
        for client in dropped:
            await asyncio.wait_for(client.task, PATIENCE_S)
        last = Client(api.app, {"prompt": "y" * 80_000, "max_tokens": 1})
        goes_on.set()
        await asyncio.wait_for(last.task, PATIENCE_S)
        assert last.sent[0]["status"] == 200
        assert sorted(seen) == [len("the fox"), 70_000, 80_000]

    asyncio.run(scenario())
