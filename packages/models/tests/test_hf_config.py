import json
from pathlib import Path

import pytest

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models.checkpoints import RopeConfig, parse_model_config, read_generation_config, read_model_config

FIXTURES = Path(__file__).parent / "fixtures"
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def parse(**changes):
    return parse_model_config({**BASE, **changes}, source="config.json")


def test_absent_keys_take_the_familys_defaults():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (4, 16, 2048)
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.rope == RopeConfig(theta=10000.0)
    assert config.dtype == "float32"


def test_head_dim_may_differ_from_hidden_size_over_heads():
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=32, hidden_size=66).head_dim == 32


@pytest.mark.parametrize("value", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_unscaled_rope_in_every_spelling(value):
    assert parse(rope_scaling=value, rope_theta=5e5).rope == RopeConfig(theta=5e5)
    assert parse(rope_parameters={**(value or {}), "rope_theta": 5e5}).rope == RopeConfig(theta=5e5)


def test_old_and_new_rope_keys_mean_the_same():
    new = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}).rope
    assert parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}).rope == new
    assert parse(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}).rope == new
    assert (new.kind, new.factor, new.original_max_position_embeddings) == ("llama3", 8.0, 64)
    assert parse(rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(kind="linear", factor=2.0)


def test_dtype_in_old_and_new_spelling():
    assert parse(torch_dtype="bfloat16").dtype == "bfloat16"
    assert parse(dtype="float16", torch_dtype="bfloat16").dtype == "float16"


def test_the_fixtures_are_read():
    config = read_model_config(FIXTURES / "llama3-rope" / "config.json")
    assert config.tie_word_embeddings
    assert config.rope.kind == "llama3"
    assert read_model_config(FIXTURES / "llama" / "config.json").rope.theta == 10000.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "320"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": 10**20}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"hidden_size": 66}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"max_position_embeddings": [1]}, "max_position_embeddings"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"dtype": "int8"}, "dtype"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_a_bad_key_is_refused_by_file_and_key(changes, key):
    with pytest.raises(CheckpointError, match=rf"config\.json.*'{key}' must be") as caught:
        parse(**changes)
    assert not isinstance(caught.value, UnsupportedModelError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "MistralForCausalLM is not served.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2 is not served"),
        ({"architectures": [], "model_type": None}, "none named"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'silu', got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(changes, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def test_architecture_may_be_known_by_model_type_alone():
    assert parse(architectures=None).architecture == "LlamaForCausalLM"


def write(folder, name, value):
    (folder / name).write_text(json.dumps(value))


def test_generation_config_wins_over_config(tmp_path):
    write(tmp_path, "config.json", {"eos_token_id": 7, "bos_token_id": 1})
    assert read_generation_config(tmp_path).eos_token_ids == (7,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 6, 5], "do_sample": False, "pad_token_id": 3})
    found = read_generation_config(tmp_path)
    assert (found.eos_token_ids, found.bos_token_id, found.pad_token_id, found.sampling_defaults) == ((5, 6), 1, 3, {})


def test_sampling_defaults_are_those_the_checkpoint_sets(tmp_path):
    write(tmp_path, "config.json", {})
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.05, "repetition_penalty": 1.1}
    write(tmp_path, "generation_config.json", {**values, "do_sample": True, "max_length": 4096})
    assert read_generation_config(tmp_path).sampling_defaults == values
    write(tmp_path, "generation_config.json", {"temperature": None, "top_k": 0})
    assert read_generation_config(tmp_path).sampling_defaults == {"top_k": 0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("eos_token_id", "x"),
        ("eos_token_id", [-1]),
    ],
)
def test_a_bad_generation_config_is_refused_by_key(tmp_path, key, value):
    write(tmp_path, "config.json", {})
    write(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: '{key}' must be"):
        read_generation_config(tmp_path)
