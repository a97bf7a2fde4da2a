"""Checkpoints with habits: quantised weights, experts in one tensor, names of their own. Each against the plain checkpoint."""

import dataclasses
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from octavo_core.errors import CheckpointError
from octavo_models import load_model
from octavo_models.checkpoints import open_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


def write(folder, tensors):
    """safetensors, FP8 included, which the package's NumPy half does not write."""
    names = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16", "int8": "I8", "uint8": "U8"}
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": names[values.dtype.name], "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(v).tobytes() for v in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


def variant(tmp_path, name, tensors, **config):
    """The checkpoint of a fixture with other tensors and other keys in its config.json."""
    values = json.loads((FIXTURES / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **config}))
    write(tmp_path, tensors)
    return load_model(open_checkpoint(tmp_path), dtype="float32", progress=False)


def plain(name):
    folder = FIXTURES / name
    return load_file(folder / "model.safetensors"), load_model(open_checkpoint(folder), dtype="float32", progress=False)


def quantised(tensors, quantise):
    """Every matrix of a layer but the router through `quantise`, which answers elements, scales by suffix, and what they stand for."""
    stored, meant = {}, {}
    for name, values in tensors.items():
        if values.ndim == 2 and "layers" in name and "gate.weight" not in name:
            elements, scales, exact = quantise(values)
            stored[name], meant[name] = elements, exact
            stored.update({name.removesuffix("weight") + suffix: scale for suffix, scale in scales.items()})
        else:
            stored[name] = meant[name] = values
    return stored, meant


def by_row(values, dtype, most):
    scale = np.maximum(np.abs(values).max(-1, keepdims=True), 1e-8) / most
    elements = (values / scale).round().astype(dtype) if dtype == np.int8 else (values / scale).astype(dtype)
    return elements, {"weight_scale": scale.astype(np.float32)}, elements.astype(np.float32) * scale.astype(np.float32)


def whole(values, dtype):
    scale = np.array([np.abs(values).max() / 448], np.float32)
    elements = (values / scale).astype(dtype)
    return elements, {"weight_scale": scale}, elements.astype(np.float32) * scale


def by_block(values, block=16):
    """A scale a block, the last ones cut by the edge."""
    rows, columns = (-(-n // block) for n in values.shape)
    scale = np.empty((rows, columns), np.float32)
    elements, exact = np.empty(values.shape, ml_dtypes.float8_e4m3fn), np.empty_like(values)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * block : (i + 1) * block, j * block : (j + 1) * block]
            scale[i, j] = np.abs(values[at]).max() / 448
            elements[at] = values[at] / scale[i, j]
            exact[at] = elements[at].astype(np.float32) * scale[i, j]
    return elements, {"weight_scale_inv": scale}, exact


INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": {"weights": {"num_bits": 8}}}}
FP8 = {"quant_method": "compressed-tensors", "format": "float-quantized"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 16]}
CASES = {
    "int8 by channel": (INT8, lambda v: by_row(v, np.int8, 127)),
    "fp8 by channel": (FP8, lambda v: by_row(v, ml_dtypes.float8_e4m3fn, 448)),
    "fp8 by tensor": (FP8, lambda v: whole(v, ml_dtypes.float8_e4m3fn)),
    "fp8 by block": (BLOCKS, by_block),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "deepseek-v3"])
def test_quantised_weights_are_their_elements_times_their_scales(tmp_path, name, case):
    config, quantise = CASES[case]
    stored, meant = quantised(plain(name)[0], quantise)
    model = variant(tmp_path, name, stored, quantization_config=config)
    (tmp_path / "plain").mkdir()
    wanted = variant(tmp_path / "plain", name, {n: v.astype(np.float32) for n, v in meant.items()})
    assert np.abs(arrays(plain(name)[1])[0] - arrays(wanted)[0]).max() < 0.1
    for got, want in zip(arrays(model), arrays(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


def test_a_zero_point_is_taken_away_first(tmp_path):
    tensors, _ = plain("llama")
    name = "model.layers.0.self_attn.o_proj"
    elements = np.arange(64 * 64).reshape(64, 64).astype(np.int8)
    tensors[name + ".weight"] = elements
    tensors[name + ".weight_scale"] = np.full((64, 1), 0.5, np.float32)
    tensors[name + ".weight_zero_point"] = np.full((64, 1), 3, np.int8)
    model = variant(tmp_path, "llama", tensors, quantization_config=INT8)
    np.testing.assert_array_equal(model.blocks[0].attention.out.weight[...], (elements.astype(np.float32) - 3) * 0.5)


def test_a_quantised_weight_without_a_scale_is_named(tmp_path):
    tensors, _ = plain("llama")
    tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((64, 64), np.int8)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight.*int8.*o_proj\.weight_scale"):
        variant(tmp_path, "llama", tensors, quantization_config=INT8)


def test_a_scale_that_does_not_fit_is_named(tmp_path):
    stored, _ = quantised(plain("llama")[0], by_block)
    stored["model.layers.0.self_attn.o_proj.weight_scale_inv"] = np.ones((2, 2), np.float32)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight_scale_inv.*does not cover"):
        variant(tmp_path, "llama", stored, quantization_config=BLOCKS)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_in_one_tensor_equal_experts_in_many(tmp_path, name):
    tensors, wanted = plain(name)
    inner = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}.get(name, ("mlp", "gate_proj", "up_proj", "down_proj"))
    stacked = {n: v for n, v in tensors.items() if ".experts." not in n}
    for layer in range(3):
        prefix, *parts = f"model.layers.{layer}.{inner[0]}.experts", *inner[1:]
        count = sum(n.startswith(prefix) and parts[0] in n for n in tensors)
        if count:
            gate, up, down = (np.stack([tensors[f"{prefix}.{e}.{p}.weight"] for e in range(count)]) for p in parts)
            stacked[prefix + ".gate_up_proj"], stacked[prefix + ".down_proj"] = np.concatenate([gate, up], axis=1), down
    assert len(stacked) < len(tensors)
    for got, want in zip(arrays(variant(tmp_path, name, stacked)), arrays(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def mxfp4(values):
    """Blocks and scales of the last axis, and what they stand for."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.maximum(np.abs(groups).max(-1), 1e-30))).astype(np.int32) - 2
    scaled = np.ldexp(groups, -exponent[..., None])
    code = np.abs(np.abs(scaled)[..., None] - FP4).argmin(-1)
    exact = np.ldexp(np.sign(scaled) * FP4[code], exponent[..., None]).reshape(values.shape)
    code = (code + 8 * (scaled < 0)).astype(np.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + 127).astype(np.uint8), exact


def test_experts_in_mxfp4_are_what_their_bits_say(tmp_path):
    tensors, _ = plain("gpt-oss")
    stored, meant = dict(tensors), dict(tensors)
    for layer in range(3):
        for kind in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{kind}"
            del stored[name]
            blocks, scales, exact = mxfp4(tensors[name].swapaxes(1, 2))
            stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
            meant[name] = np.ascontiguousarray(exact.swapaxes(1, 2)).astype(np.float32)
    model = variant(tmp_path, "gpt-oss", stored, quantization_config={"quant_method": "mxfp4"})
    (tmp_path / "plain").mkdir()
    for got, want in zip(arrays(model), arrays(variant(tmp_path / "plain", "gpt-oss", meant)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_language_model_of_a_checkpoint_with_vision_is_found_under_its_prefix(tmp_path):
    tensors, wanted = plain("gemma3")
    values = json.loads((FIXTURES / "gemma3" / "config.json").read_text())
    for i, prefix in enumerate(("language_model.model.", "model.language_model.")):
        folder = tmp_path / str(i)
        folder.mkdir()
        renamed = {prefix + n.removeprefix("model."): v for n, v in tensors.items()}
        model = variant(folder, "gemma3", renamed, architectures=["Gemma3ForConditionalGeneration"], text_config=values)
        for got, want in zip(arrays(model), arrays(wanted), strict=True):
            np.testing.assert_array_equal(got, want)
        assert dataclasses.replace(model.config, architecture=wanted.config.architecture) == wanted.config
