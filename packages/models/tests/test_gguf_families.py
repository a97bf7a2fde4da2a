"""GGUF files of each architecture give the weights and the configuration of the Hugging Face checkpoint they could be made from.

The files are written here as llama.cpp's converter writes them: its names (those of the `gguf` package), experts in one tensor, Gemma's norms
with 1 added, the rows of Q and K in pairs of neighbours in `llama` only.
"""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models import load_model, resolve
from octavo_models._src.gguf_weights import half_split_order, hugging_face_name
from octavo_models._src.load import open_weights
from octavo_models.convert import convert

FIXTURES = Path(__file__).parent / "fixtures"
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3-moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


def their_name(arch, name):
    """llama.cpp's name of a Hugging Face tensor, by the `gguf` package's own table."""
    stem, _, kind = name.rpartition(".")
    found = gguf.get_tensor_name_map(arch, 64).get_name(stem)
    assert found is not None, name
    return f"{found}.{kind}"


def their_tensors(checkpoint, arch):
    """Every tensor of a checkpoint as llama.cpp's converter would write it."""
    config, source = checkpoint.config, open_weights(checkpoint)
    abstract = nnx.eval_shape(lambda: load_abstract(config))
    out, experts = {}, {}
    for _, parts in abstract.weight_parts():
        for name, _ in parts:
            values = np.asarray(source.rows(name, slice(None)), np.float32).reshape(source.shape(name))
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
            if arch == gguf.MODEL_ARCH.LLAMA and heads:
                values = values[np.argsort(half_split_order(len(values), heads))]
            if arch == gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
                values = values + 1
            if ".experts." in name:
                layer, _, part = name.split(".")[2], *name.split(".")[-3:-1]
                experts.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.weight", []).append(values)
            else:
                out[their_name(arch, name)] = values
    return out | {name: np.stack(each) for name, each in experts.items()}


def load_abstract(config):
    from octavo_models import Decoder

    return Decoder(config, dtype="float32")


def write(path, checkpoint, arch, *, change=None, quantisation=None):
    config, tensors = checkpoint.config, their_tensors(checkpoint, arch)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_file_type(0)
    if config.moe is not None:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)
    if arch == gguf.MODEL_ARCH.GEMMA3:
        writer.add_sliding_window(next(w for w in config.windows if w))
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 1 + config.windows.index(None))
    writer.add_token_list(["a", "b", "ab", *(f"t{i}" for i in range(3, config.vocab_size))])
    if change is not None:
        change(writer)
    for name, values in tensors.items():
        if quantisation and values.ndim >= 2 and values.shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return resolve(str(path))


def arrays(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_gguf_file_is_the_checkpoint_it_was_made_from(tmp_path, family):
    own = resolve(str(FIXTURES / family))
    theirs = write(tmp_path / "m.gguf", own, ARCHITECTURES[family])
    same_everywhere = (
        "norm_offset",
        "generation",
        "windows",
        "attention_scale",
        "dtype",
        "output_bias",
        "moe_layers",
        "quantisation",
    )
    for field in dataclasses.fields(own.config):
        if field.name not in same_everywhere:
            assert getattr(theirs.config, field.name) == pytest.approx(getattr(own.config, field.name)), field.name
    assert [theirs.config.window(i) for i in range(own.config.num_layers)] == [
        own.config.window(i) for i in range(own.config.num_layers)
    ]
    offset = own.config.norm_offset
    one, other = (load_model(checkpoint, dtype="float32", progress=False) for checkpoint in (own, theirs))
    for (path, a), (_, b) in zip(*(jax.tree_util.tree_leaves_with_path(nnx.state(model)) for model in (one, other)), strict=True):
        added = offset if "scale" in jax.tree_util.keystr(path) else 0.0
        np.testing.assert_allclose(np.asarray(b), np.asarray(a) + added, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_quantised_experts_are_read_one_by_one(tmp_path, family):
    own = resolve(str(FIXTURES / family))
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = write(tmp_path / "m.gguf", own, ARCHITECTURES[family], quantisation=kind)
    source, plain = open_weights(theirs), open_weights(own)
    for expert in range(own.config.moe.num_experts):
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        wanted = np.asarray(plain.rows(name, slice(None)), np.float32)
        assert source.blocks(name)[0] == ("Q8_0" if wanted.shape[-1] % 32 == 0 else "F32")
        assert source.shape(name) == wanted.shape
        np.testing.assert_allclose(source.rows(name, slice(None)).astype(np.float32), wanted, atol=np.abs(wanted).max() / 100)


def with_a_tokenizer(writer):
    writer.add_tokenizer_model("gpt2")
    writer.add_token_types([1] * 384)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("quantisation", [None, gguf.GGMLQuantizationType.Q8_0], ids=["plain", "Q8_0"])
@pytest.mark.parametrize(
    ("family", "theirs"), [("mixtral", "block_sparse_moe.experts.1.w2"), ("qwen3-moe", "mlp.experts.1.down_proj")]
)
def test_mixtures_of_experts_are_converted_under_their_familys_names(tmp_path, family, theirs, quantisation):
    own = resolve(str(FIXTURES / family))
    file = write(tmp_path / "m.gguf", own, ARCHITECTURES[family], change=with_a_tokenizer, quantisation=quantisation)
    folder = convert(file, tmp_path / "out", progress=False, file_bytes=1 << 18)
    assert folder.config.moe == own.config.moe
    assert folder.config.architecture == own.config.architecture
    assert len(folder.weight_files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert f"model.layers.1.{theirs}.weight" in index
    before, after, plain = open_weights(file), open_weights(folder), open_weights(own)
    assert before.names() == after.names()
    for name in before.names():
        values = np.asarray(after.rows(name, slice(None)), np.float32)
        assert np.array_equal(np.asarray(before.rows(name, slice(None)), np.float32), values), name
        wanted = np.asarray(plain.rows(name, slice(None)), np.float32)
        np.testing.assert_allclose(values, wanted, atol=1e-6 if quantisation is None else np.abs(wanted).max() / 80, err_msg=name)
    assert len(arrays(load_model(folder, dtype="float32", progress=False))) > 10


def test_experts_in_files_of_their_own_are_read_too():
    from octavo_models._src.gguf_meta import GgufTensor
    from octavo_models._src.gguf_weights import _experts

    (found,) = _experts("blk.3.ffn_down.5.weight", GgufTensor("x", (8, 4), 0, 64)).items()
    assert found == ("model.layers.3.mlp.experts.5.down_proj.weight", GgufTensor("x", (8, 4), 0, 64))


def test_names_of_blocks_with_norms_around():
    assert hugging_face_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert hugging_face_name("blk.0.ffn_norm.weight", norms_around=True) == "model.layers.0.pre_feedforward_layernorm.weight"
    assert hugging_face_name("blk.0.attn_q_norm.weight") == "model.layers.0.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda w: w.add_value_length(4), UnsupportedModelError, "value_length"),
        (lambda w: w.add_expert_used_count(99), CheckpointError, "expert_used_count' must be at most"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(tmp_path, change, error, words):
    with pytest.raises(error, match=words):
        write(tmp_path / "m.gguf", resolve(str(FIXTURES / "qwen3-moe")), gguf.MODEL_ARCH.QWEN3MOE, change=change)
