"""Filling a model: formats and element types agree, memory is one copy, and what is damaged is refused in one line."""

import dataclasses
import json
import logging
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from octavo_core.errors import CheckpointError, ConfigError, UnsupportedModelError
from octavo_models import Checkpoint, Decoder, GenerationConfig, ModelConfig, RopeConfig, load_model, resolve
from octavo_models._src.gguf_weights import half_split_order, hugging_face_name
from octavo_models._src.weights import empty_aligned, row_chunks

FIXTURES = Path(__file__).parent / "fixtures"
GGUF_NAME = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
BIASED = ModelConfig("LlamaForCausalLM", 40, 32, 64, 2, 4, 2, 8, attention_bias=True, mlp_bias=True)


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


def assert_same_weights(one, two):
    for a, b in zip(arrays(one), arrays(two), strict=True):
        np.testing.assert_array_equal(a, b)


def random_tensors(config, dtype=np.float32):
    """Every tensor of a model under its Hugging Face name, as bfloat16 values."""
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype="float32"))
    generator = np.random.default_rng(0)
    shapes = {name: (rows, *param.shape[1:]) for param, parts in abstract.weight_parts() for name, rows in parts}
    return {n: generator.normal(size=s).astype(ml_dtypes.bfloat16).astype(dtype) for n, s in shapes.items()}


def checkpoint_of(config, *files, kind="hf"):
    return Checkpoint(files[0].parent, kind, "test", config, GenerationConfig(), files)


def write_gguf(path, tensors, config, *, quantisation=None):
    """Write a file as llama.cpp would: its names, and the rows of Q and K in pairs of neighbours."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        stem, _, kind = name.removeprefix(f"model.layers.{layer}.").rpartition(".")
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(stem)
        if heads:
            inverse = np.argsort(half_split_order(values.shape[0], heads))
            values = np.ascontiguousarray(values[inverse])
        gguf_name = f"{GGUF_NAME[stem]}.{kind}" if layer is None else f"blk.{layer}.{GGUF_NAME[stem]}.{kind}"
        assert hugging_face_name(gguf_name) == name
        if quantisation and values.ndim == 2:
            writer.add_tensor(gguf_name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A checkpoint with every kind of tensor: untied head, biases everywhere."""
    path = tmp_path_factory.mktemp("biased") / "model.safetensors"
    tensors = random_tensors(BIASED)
    save_file(tensors, path)
    return tensors, load_model(checkpoint_of(BIASED, path), dtype="float32", progress=False)


def test_fused_weights_hold_their_parts_in_order(biased):
    tensors, model = biased
    layer = model.blocks[1]
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    np.testing.assert_array_equal(layer.attention.qkv.weight[...], np.concatenate(parts))
    biases = [tensors[f"model.layers.1.mlp.{p}_proj.bias"] for p in ("gate", "up")]
    np.testing.assert_array_equal(layer.mlp.gate_up.bias[...], np.concatenate(biases))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stored_type_gives_every_working_type(tmp_path, stored, dtype):
    config = dataclasses.replace(BIASED, tie_word_embeddings=True)
    tensors = {n: v.astype(stored) for n, v in random_tensors(config).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(checkpoint_of(config, tmp_path / "model.safetensors"), dtype=dtype, progress=False)
    assert {a.dtype for a in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(model.embed.weight[...], tensors["model.embed_tokens.weight"].astype(model.dtype))


def test_shards_equal_one_file(tmp_path, biased):
    tensors, whole = biased
    names = sorted(tensors)
    for i in range(3):
        save_file({n: tensors[n] for n in names[i::3]}, tmp_path / f"{i}.safetensors")
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    assert_same_weights(load_model(checkpoint_of(BIASED, *files), dtype="float32", progress=False), whole)


@pytest.mark.parametrize("quantisation", [None, gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.F16])
def test_an_unquantised_gguf_equals_the_safetensors_it_was_made_from(tmp_path, biased, quantisation):
    tensors, model = biased
    path = write_gguf(tmp_path / "m.gguf", tensors, BIASED, quantisation=quantisation)
    loaded = load_model(checkpoint_of(BIASED, path, kind="gguf"), dtype="float32", progress=False)
    tolerance = 1e-3 if quantisation == gguf.GGMLQuantizationType.F16 else 0
    for a, b in zip(arrays(loaded), arrays(model), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_a_quantised_gguf_has_the_same_bfloat16_values_in_both_types(tmp_path, biased, kind):
    tensors, model = biased
    path = write_gguf(tmp_path / "m.gguf", tensors, BIASED, quantisation=gguf.GGMLQuantizationType[kind])
    wide, narrow = (load_model(checkpoint_of(BIASED, path, kind="gguf"), dtype=d, progress=False) for d in ("float32", "bfloat16"))
    for a, b, exact in zip(arrays(wide), arrays(narrow), arrays(model), strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float32))
        np.testing.assert_allclose(a, exact, atol=0.6)


def dequantised_types():
    """Every block type that the `gguf` package turns back into numbers."""
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", dequantised_types(), ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_dequantises_is_read(tmp_path, kind):
    """Random blocks, without their NaN: what is read is what the package says, rounded once to bfloat16 unless the type is plain."""
    config = ModelConfig("LlamaForCausalLM", 512, 256, 512, 1, 4, 2, 64, tie_word_embeddings=True)
    tensors = random_tensors(config)
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 60, (512, 256 // per_block * size)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, values in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        stem, _, ending = name.removeprefix(f"model.layers.{layer}.").rpartition(".")
        stem = f"{GGUF_NAME[stem]}.{ending}" if layer is None else f"blk.{layer}.{GGUF_NAME[stem]}.{ending}"
        writer.add_tensor(stem, *((blocks, None, kind) if layer is None and values.ndim == 2 else (values,)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model(checkpoint_of(config, tmp_path / "m.gguf", kind="gguf"), dtype="float32", progress=False)
    wanted = gguf.quants.dequantize(blocks, kind)
    wanted = wanted if kind.name in ("F32", "F16", "BF16") else wanted.astype(ml_dtypes.bfloat16)
    assert np.isfinite(wanted.astype(np.float32)).all()
    np.testing.assert_array_equal(model.embed.weight[...], wanted.astype(np.float32))


def test_the_divisors_of_a_gguf_replace_the_rope_scaling(tmp_path, biased):
    tensors, _ = biased
    scaled = dataclasses.replace(BIASED, rope=RopeConfig(kind="linear", factor=8.0))
    writer = gguf.GGUFWriter(tmp_path / "r.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 8], np.float32))
    base = Decoder(BIASED, dtype="float32").frequencies
    for name, values in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else None
        stem, _, kind = name.removeprefix(f"model.layers.{layer}.").rpartition(".")
        writer.add_tensor(f"{GGUF_NAME[stem]}.{kind}" if layer is None else f"blk.{layer}.{GGUF_NAME[stem]}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model(checkpoint_of(scaled, tmp_path / "r.gguf", kind="gguf"), dtype="float32", progress=False)
    np.testing.assert_allclose(model.frequencies, np.array(base) / [1, 2, 4, 8], rtol=1e-7)


def test_the_default_checkpoint_loads_without_a_second_copy(smollm2_path):
    before = resident_bytes()
    model = load_model(resolve(str(smollm2_path)), dtype="bfloat16", progress=False)
    weights = sum(a.nbytes for a in jax.tree.leaves(nnx.state(model)))
    assert weights == 269_030_016
    assert resident_bytes() - before < weights + 120e6


def resident_bytes():
    """Anonymous memory of this process; mapped files are not counted."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not tell anonymous memory apart")


def test_a_missing_tensor_is_named(tmp_path, biased):
    tensors = dict(biased[0])
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(checkpoint_of(BIASED, tmp_path / "model.safetensors"), dtype="float32", progress=False)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(tmp_path, biased):
    tensors = {**biased[0], "model.norm.weight": np.zeros(7, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*\(7,\).*\(32,\)"):
        load_model(checkpoint_of(BIASED, tmp_path / "model.safetensors"), dtype="float32", progress=False)


def test_a_tensor_too_many_is_only_logged(tmp_path, biased, caplog):
    tensors, model = biased
    save_file({**tensors, "model.extra": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.DEBUG, "octavo_models"):
        loaded = load_model(checkpoint_of(BIASED, tmp_path / "model.safetensors"), dtype="float32", progress=False)
    assert_same_weights(loaded, model)
    assert "model.extra" in caplog.text


@pytest.mark.parametrize("damage", ["empty", "garbage", "cut header", "cut data", "gone"])
def test_a_damaged_safetensors_file_is_refused_in_one_line(tmp_path, biased, damage):
    path = tmp_path / "model.safetensors"
    save_file(biased[0], path)
    whole = path.read_bytes()
    changed = {"empty": b"", "garbage": b"\xff" * 999, "cut header": whole[:50], "cut data": whole[:-10], "gone": None}[damage]
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        load_model(checkpoint_of(BIASED, path), dtype="float32", progress=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 20, 700, -10])
def test_a_cut_gguf_file_is_refused_in_one_line(tmp_path, biased, keep):
    path = write_gguf(tmp_path / "m.gguf", biased[0], BIASED)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf") as caught:
        load_model(checkpoint_of(BIASED, path, kind="gguf"), dtype="float32", progress=False)
    assert "\n" not in str(caught.value)


def test_unreadable_element_types_are_unsupported(tmp_path, biased):
    tensors = {**biased[0], "model.norm.weight": np.zeros(32, np.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="int8"):
        load_model(checkpoint_of(BIASED, tmp_path / "model.safetensors"), dtype="float32", progress=False)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    blocks = np.zeros((2, 40), np.uint8)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="token_embd"):
        load_model(checkpoint_of(BIASED, tmp_path / "q.gguf", kind="gguf"), dtype="float32", progress=False)


def test_other_working_types_are_refused(biased, tmp_path):
    with pytest.raises(ConfigError, match="float16"):
        load_model(checkpoint_of(BIASED, tmp_path / "never-read"), dtype="float16", progress=False)


def test_fixture_checkpoints_are_bfloat16_values():
    tensors = load_file(FIXTURES / "llama" / "model.safetensors")
    assert all((v == v.astype(ml_dtypes.bfloat16).astype(v.dtype)).all() for v in tensors.values())
    assert json.loads((FIXTURES / "llama" / "provenance.json").read_text())["transformers"]


def test_buffers_are_aligned_and_chunks_cover_every_row_once():
    assert empty_aligned((3, 5), np.dtype(np.float32)).ctypes.data % 64 == 0
    rows = [i for part in row_chunks(10_000, 999) for i in range(10_000)[part]]
    assert rows == list(range(10_000))
