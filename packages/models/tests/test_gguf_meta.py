"""Headers written by the `gguf` package, so that reader and writer are not of one hand."""

import contextlib
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src import gguf_meta
from octavo_models.checkpoints import RopeConfig, open_checkpoint, read_gguf

NUMBERS = {
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
    "general.file_type": 1,
}


def write(path, *, arch="llama", numbers=None, texts=None, tensors=("token_embd.weight",), rows=8, **more):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**NUMBERS, **(numbers or {})}.items():
        if value is not None:
            writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 5e5)
    for key, value in (texts or {}).items():
        writer.add_string(key, value)
    writer.add_token_list(more.get("tokens", ["a", "b", "c"]))
    writer.add_eos_token_id(more.get("eos", 2))
    for name in tensors:
        writer.add_tensor(name, np.zeros((rows, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_written_file_is_read_back(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    config = checkpoint.config
    assert (checkpoint.kind, checkpoint.weight_files) == ("gguf", (tmp_path / "m.gguf",))
    assert (config.vocab_size, config.head_dim, config.num_kv_heads, config.dtype) == (8, 16, 2, "float16")
    assert config.rope == RopeConfig(theta=5e5)
    assert config.tie_word_embeddings
    assert checkpoint.generation.eos_token_ids == (2,)


def test_tensors_say_what_metadata_do_not(tmp_path):
    names = ("token_embd.weight", "output.weight", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    config = open_checkpoint(write(tmp_path / "m.gguf", tensors=names)).config
    assert not config.tie_word_embeddings
    assert config.has_rope_freqs
    assert config.attention_bias
    assert config.mlp_bias


def test_values_and_tensor_places_agree_with_the_gguf_package(tmp_path):
    path = write(tmp_path / "m.gguf", tensors=("token_embd.weight", "output.weight"))
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {t.name: (t.shape, t.ggml_type, t.offset) for t in ours.tensors.values()} == {
        t.name: (tuple(t.shape), int(t.tensor_type), t.data_offset) for t in theirs.tensors
    }


def test_type_sizes_agree_with_the_gguf_package():
    known = {int(kind): tuple(sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert all(known[kind] == sizes for kind, sizes in gguf_meta._TYPE_SIZES.items())


def test_an_end_token_outside_the_vocabulary_is_left_out(tmp_path, caplog):
    path = write(tmp_path / "model.gguf", eos=99)
    assert open_checkpoint(path).generation.eos_token_ids == ()
    assert "left out: 99" in caplog.text


def test_the_default_checkpoint_is_read(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 576, 9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert checkpoint.generation.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "bert"}, "'bert' is not served.*'llama'"),
        ({"texts": {"llama.rope.scaling.type": "yarn"}}, "'yarn'"),
        ({"numbers": {"llama.rope.dimension_count": 8}}, "dimension_count"),
        ({"numbers": {"split.count": 3}}, "split over 3 files"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(tmp_path, options, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        open_checkpoint(write(tmp_path / "m.gguf", **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numbers": {"llama.expert_count": 8}}, "'llama.expert_used_count' must be"),
        ({"numbers": {"llama.block_count": None}}, "'llama.block_count' must be"),
        ({"numbers": {"llama.attention.head_count": 0}}, "'llama.attention.head_count' must be"),
        ({"numbers": {"llama.attention.head_count_kv": 3}}, "head_count_kv' must be a divisor"),
        ({"numbers": {"llama.embedding_length": 66}}, "head_count' must be a divisor"),
        ({"texts": {"llama.rope.scaling.type": "linear"}}, "scaling.factor"),
        ({"tensors": ("output.weight",)}, "token_embd.weight"),
        ({"rows": 2}, "only 2 rows"),
    ],
)
def test_contradictions_are_refused_by_key(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write(tmp_path / "m.gguf", **options))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "m.gguf").read_bytes()


def test_a_file_cut_anywhere_is_refused(whole, tmp_path):
    path = tmp_path / "cut.gguf"
    for size in [*range(0, len(whole) - 1024, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            read_gguf(path)
        assert "\n" not in str(caught.value)


@given(at=st.integers(0, 700), value=st.integers(0, 255))
def test_a_flipped_byte_never_escapes_as_another_error(whole, tmp_path_factory, at, value):
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
    with contextlib.suppress(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"not a model", "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62), "truncated"),
    ],
)
def test_bytes_that_are_no_gguf_are_refused(tmp_path, content, words):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_gguf(path)
