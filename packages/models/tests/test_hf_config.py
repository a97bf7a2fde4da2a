import json
import math
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
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 2}
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
        ({**MISTRAL, "layer_types": ["full_attention"]}, "layer_types"),
        ({**MISTRAL, "sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_window"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": -1.0}}, "factor"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 8}}, "short_factor"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings",
        ),
        ({"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3, "num_key_value_heads": 2},
            "num_experts_per_tok",
        ),
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
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "GPT2LMHeadModel is not served.*LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2 is not served"),
        ({"architectures": [], "model_type": None}, "none named"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}, "pack-quantized"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}},
            "4 bits",
        ),
        ({"hidden_act": "mish"}, "silu.*got 'mish'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'.*longrope"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor.*0.5.*'linear'",
        ),
        ({**MISTRAL, "layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_served_is_refused_in_one_line(changes, words):
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def of(name, **changes):
    return parse(**{"architectures": [name], "num_key_value_heads": 2, **changes})


def test_a_mistral_that_does_not_mention_its_window_has_the_familys() -> None:
    assert parse(**MISTRAL).windows == (4096, 4096)
    assert parse(**MISTRAL, sliding_window=None).windows == ()
    assert parse(**MISTRAL, sliding_window=8, layer_types=["full_attention", "sliding_attention"]).windows == (None, 8)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwens_upper_layers_slide_only_where_the_file_says_that_windows_are_used(name) -> None:
    assert of(name, sliding_window=8, max_window_layers=1).windows == ()
    assert of(name, sliding_window=8, max_window_layers=1, use_sliding_window=True).windows == (None, 8)
    assert of(name, sliding_window=None, max_window_layers=1, use_sliding_window=True).windows == ()
    assert of(name, max_window_layers=0, use_sliding_window=True).windows == (4096, 4096)
    both = ["sliding_attention", "full_attention"]
    assert of(name, sliding_window=8, use_sliding_window=True, layer_types=both).windows == (8, None)


def test_which_projections_have_biases_is_the_familys_or_the_files() -> None:
    qwen2 = of("Qwen2ForCausalLM")
    assert (qwen2.attention_bias, qwen2.output_bias) == (True, False)
    assert not of("Qwen3ForCausalLM").attention_bias
    assert of("Qwen3ForCausalLM", attention_bias=True).attention_bias
    assert of("GptOssForCausalLM").attention_bias


def test_head_sizes_that_a_file_leaves_out_are_the_familys() -> None:
    assert of("Qwen3ForCausalLM").head_dim == 128
    assert of("Gemma3ForCausalLM").head_dim == 256
    assert of("GptOssForCausalLM").head_dim == 64
    assert of("MixtralForCausalLM").head_dim == 16


def test_which_layers_have_experts() -> None:
    step = of("Qwen3MoeForCausalLM", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert step.moe_layers == (False, True, False, False)
    assert [step.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    dense = of("DeepseekV3ForCausalLM", num_hidden_layers=4, first_k_dense_replace=3, n_routed_experts=8)
    assert dense.moe_layers == (False, False, False, True)
    assert of("MixtralForCausalLM").has_experts(1)


def test_routing_switches_are_read() -> None:
    moe = of("Qwen3MoeForCausalLM", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=True).moe
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.normalise) == (6, 3, 10, True)
    assert not of("Qwen3MoeForCausalLM").moe.normalise
    assert of("Qwen3MoeForCausalLM", num_local_experts=8).moe.num_experts == 8
    grouped = of(
        "DeepseekV3ForCausalLM", n_routed_experts=8, n_group=2, topk_group=1, routed_scaling_factor=0.5, n_shared_experts=2
    )
    assert (grouped.moe.num_groups, grouped.moe.groups_per_token, grouped.moe.scale) == (2, 1, 0.5)
    assert grouped.moe.shared_size == 2 * grouped.moe.intermediate_size
    clamped = of("GptOssForCausalLM", swiglu_limit=5.0, experts_per_token=2).moe
    assert (clamped.swiglu_limit, clamped.swiglu_alpha, clamped.experts_per_token, clamped.bias) == (5.0, 1.702, 2, True)


def test_a_null_query_rank_means_that_the_projection_is_not_factored() -> None:
    assert of("DeepseekV3ForCausalLM", q_lora_rank=None).latent.q_rank is None
    assert of("DeepseekV3ForCausalLM").latent.q_rank == 1536


def test_gemmas_layers_by_pattern_by_list_and_by_default() -> None:
    assert of("Gemma3ForCausalLM", num_hidden_layers=4, sliding_window=8, sliding_window_pattern=2).windows == (8, None, 8, None)
    assert of("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=8).windows == (8, 8, 8, 8, 8, None, 8)
    listed = of(
        "Gemma3ForCausalLM", sliding_window=8, sliding_window_pattern=2, layer_types=["full_attention", "sliding_attention"]
    )
    assert listed.windows == (None, 8)


def test_gemmas_two_rotations_in_old_keys_and_new() -> None:
    old = of("Gemma3ForCausalLM", rope_theta=5e5, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert old.rope == RopeConfig(theta=5e5, kind="linear", factor=8.0)
    assert old.local_rope == RopeConfig(theta=100.0)
    each = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    new = of("Gemma3ForCausalLM", rope_parameters=each)
    assert (new.rope, new.local_rope) == (old.rope, old.local_rope)
    assert of("Gemma3ForCausalLM").rope == RopeConfig(theta=1e6)


def test_gemmas_text_part_of_a_checkpoint_with_vision() -> None:
    inner = {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 16, "attn_logit_softcapping": 50.0}
    config = parse_model_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner, "torch_dtype": "bfloat16"}, source="config.json"
    )
    assert (config.hidden_size, config.vocab_size, config.num_heads, config.dtype) == (32, 262208, 8, "bfloat16")
    assert config.attention_softcap is None  # its scores are not capped, whatever the file says
    assert config.attention_scale == 256.0**-0.5


def test_yarn_sharpens_as_its_fields_say() -> None:
    def rope(**scaling):
        return parse(max_position_embeddings=4096, rope_scaling={"rope_type": "yarn", **scaling}).rope

    assert rope(factor=4.0).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert rope(factor=4.0, attention_factor=1.5).attention_factor == 1.5
    assert rope(factor=4.0, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0
    assert rope(factor=4.0).original_max_position_embeddings == 4096
    assert rope(original_max_position_embeddings=1024).factor == 4.0
    assert not rope(factor=4.0, truncate=False).truncate


def test_deepseeks_scores_are_scaled_by_yarns_sharpening_squared() -> None:
    scaling = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    config = of("DeepseekV3ForCausalLM", rope_scaling=scaling)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert of("DeepseekV3ForCausalLM").attention_scale == pytest.approx(192**-0.5)


def test_a_gpt_oss_that_mentions_no_rotary_scaling_has_the_familys() -> None:
    assert (of("GptOssForCausalLM").rope.kind, of("GptOssForCausalLM").rope.factor) == ("yarn", 32.0)
    assert of("GptOssForCausalLM", rope_scaling=None).rope.kind == "default"
    assert of("GptOssForCausalLM", sliding_window=8).windows == (8, None)


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
