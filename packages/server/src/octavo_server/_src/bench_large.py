"""What one large request does to everybody else: `/health` and the gaps of other streams while 6 MB of prompt are being served.

A whole server with a core that has no model, and a real tokenizer. Another process watches: it asks for `/health` all the time and
reads four streams, and says the longest that either took, once with nothing beside and once for each kind of prompt.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from octavo_core.bench import Report

KINDS: Final = ("text", "ids", "strings", "chat", "parts", "tokenize", "detokenize")
"""Of requests: a text, ids, 16 texts, a message, a message in many parts, and what the other two endpoints take."""
GOALS: Final[dict[str, float | int]] = {
    f"large.{what}.{kind}": most for kind in KINDS for what, most in (("health", 100_000), ("gap", 200_000))
}
NUM_BYTES: Final = 6_000_000
STEP_MS: Final = 20
_WORDS: Final = "the quick brown fox jumps over the lazy dog and once upon a time there was a village near the sea "
_OPTIONS: Final = (
    "--core=octavo_core.testing.step_core:build",
    "--host=127.0.0.1",
    "--port=0",
    f"--seed={STEP_MS}",
    "--max-model-len=8000000",
    "--disable-access-log",
)
_WATCHER: Final = """
import asyncio, json, os, sys, time
port = int(sys.argv[1])
def request(path, body=b""):
    method = b"POST" if body else b"GET"
    return method + b" " + path + b" HTTP/1.1\\r\\nhost: x\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body
async def stream(gaps):
    body = b'{"prompt": [1], "stream": true, "max_tokens": 100000}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(b"/v1/completions", body))
    last = None
    while await reader.read(65536):
        now = time.perf_counter()
        if last is not None:
            gaps.append(now - last)
        last = now
async def health(waits):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        began = time.perf_counter()
        writer.write(request(b"/health"))
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(int(line[15:]) for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length:"))
        await reader.readexactly(length)
        waits.append(time.perf_counter() - began)
        await asyncio.sleep(0.005)
async def main():
    waits, gaps = [], []
    tasks = [asyncio.create_task(one) for one in (health(waits), *(stream(gaps) for _ in range(4)))]
    while len(gaps) < 40:
        await asyncio.sleep(0.01)
    waits.clear(), gaps.clear()
    print("up", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    print(json.dumps({"health": waits, "gap": gaps}), flush=True)
    os._exit(0)
asyncio.run(main())
"""


def run(report: Report, *, quick: bool) -> None:
    """Measure and report."""
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        write_tokenizer(Path(folder))
        with serving(folder) as port:
            for kind in ("alone", *KINDS):
                found = watched(port, [] if kind == "alone" else [kind] * (1 if quick else 2))
                beside = "with nothing beside" if kind == "alone" else f"beside {kind}, {max(found.took):.1f} s"
                for what, seconds in (("health", found.health), ("gap", found.gap)):
                    report.add(f"large.{what}.{kind}", 1e6 * max(seconds), "us", len(seconds), f"longest, {beside}")


def write_tokenizer(folder: Path) -> None:
    """A small byte-level tokenizer and a chat template, as a checkpoint has them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([_WORDS] * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))


@contextlib.contextmanager
def serving(folder: str) -> Iterator[int]:
    """The port of a server."""
    command = [sys.executable, "-m", "octavo_server.cli", "serve", folder, *_OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            ready = next((line for line in server.stdout if "ready on" in line), None)
            if ready is None:
                raise RuntimeError("the server did not become ready")
            yield int(ready.strip().rpartition(":")[2])
        finally:
            server.terminate()


class Watched(NamedTuple):
    """Seconds that each `/health` took, between the tokens of others, and until each large request was answered."""

    health: list[float]
    gap: list[float]
    took: list[float]


def watched(port: int, kinds: list[str], num_bytes: int = NUM_BYTES) -> Watched:
    """What went on beside such requests, made one after the other."""
    command = [sys.executable, "-c", _WATCHER, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdout.readline()
        took = [_seconds_of(port, kind, num_bytes) for kind in kinds]
        if not kinds:
            time.sleep(1.0)
        watcher.stdin.write("\n")
        watcher.stdin.flush()
        found = json.loads(watcher.stdout.readline())
    return Watched(found["health"], found["gap"], took)


def _seconds_of(port: int, kind: str, num_bytes: int) -> float:
    """Have a large prompt served."""
    text = (_WORDS * (num_bytes // len(_WORDS) + 1))[:num_bytes]
    bodies: dict[str, dict[str, Any]] = {
        "text": {"prompt": text},
        "ids": {"prompt": [1, 23] * (num_bytes // 7)},
        "strings": {"prompt": [text[at : at + num_bytes // 16] for at in range(0, num_bytes, num_bytes // 16)]},
        "chat": {"messages": [{"role": "user", "content": text}]},
        "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "sea"}] * (num_bytes // 31)}]},
        "tokenize": {"prompt": text},
        "detokenize": {"tokens": [1, 23] * (num_bytes // 12)},
    }
    chat = "/v1/chat/completions"
    path = {"chat": chat, "parts": chat, "tokenize": "/tokenize", "detokenize": "/detokenize"}.get(kind, "/v1/completions")
    body = json.dumps(bodies[kind] | ({"max_tokens": 1} if path.startswith("/v1") else {})).encode()
    began = time.perf_counter()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        answer.read()
    return time.perf_counter() - began
