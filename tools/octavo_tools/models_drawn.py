"""Checkpoints whose sizes and whose spelling of config.json are drawn at random, with what transformers makes of that very file.

As `models_random`, which has cases that somebody thought of; here are those that nobody did. The reference is of the model that
transformers builds from the config.json as it is drawn: keys of version 4 or 5, defaults left out, nulls where they are allowed.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

JUNK: Final = {
    "_name_or_path": "somewhere/else",
    "attention_dropout": 0.1,
    "initializer_range": 0.03,
    "output_hidden_states": False,
    "pretraining_tp": 1,
    "transformers_version": "4.44.2",
    "use_cache": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "unheard_of": {"a": [1, None]},
}
"""Keys that say nothing of the model."""

CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "": {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False},
    "mixtral": {"rms_norm_eps": 1e-5, "sliding_window": None, "num_experts_per_tok": 2},
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "final_logit_softcapping": None},
    "gpt_oss": {"rms_norm_eps": 1e-5, "attention_bias": True, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True, "n_shared_experts": 1},
}
"""What a file may leave unsaid where it means just this."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One checkpoint.

    Attributes:
        config: config.json, word for word.
        dtype: Of the stored weights.
        shard: Largest file; None: one file.
        original: Tensors have the names of transformers 4.
    """

    family: str
    config: dict[str, Any]
    dtype: str
    shard: str | None
    original: bool


def draw(family: str, rng: random.Random) -> Drawn:
    """A checkpoint of a family.

    Args:
        family: transformers' `model_type`.
    """
    layers, heads = rng.randint(1, 4), rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14])
    kv_heads = rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
    head_dim, explicit = rng.choice([2 * rng.randint(3, 16), rng.choice([16, 24, 48, 80, 96])]), rng.random() < 0.5
    if family in ("qwen3", "gemma3_text", "gpt_oss"):
        explicit = True
    values: dict[str, Any] = {
        "vocab_size": rng.randint(90, 300),
        "hidden_size": heads * (2 * rng.randint(3, 12) if explicit else head_dim),
        "intermediate_size": rng.randint(20, 130),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.4,
        "max_position_embeddings": rng.choice([128, 512, 4096]),
        "bos_token_id": 1,
        "eos_token_id": rng.choice([2, [2, 5]]),
    }
    if explicit and family != "deepseek_v3":
        values["head_dim"] = head_dim
    act = rng.choice(["silu", "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "swish"])
    values["hidden_activation" if family == "gemma3_text" else "hidden_act"] = act
    values |= _OWN[family](rng, values)
    values |= _rotation(family, rng, values)
    return Drawn(
        family,
        _spelled(family, rng, values),
        rng.choice(["float32", "bfloat16", "float16"]),
        rng.choice([None, "20KB"]),
        rng.random() < 0.8,
    )


def _window(rng: random.Random) -> int:
    return rng.choice([3, 8, 16, 21, 40])


def _kinds(rng: random.Random, layers: int) -> list[str]:
    return [rng.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]


def _llama(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    own = {"attention_bias": rng.random() < 0.3, "mlp_bias": rng.random() < 0.3}
    return {**own, "num_key_value_heads": None} if values["num_key_value_heads"] == values["num_attention_heads"] else own


def _qwen(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    own: dict[str, Any] = {"use_sliding_window": rng.random() < 0.5, "max_window_layers": rng.randint(0, layers + 1)}
    own["sliding_window"] = rng.choice([None, _window(rng), _window(rng)])
    if own["use_sliding_window"] and own["sliding_window"] and rng.random() < 0.4:
        own["layer_types"] = _kinds(rng, layers)
    return own


def _qwen3(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen(rng, values), "attention_bias": rng.random() < 0.3}


def _qwen3_moe(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers, experts = values["num_hidden_layers"], rng.randint(2, 9)
    return {
        rng.choice(["num_experts", "num_local_experts"]): experts,
        "num_experts_per_tok": rng.randint(1, min(4, experts)),
        "moe_intermediate_size": rng.randint(10, 60),
        "norm_topk_prob": rng.random() < 0.5,
        "decoder_sparse_step": rng.choice([1, 1, 2, 3]),
        "mlp_only_layers": sorted(rng.sample(range(layers), rng.randint(0, layers - 1))),
        "attention_bias": rng.random() < 0.3,
        "use_sliding_window": rng.random() < 0.3,
        "sliding_window": rng.choice([None, _window(rng)]),
        "max_window_layers": layers,
    }


def _mistral(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": rng.choice([None, _window(rng), _window(rng)])}


def _mixtral(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    experts = rng.randint(2, 8)
    own = {"num_local_experts": experts, "num_experts_per_tok": rng.randint(1, min(4, experts))}
    return {**own, "sliding_window": rng.choice([None, _window(rng)])}


def _gemma3(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers = values["num_hidden_layers"]
    own: dict[str, Any] = {
        "sliding_window": _window(rng),
        "query_pre_attn_scalar": rng.choice([256, 64, 11]),
        "attention_bias": rng.random() < 0.3,
        "final_logit_softcapping": rng.choice([None, 5.0]),
        "attn_logit_softcapping": rng.choice([None, 3.0]),
        "tie_word_embeddings": rng.random() < 0.7,
        "cache_implementation": "hybrid",
    }
    return own | rng.choice([{}, {"sliding_window_pattern": rng.randint(1, 4)}, {"layer_types": _kinds(rng, layers)}])


def _deepseek(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    groups, each = rng.choice([1, 2, 3]), rng.randint(2, 4)
    best = rng.randint(1, groups)
    return {
        "num_key_value_heads": values["num_attention_heads"],
        "kv_lora_rank": rng.randint(5, 30),
        "q_lora_rank": rng.choice([None, rng.randint(5, 30)]),
        "qk_nope_head_dim": rng.randint(4, 20),
        "qk_rope_head_dim": 2 * rng.randint(2, 8),
        "v_head_dim": rng.randint(4, 20),
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": best,
        "num_experts_per_tok": rng.randint(1, best * each),
        "n_shared_experts": rng.randint(1, 2),
        "moe_intermediate_size": rng.randint(10, 50),
        "first_k_dense_replace": rng.randint(0, values["num_hidden_layers"]),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice([1.0, 2.5, 0.5]),
        "rope_interleave": rng.random() < 0.7,
        "attention_bias": rng.random() < 0.3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
    }


def _gpt_oss(rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    experts = rng.randint(4, 8)
    own: dict[str, Any] = {
        "num_local_experts": experts,
        "num_experts_per_tok": rng.randint(1, 4),
        "sliding_window": _window(rng),
        "attention_bias": rng.random() < 0.8,
        "swiglu_limit": rng.choice([7.0, 1.0]),
        "initial_context_length": 4096,
        "experts_per_token": 4,
    }
    own["experts_per_token"] = own["num_experts_per_tok"]
    return own | rng.choice([{}, {"layer_types": _kinds(rng, values["num_hidden_layers"])}])


_OWN: Final = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gemma3_text": _gemma3,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


def _scaling(family: str, rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """What is said of rotation besides its base."""
    kind = rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn", "yarn", "longrope", "proportional"])
    if kind in ("linear", "dynamic"):
        return {"rope_type": kind, "factor": rng.choice([2.0, 8.0, 3])}
    if kind == "proportional":
        return {"rope_type": kind, "partial_rotary_factor": rng.choice([0.25, 0.5, 0.8, 1.0])} | rng.choice([{}, {"factor": 4.0}])
    if kind == "longrope":
        return _longrope(family, rng, values)
    own_len = {"original_max_position_embeddings": rng.choice([32, 64])}
    if kind == "llama3":
        said = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 2])}
        return said | rng.choice([own_len, own_len, {}])
    if kind == "yarn":
        said = {"rope_type": kind, "factor": rng.choice([4.0, 40, 32.0])} | rng.choice([own_len, own_len, {}])
        said |= rng.choice([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.25}, {"truncate": False}])
        return said | rng.choice(
            [{}, {"mscale": 1.0, "mscale_all_dim": 0.7}, {"mscale": 0.7}, {"mscale": 1.0, "mscale_all_dim": 0}]
        )
    return {}


def _longrope(family: str, rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """As long before stretching as the prompts: what is longer has other factors in every position."""
    size = values["qk_rope_head_dim"] if family == "deepseek_v3" else values.get("head_dim")
    pairs = (size or values["hidden_size"] // values["num_attention_heads"]) // 2
    factors = {key: [round(rng.uniform(1.0, 6.0), 3) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
    said = {"rope_type": "longrope", "original_max_position_embeddings": 96, **factors}
    return said | rng.choice([{}, {"factor": 8.0}, {"attention_factor": 1.25}])


def _rotation(family: str, rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Rotation in old keys or new ones, or not said."""
    theta, scaling = rng.choice([1e4, 5e5, 1000000, 123.0]), _scaling(family, rng, values)
    style = rng.choice(["old", "old", "new", "new", "base", "silent"])
    if style == "silent":
        return {}
    if style == "base":
        return {"rope_theta": theta}
    local = rng.choice([1e4, 333.0])
    if style == "new":
        new = {"rope_type": "default", "rope_theta": theta, **scaling}
        if family == "gemma3_text":
            return {"rope_parameters": {"full_attention": new, "sliding_attention": {"rope_type": "default", "rope_theta": local}}}
        return {"rope_parameters": new}
    if "rope_type" in scaling and family != "gemma3_text" and rng.random() < 0.5:  # transformers 5 reads Gemma only so
        scaling["type"] = scaling.pop("rope_type")
    said: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling or None}
    if family == "gpt_oss" and not scaling:
        said = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return said | ({"rope_local_base_freq": local} if family == "gemma3_text" else {})


def _spelled(family: str, rng: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """The file: some of what it need not say is left out, some of what says nothing is in it."""
    usual = {**DEFAULTS[""], **DEFAULTS.get(family, {})}
    said = {k: v for k, v in values.items() if k not in usual or v != usual[k] or rng.random() < 0.5}
    said |= {key: value for key, value in JUNK.items() if rng.random() < 0.3}
    said |= rng.choice([{"torch_dtype": "float32"}, {"dtype": "float32"}, {"dtype": "float32", "torch_dtype": "bfloat16"}, {}])
    said |= {"model_type": family} | rng.choice([{"architectures": [CLASSES[family]]}] * 3 + [{}])
    keys = list(said)
    rng.shuffle(keys)
    return {key: said[key] for key in keys}


def write_many(out: Path, number: int, families: Sequence[str], *, first: int) -> int:
    """So many of each family, from a seed on; the exit status. What transformers does not take is told, and there is no folder of it."""
    families = families or list(CLASSES)
    for family in families:
        if family not in CLASSES:
            print(f"no family {family}; there are {', '.join(CLASSES)}")
            return 1
    for seed in range(first, first + number):
        for family in families:
            folder = out / f"{family}-{seed}"
            try:
                write(draw(family, random.Random(f"{family}{seed}")), folder, seed=seed)
            except Exception as error:  # whatever transformers and torch raise for a configuration of theirs
                shutil.rmtree(folder, ignore_errors=True)
                print(
                    f"{folder.name}: not taken by transformers: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
                    flush=True,
                )
            else:
                print(folder.name, flush=True)
    return 0


def write(drawn: Drawn, folder: Path, *, seed: int) -> None:
    """Make the checkpoint and what transformers says of it.

    Raises:
        ValueError: transformers does not take the configuration, or what it reads back differs.
    """
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from octavo_tools.models_random import fill_in, reference

    eager = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(drawn.config, indent=1))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), **eager).eval()
    fill_in(model, seed)
    wanted = reference(model, seed)
    np.savez_compressed(folder / "reference.npz", **wanted)  # type: ignore[arg-type]
    stored = model if drawn.dtype == "float32" else model.to(getattr(torch, drawn.dtype))
    shards = {} if drawn.shard is None else {"max_shard_size": drawn.shard}
    stored.save_pretrained(folder, save_original_format=drawn.original, **shards)
    (folder / "config.json").write_text(json.dumps(drawn.config, indent=1))
    again = AutoModelForCausalLM.from_pretrained(folder, **eager).eval()
    with torch.no_grad():
        ids = wanted["input_ids"][-1:, : wanted["lengths"][-1]]
        read = again(torch.tensor(ids), use_cache=False).logits[0].numpy()
    if not np.allclose(read, wanted["logits"][-1], atol=1e-4):
        raise ValueError(f"{folder}: transformers reads another model back than it wrote")
