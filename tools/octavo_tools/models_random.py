"""Random checkpoints of every family with reference results of transformers, in sizes and spellings that nobody would choose.

Runs where torch and transformers are, and needs nothing of the workspace: `uv run --no-project --with torch --with transformers
--with safetensors python tools/models-random OUT`. `tools/models-parity OUT/*` compares. Weights are bfloat16 values, whatever they are stored as.
`--drawn 5` makes five of each family whose sizes and spelling of config.json are drawn by `--seed`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from octavo_tools import models_drawn

PROMPT_LENS: Final = (1, 5, 16, 33, 70)
NEW_TOKENS: Final = 12
_SIZES: Final = {
    "vocab_size": 131,
    "hidden_size": 60,
    "intermediate_size": 92,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN: Final = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3: Final = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint.

    Attributes:
        family: transformers' `model_type`.
        config: What differs from `_SIZES`.
        drop: Keys that config.json leaves out.
        old: config.json is written in the keys of transformers 4.
        dtype: What the file stores.
        shard: Largest file; None: one file.
        generation: There is a generation_config.json.
    """

    name: str
    family: str
    config: dict[str, Any]
    drop: tuple[str, ...] = ()
    old: bool = False
    dtype: str = "float32"
    shard: str | None = None
    generation: bool = True


def _rope(kind: str = "default", theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, **more}


_MOE: Final = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
_DEEP: Final = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 6,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
_GEMMA: Final = {"head_dim": 14, "query_pre_attn_scalar": 11, "sliding_window": 7, "num_hidden_layers": 4}
_GPT: Final = {"head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9, "rope_parameters": _YARN}

CASES: Final = (
    Case("llama-tied-old", "llama", {"tie_word_embeddings": True}, old=True, generation=False),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}, dtype="bfloat16"),
    Case("llama-head-dim", "llama", {"head_dim": 24, "num_attention_heads": 5, "num_key_value_heads": 1}, shard="30KB"),
    Case("llama-linear", "llama", {"rope_parameters": _rope("linear", factor=2.5)}, old=True),
    Case("llama-ramp", "llama", {"rope_parameters": _LLAMA3, "head_dim": 16}, old=True, shard="40KB"),
    Case("llama-yarn", "llama", {"rope_parameters": _YARN}),
    Case("llama-dynamic", "llama", {"rope_parameters": _rope("dynamic", factor=2.0)}, old=True),
    Case("qwen2-tied", "qwen2", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}, old=True),
    Case(
        "qwen2-windows",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        drop=("layer_types",),
        generation=False,
    ),
    Case("qwen3-bias", "qwen3", {"head_dim": 22, "attention_bias": True, "rope_parameters": _rope(theta=1e6)}, old=True),
    Case("qwen3-yarn", "qwen3", {"head_dim": 20, "tie_word_embeddings": True, "rope_parameters": _YARN}, shard="30KB"),
    Case("qwen3-moe-sparse", "qwen3_moe", {**_MOE, "head_dim": 12, "decoder_sparse_step": 2, "norm_topk_prob": True}, old=True),
    Case("qwen3-moe-plain", "qwen3_moe", {**_MOE, "head_dim": 14, "mlp_only_layers": [1], "num_experts_per_tok": 1}),
    Case("qwen3-moe-unnormed", "qwen3_moe", {**_MOE, "head_dim": 10, "norm_topk_prob": False}, shard="50KB", dtype="bfloat16"),
    Case("mistral-window", "mistral", {"sliding_window": 9}, old=True),
    Case("mistral-none", "mistral", {"sliding_window": None, "head_dim": 18}, dtype="bfloat16"),
    Case("mixtral-one", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}, old=True),
    Case("mixtral-three", "mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 11}, shard="60KB"),
    Case(
        "gemma3-pattern",
        "gemma3_text",
        {**_GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
        old=True,
    ),
    Case(
        "gemma3-scaled",
        "gemma3_text",
        {
            **_GEMMA,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": _rope("linear", 1e6, factor=8.0),
                "sliding_attention": _rope(theta=5e3),
            },
            "final_logit_softcapping": 20.0,
        },
        generation=False,
    ),
    Case("deepseek-grouped", "deepseek_v3", {**_DEEP, "scoring_func": "sigmoid"}, old=True),
    Case("deepseek-unfactored", "deepseek_v3", {**_DEEP, "q_lora_rank": None, "n_group": 1, "topk_group": 1}, shard="50KB"),
    Case(
        "deepseek-yarn",
        "deepseek_v3",
        {
            **_DEEP,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    Case("gpt-oss-odd", "gpt_oss", {**_GPT}, old=True),
    Case(
        "gpt-oss-few",
        "gpt_oss",
        {
            **_GPT,
            "num_experts_per_tok": 1,
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
        shard="60KB",
        dtype="bfloat16",
    ),
)


def write(case: Case, folder: Path, *, seed: int) -> None:
    """Make the checkpoint and what transformers says of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(case.family, **{**_SIZES, **case.config})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    fill_in(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / "reference.npz", **reference(model, seed))  # type: ignore[arg-type]
    stored = model if case.dtype == "float32" else model.to(getattr(torch, case.dtype))
    stored.save_pretrained(folder, **({} if case.shard is None else {"max_shard_size": case.shard}))
    _rewrite(case, folder)


def fill_in(model: Any, seed: int) -> None:
    """Random weights, bfloat16 values all."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "inv_freq" not in name and "embed_scale" not in name:
                tensor.copy_(_values(name, tensor, generator).to(torch.bfloat16).float())


def _values(name: str, tensor: Any, generator: Any) -> Any:
    import torch

    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name and tensor.ndim == 1:
        return tensor + 0.2 * noise
    if tensor.ndim == 1 or name.endswith("bias"):
        return 0.3 * noise
    if "embed" in name:
        return noise
    fan_in = tensor.shape[-2] if tensor.ndim == 3 and "gpt" in name else tensor.shape[-1]
    return 1.5 * noise * fan_in**-0.5


def reference(model: Any, seed: int) -> dict[str, np.ndarray]:
    """What the model says of random prompts: every logit, and greedy continuations."""
    import torch

    rng = np.random.default_rng(seed)
    vocab = model.config.get_text_config().vocab_size
    ids = np.zeros((len(PROMPT_LENS), max(PROMPT_LENS)), np.int64)
    logits = np.zeros((*ids.shape, vocab), np.float32)
    greedy, margins = (np.zeros((len(PROMPT_LENS), NEW_TOKENS), kind) for kind in (np.int64, np.float32))
    for row, length in enumerate(PROMPT_LENS):
        ids[row, :length] = rng.integers(3, vocab, length)
        known = ids[row, :length].tolist()
        for step in range(NEW_TOKENS):
            with torch.no_grad():
                scores = model(torch.tensor([known]), use_cache=False).logits[0].numpy()
            if not step:
                logits[row, :length] = scores
            second, first = np.sort(scores[-1])[-2:]
            greedy[row, step], margins[row, step] = int(scores[-1].argmax()), first - second
            known.append(int(greedy[row, step]))
    return {"input_ids": ids, "lengths": np.array(PROMPT_LENS), "logits": logits, "greedy": greedy, "greedy_margin": margins}


def _rewrite(case: Case, folder: Path) -> None:
    """config.json in the spelling the case asks for."""
    path = folder / "config.json"
    values = {key: value for key, value in json.loads(path.read_text()).items() if key not in case.drop}
    if case.old:
        values = _old_keys(values)
    path.write_text(json.dumps(values, indent=1))
    if not case.generation:
        (folder / "generation_config.json").unlink(missing_ok=True)


def _old_keys(values: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4 wrote it: rotation in three keys, `torch_dtype`, nothing that follows from the rest."""
    values = dict(values)
    values["torch_dtype"] = values.pop("dtype", "float32")
    rope = values.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.get("rope_theta", 10000.0)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    if values["rope_scaling"] and values["rope_scaling"]["rope_type"] in ("linear", "dynamic"):
        values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
    if values.get("model_type") == "gemma3_text":
        values["sliding_window_pattern"] = 1 + values.pop("layer_types").index("full_attention")
    elif values.get("model_type") != "gpt_oss":
        values.pop("layer_types", None)
    derives = values["model_type"] in ("llama", "qwen2", "mistral", "mixtral")
    if derives and values["hidden_size"] // values["num_attention_heads"] == values.get("head_dim"):
        values.pop("head_dim")
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Write every case, or those named."""
    parser = argparse.ArgumentParser("models-random", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", action="append", default=[], help="name of a case; repeatable (default: all)")
    parser.add_argument(
        "--drawn", type=int, default=0, metavar="N", help="instead, N checkpoints of each family in sizes and spellings drawn"
    )
    parser.add_argument(
        "--family", action="append", default=[], help="of --drawn, transformers' model_type; repeatable (default: all)"
    )
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args(argv)
    if args.drawn:
        return models_drawn.write_many(args.out, args.drawn, args.family, first=args.seed)
    unknown = set(args.case) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(case.name for case in CASES)}")
    for case in CASES:
        if not args.case or case.name in args.case:
            write(case, args.out / case.name, seed=args.seed)
            print(case.name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
