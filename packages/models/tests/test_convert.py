"""GGUF to a folder of safetensors: equal weights, equal tokens, equal prompts."""

import dataclasses
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from octavo_core.errors import ConfigError, UnsupportedModelError
from octavo_models._src.load import open_weights
from octavo_models._src.rope import inverse_frequencies
from octavo_models.checkpoints import RopeConfig, open_checkpoint, stored_types
from octavo_models.convert import convert
from octavo_models.text import load_text

HIDDEN, HEADS, KV_HEADS, LAYERS, WIDTH = 64, 4, 2, 2, 96


@pytest.fixture(scope="module")
def smollm2_folder(smollm2_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "smollm2"
    convert(open_checkpoint(smollm2_path), folder, file_bytes=64 << 20, progress=False)
    return folder


def assert_equal_weights(left, right):
    theirs, ours = open_weights(left), open_weights(right)
    names = theirs.names() - {"rope_freqs.weight"}
    assert names == ours.names()
    for name in names:
        assert theirs.shape(name) == ours.shape(name)
        first, second = theirs.rows(name, slice(None)), ours.rows(name, slice(None))
        assert np.array_equal(first, second), name


def test_the_default_checkpoint_loads_back_to_equal_weights(smollm2_path, smollm2_folder):
    before, after = open_checkpoint(smollm2_path), open_checkpoint(smollm2_folder)
    assert after.config == dataclasses.replace(before.config, dtype="bfloat16")
    assert after.generation == before.generation
    assert len(after.weight_files) > 1
    assert_equal_weights(before, after)
    assert [kind.name for kind in stored_types(after.weight_files)] == ["bfloat16"]
    assert len({path.stat().st_mode for path in smollm2_folder.iterdir()}) == 1


def test_the_default_checkpoints_text_is_the_same(smollm2_path, smollm2_folder):
    (theirs, template), (ours, again) = load_text(smollm2_path), load_text(smollm2_folder)
    for text in ("The capital of France is", "naïve 漢字 1234 <|im_start|>x", " \n\n\ttabs", ""):
        for special in (True, False):
            assert theirs.encode(text, add_special_tokens=special) == ours.encode(text, add_special_tokens=special)
        ids = theirs.encode(text)
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Why?"}]
    assert template.render(messages) == again.render(messages)


def gguf_file(path: Path, dtype=np.float32, *, divisors=None, **fields) -> Path:
    """A small Llama with a SentencePiece vocabulary, as llama.cpp writes one."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "ab", "▁ab"]
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(fields.get("theta", 10000.0))
    if "linear" in fields:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(fields["linear"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    head, kv = HIDDEN // HEADS, KV_HEADS * (HIDDEN // HEADS)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        block = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN)}
        block |= {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
        block |= {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", values if len(shape) == 1 else values.astype(dtype))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    assert head % 2 == 0
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "float32"), (np.float16, "float16")])
def test_a_file_that_is_not_quantised_keeps_every_tensors_type(tmp_path, dtype, name):
    before = open_checkpoint(gguf_file(tmp_path / "small.gguf", dtype))
    after = convert(before, tmp_path / "out", progress=False)
    assert_equal_weights(before, after)
    assert {kind.name for kind in stored_types(after.weight_files)} == {"float32", name}
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    theirs, ours = load_text(before.path)[0], load_text(after.path)[0]
    assert theirs.encode("ab a") == ours.encode("ab a")
    assert ours.encode("ab")[0] == 1
    assert ours.backend.encode("ab").ids == ours.encode("ab")


def test_scaled_rotation_is_said_in_config_json(tmp_path):
    before = open_checkpoint(gguf_file(tmp_path / "linear.gguf", linear=4.0))
    assert convert(before, tmp_path / "linear", progress=False).config.rope == before.config.rope
    rope = RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    base, scaled = (np.array(inverse_frequencies(r, 16), np.float32) for r in (RopeConfig(500000.0), rope))
    before = open_checkpoint(gguf_file(tmp_path / "llama3.gguf", theta=500000.0, divisors=base / scaled))
    after = convert(before, tmp_path / "llama3", progress=False)
    assert after.config.rope == rope
    assert_equal_weights(before, after)


def test_divisors_that_nobody_published_are_refused_and_leave_nothing(tmp_path):
    before = open_checkpoint(gguf_file(tmp_path / "own.gguf", divisors=np.linspace(1, 3, 8)))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        convert(before, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["own.gguf"]


def test_the_folder_one_stands_in_is_refused(tmp_path, monkeypatch):
    before = open_checkpoint(gguf_file(tmp_path / "small.gguf"))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"'\.' cannot be put in place whole"):
        convert(before, Path("."), progress=False)


def test_what_is_there_is_not_overwritten(tmp_path, hf_folder):
    before = open_checkpoint(gguf_file(tmp_path / "small.gguf"))
    with pytest.raises(ConfigError, match="new or empty"):
        convert(before, hf_folder, progress=False)
    with pytest.raises(ConfigError, match="already"):
        convert(open_checkpoint(hf_folder), tmp_path / "out", progress=False)
    (tmp_path / "empty").mkdir()
    assert convert(before, tmp_path / "empty", progress=False).kind == "hf"


def test_a_failure_midway_leaves_no_folder(tmp_path, monkeypatch):
    before = open_checkpoint(gguf_file(tmp_path / "small.gguf"))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octavo_models.convert.save_file", full)
    with pytest.raises(Exception, match="cannot be written: No space left on device"):
        convert(before, tmp_path / "out", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]


def test_element_types_are_counted_from_headers(smollm2_path, tmp_path, hf_folder):
    kinds = {kind.name: kind for kind in stored_types([smollm2_path])}
    assert kinds["Q4_1"].num_bytes == kinds["Q4_1"].num_elements // 32 * 20
    assert sum(kind.num_bytes for kind in kinds.values()) <= smollm2_path.stat().st_size
    before = open_checkpoint(gguf_file(tmp_path / "half.gguf", np.float16))
    assert {kind.name for kind in stored_types(before.weight_files)} == {"float16", "float32"}
    (only,) = stored_types(open_checkpoint(hf_folder).weight_files)
    assert only.num_bytes == only.num_elements * np.dtype(getattr(ml_dtypes, only.name, only.name)).itemsize
    assert json.loads((hf_folder / "config.json").read_text())["architectures"]
