"""What each family accepts of a config.json and what it takes it for, as transformers 5 does: old keys and new, absent keys, nulls.

Every row says what differs from a small file of the family, and what of the model follows. `tools/models-random --drawn` compares as many
files more as one likes, logits included, where transformers is installed.
"""

import pytest

from octavo_core.errors import CheckpointError
from octavo_models.checkpoints import parse_model_config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "mistral": ("MistralForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 6}),
    "gemma3_text": ("Gemma3ForCausalLM", {"sliding_window": 8}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_key_value_heads": 8}),
    "gpt_oss": ("GptOssForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}
DROP = object()
"""The key is not in the file."""


def file_of(family, changes):
    name, own = FAMILIES[family]
    values = {"architectures": [name], "model_type": family, **SIZES, **own, **changes}
    return {key: value for key, value in values.items() if value is not DROP}


YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1, 2.5], "long_factor": [3.0, 4.0]}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
BOTH = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}

ROWS = [
    # What a file may leave out.
    ("llama", {"num_key_value_heads": DROP}, {"num_kv_heads": 8, "head_dim": 8, "rms_norm_eps": 1e-6, "rope.theta": 1e4}),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}, {"num_kv_heads": 8, "head_dim": 8}),
    ("llama", {}, {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048}),
    ("qwen2", {}, {"attention_bias": True, "output_bias": False, "windows": (), "max_position_embeddings": 32768}),
    ("qwen3", {}, {"head_dim": 128, "attention_bias": False, "qk_norm": True, "windows": ()}),
    (
        "qwen3_moe",
        {"num_key_value_heads": DROP, "intermediate_size": DROP},
        {"num_kv_heads": 4, "intermediate_size": 6144, "head_dim": 8},
    ),
    ("mistral", {"num_key_value_heads": DROP}, {"num_kv_heads": 8, "windows": (4096,) * 4, "max_position_embeddings": 131072}),
    ("mixtral", {}, {"moe.experts_per_token": 2, "moe.normalise": True, "rms_norm_eps": 1e-5, "rope.theta": 1e6, "windows": ()}),
    (
        "gemma3_text",
        {},
        {"head_dim": 256, "tie_word_embeddings": True, "rope.theta": 1e6, "local_rope.theta": 1e4, "hidden_act": "gelu_tanh"},
    ),
    ("gemma3_text", {}, {"windows": (8, 8, 8, 8), "attention_scale": 1 / 16, "logit_softcap": None, "norm_offset": 1.0}),
    (
        "deepseek_v3",
        {"intermediate_size": DROP},
        {"intermediate_size": 18432, "latent.q_rank": 1536, "moe_layers": (False,) * 3 + (True,)},
    ),
    ("deepseek_v3", {}, {"moe.scale": 2.5, "moe.normalise": True, "latent.interleaved": True, "moe.shared_size": 2048}),
    (
        "gpt_oss",
        {},
        {"head_dim": 64, "windows": (128, None, 128, None), "rope.kind": "yarn", "rope.factor": 32.0, "rope.truncate": False},
    ),
    ("gpt_oss", {}, {"rope.theta": 150000.0, "moe.swiglu_limit": 7.0, "attention_bias": True, "sinks": True}),
    # Null is not absence.
    ("mistral", {"num_key_value_heads": None}, {"num_kv_heads": 8}),
    ("mixtral", {"num_key_value_heads": None}, {"num_kv_heads": 8}),
    ("mistral", {"num_attention_heads": 16, "num_key_value_heads": None}, {"num_kv_heads": 16}),
    ("mistral", {"num_attention_heads": 16, "num_key_value_heads": DROP}, {"num_kv_heads": 8}),
    ("mistral", {"sliding_window": None}, {"windows": ()}),
    ("deepseek_v3", {"q_lora_rank": None}, {"latent.q_rank": None}),
    ("gpt_oss", {"rope_parameters": None}, {"rope.kind": "yarn", "rope.theta": 150000.0}),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, {"rope.kind": "default", "rope.theta": 150000.0}),
    ("qwen3_moe", {"mlp_only_layers": None}, {"moe_layers": (True,) * 4}),
    # Numbers of experts by either name.
    ("qwen3_moe", {"num_experts": DROP, "num_local_experts": 5}, {"moe.num_experts": 5}),
    ("mixtral", {"num_local_experts": DROP, "num_experts": 5}, {"moe.num_experts": 5}),
    ("gpt_oss", {"num_local_experts": DROP, "num_experts": 5}, {"moe.num_experts": 5}),
    # Rotation: where its base, its scaling and the length before stretching are said.
    ("llama", {"rope_theta": 5e5}, {"rope.theta": 5e5}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, {"rope.theta": 5e5, "rope.kind": "linear"}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rope.theta": 5e5, "rope.kind": "default"}),
    (
        "llama",
        {"rope_parameters": {"factor": 2.0, "rope_type": "linear"}, "rope_theta": 5e5},
        {"rope.theta": 5e5, "rope.factor": 2.0},
    ),
    ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope.original_max_position_embeddings": 2048}),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "max_position_embeddings": 512},
        {"rope.original_max_position_embeddings": 512},
    ),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "original_max_position_embeddings": 64},
        {"rope.original_max_position_embeddings": 64},
    ),
    ("qwen3", {"rope_scaling": {"type": "yarn", **YARN}}, {"rope.kind": "yarn", "rope.original_max_position_embeddings": 32}),
    (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
        {"rope.original_max_position_embeddings": 64},
    ),
    (
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"rope.attention_factor": 1.0},
    ),
    (
        "qwen3",
        {
            "head_dim": 4,
            "rope_scaling": {"type": "longrope", **LONG, "original_max_position_embeddings": 64},
            "max_position_embeddings": 512,
        },
        {"rope.divisors": (1.0, 2.5), "rope.attention_factor": (1 + 3 / 6) ** 0.5, "max_position_embeddings": 64},
    ),
    (
        "mistral",
        {
            "head_dim": 4,
            "rope_parameters": {"rope_type": "longrope", **LONG, "attention_factor": 1.25},
            "max_position_embeddings": 64,
        },
        {"rope.kind": "longrope", "rope.attention_factor": 1.25, "max_position_embeddings": 64},
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
        {"rope.kind": "proportional", "rope.share": 0.5, "rope.factor": 2.0},
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "proportional"}, "partial_rotary_factor": 0.25},
        {"rope.share": 0.25, "rope.factor": 1.0},
    ),
    # Windows.
    ("mistral", {"sliding_window": 8}, {"windows": (8,) * 4}),
    ("mistral", {"sliding_window": 8, "layer_types": KINDS}, {"windows": (None, 8, 8, None)}),
    ("mixtral", {"sliding_window": 8}, {"windows": (8,) * 4}),
    ("mixtral", {"sliding_window": 8, "layer_types": KINDS}, {"windows": (8,) * 4}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 2}, {"windows": ()}),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 2, "use_sliding_window": True}, {"windows": (None, None, 8, 8)}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, {"windows": ()}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": KINDS}, {"windows": (None, 8, 8, None)}),
    ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": True}, {"windows": (8,) * 4}),
    ("qwen3_moe", {"sliding_window": 8, "use_sliding_window": False, "layer_types": KINDS}, {"windows": ()}),
    ("gemma3_text", {"sliding_window_pattern": 2}, {"windows": (8, None, 8, None)}),
    ("gemma3_text", {"layer_types": KINDS}, {"windows": (None, 8, 8, None)}),
    ("gpt_oss", {"sliding_window": 8, "layer_types": KINDS}, {"windows": (None, 8, 8, None)}),
    (
        "gemma3_text",
        {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        {"attention_softcap": None, "logit_softcap": 5.0},
    ),
    # Gemma's two rotations.
    ("gemma3_text", {"rope_theta": 5e5, "rope_local_base_freq": 77.0}, {"rope.theta": 5e5, "local_rope.theta": 77.0}),
    ("gemma3_text", {"rope_parameters": BOTH, "rope_theta": 3e5}, {"rope.theta": 5e5, "rope.factor": 8.0, "local_rope.theta": 1e4}),
    ("gemma3_text", {"rope_parameters": BOTH, "rope_local_base_freq": 77.0}, {"local_rope.theta": 77.0}),
    (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope.kind": "linear", "local_rope.kind": "default"},
    ),
    # Nothing is read of one object for both but `truncate`, and that only there.
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7.0}, "rope_theta": 5e5},
        {"rope.kind": "default", "rope.theta": 5e5, "local_rope.theta": 1e4},
    ),
    (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": False}},
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 32,
        },
        {"rope.truncate": True, "rope.original_max_position_embeddings": 64},
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", **YARN}, "truncate": False}},
        {"rope.truncate": False, "rope.original_max_position_embeddings": 32},
    ),
    # Experts and flags that are off.
    ("qwen3_moe", {"num_experts": 0}, {"moe": None}),
    ("deepseek_v3", {"norm_topk_prob": None, "rope_interleave": None}, {"moe.normalise": False, "latent.interleaved": False}),
    # Element types.
    ("llama", {"torch_dtype": "float64"}, {"dtype": "float32"}),
    ("llama", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ("llama", {"dtype": "float16", "torch_dtype": "bfloat16"}, {"dtype": "float16"}),
    # A name for the class, or the kind alone.
    ("qwen3_moe", {"architectures": DROP}, {"architecture": "Qwen3MoeForCausalLM"}),
    ("gemma3_text", {"architectures": None}, {"architecture": "Gemma3ForCausalLM"}),
    # Activations by every name of theirs.
    ("llama", {"hidden_act": "gelu_new"}, {"hidden_act": "gelu_tanh"}),
    ("llama", {"hidden_act": "gelu_fast"}, {"hidden_act": "gelu_tanh"}),
    ("llama", {"hidden_act": "swish"}, {"hidden_act": "silu"}),
]


def value_of(config, dotted):
    for name in dotted.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(("family", "changes", "wanted"), ROWS, ids=[f"{row[0]}-{i}" for i, row in enumerate(ROWS)])
def test_a_file_means_what_transformers_takes_it_for(family, changes, wanted):
    config = parse_model_config(file_of(family, changes), source="config.json")
    assert {name: value_of(config, name) for name in wanted} == wanted


def test_the_head_of_a_model_with_vision_is_tied_as_the_whole_file_says():
    inner = {**SIZES, "sliding_window": 8, "tie_word_embeddings": False}
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": inner}
    assert parse_model_config(whole, source="config.json").tie_word_embeddings
    untied = parse_model_config({**whole, "tie_word_embeddings": False, "text_config": SIZES}, source="config.json")
    assert not untied.tie_word_embeddings


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "mixtral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "vocab_size"])
def test_sizes_are_never_guessed(family, key):
    with pytest.raises(CheckpointError, match=f"'{key}' must be"):
        parse_model_config(file_of(family, {key: DROP}), source="config.json")
