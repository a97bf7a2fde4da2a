"""A toy engine behind the real application, with a small real tokenizer."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxtyping import install_import_hook

install_import_hook("octavo_server", "beartype.beartype")

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo_core.testing.engine import ToyEngine
from octavo_core.wire import ModelCard
from octavo_models.text import ChatTemplate, SpecialTokens, Tokenizer
from octavo_server import ServerConfig, create_app

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
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
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
