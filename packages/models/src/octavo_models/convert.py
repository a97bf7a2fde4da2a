"""A GGUF file as a folder of safetensors, config.json, tokenizer.json and chat template, which loads to equal weights.

Touches the disk; holds one file's tensors in memory at a time. Imports jax, through the loaders.

Quantised weights are written in bfloat16, which is what they are rounded to whenever they are loaded; tensors of a file that is not
quantised keep their own type. What config.json cannot say is refused: the description is read back and compared before anything is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers.processors import TemplateProcessing

from octavo_core.errors import CheckpointError, ConfigError, OctavoError, UnsupportedModelError
from octavo_models._src.checkpoint import Checkpoint, open_checkpoint
from octavo_models._src.families import family_named
from octavo_models._src.gguf_weights import GGUFWeights
from octavo_models._src.hf_config import parse_model_config
from octavo_models._src.load import open_weights
from octavo_models._src.model_config import GenerationConfig, ModelConfig, MoEConfig, RopeConfig
from octavo_models._src.progress import progress as show_progress
from octavo_models._src.rope import inverse_frequencies
from octavo_models._src.tokenizer import Tokenizer
from octavo_models.text import load_text

__all__ = ["FILE_BYTES", "convert"]

FILE_BYTES: Final = 2 << 30
"""Weights are spread over files of about this size."""

_ROPE_DIVISORS: Final = "rope_freqs.weight"
_PLAIN: Final = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LLAMA3_LEN: Final = 8192


def convert(checkpoint: Checkpoint, folder: Path, *, file_bytes: int = FILE_BYTES, progress: bool = True) -> Checkpoint:
    """Write a GGUF checkpoint as a folder, which appears whole or not at all.

    Args:
        checkpoint: What `resolve` answered for a .gguf file.
        folder: Must not be there yet, or be empty.
        file_bytes: Size after which a further file of weights is begun.
        progress: Show a bar on standard error.

    Raises:
        ConfigError: The checkpoint is a folder already, or something stands where the new one should.
        CheckpointError: The file is damaged, or the disk cannot hold the result.
        UnsupportedModelError: It has something that config.json cannot say.
    """
    if checkpoint.kind != "gguf":
        raise ConfigError(f"{checkpoint.path} is a folder of safetensors already; convert takes a .gguf file")
    if not folder.name:
        raise ConfigError(f"'{folder}' cannot be put in place whole; name a folder that is new")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already; name a folder that is new or empty")
    source = open_weights(checkpoint)
    if not isinstance(source, GGUFWeights):
        raise TypeError(f"wanted the weights of a GGUF file, got {type(source).__name__}")
    described = describe(checkpoint.config, checkpoint.generation, source)
    tokenizer, template = load_text(checkpoint.path)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        _write_json(part / "config.json", described)
        _write_json(part / "generation_config.json", _generation(checkpoint.generation))
        _write_tokenizer(part, tokenizer, template.source)
        _write_weights(part, source, _stored_name(checkpoint.config), file_bytes, progress)
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return open_checkpoint(folder)


def describe(config: ModelConfig, generation: GenerationConfig, source: GGUFWeights) -> dict[str, Any]:
    """config.json of a model.

    Raises:
        UnsupportedModelError: Read back, it would be another model.
    """
    family = family_named(config.architecture)
    model_type = family.model_types[0] if family is not None else config.architecture
    dtype = "bfloat16" if source.is_quantised else config.dtype
    rope = config.rope if source.rope_divisors is None else _rope_of(config, source.rope_divisors)
    wanted = dataclasses.replace(config, dtype=dtype, rope=rope, has_rope_freqs=False)
    values = {
        "architectures": [config.architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "rope_theta": rope.theta,
        "rope_scaling": _rope_scaling(rope),
        "torch_dtype": dtype,
        **_experts(config.moe),
        **_generation(generation),
    }
    try:
        read = parse_model_config(values, source="config.json")
    except OctavoError as error:
        raise UnsupportedModelError(
            f"{config.architecture} is not converted: its config.json would be incomplete ({error})"
        ) from None
    if config.moe is not None and all(read.moe_layers):
        read = dataclasses.replace(read, moe_layers=())  # both say: in every layer
    if read != wanted:
        names = [field.name for field in dataclasses.fields(read) if getattr(read, field.name) != getattr(wanted, field.name)]
        raise UnsupportedModelError(f"{config.architecture}: config.json cannot say this model's {', '.join(names)} here")
    return values


def _experts(moe: MoEConfig | None) -> dict[str, Any]:
    """A mixture of experts in the words of every family that a GGUF file may have; each reads its own."""
    if moe is None:
        return {}
    return {
        "num_local_experts": moe.num_experts,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _rope_of(config: ModelConfig, divisors: tuple[float, ...]) -> RopeConfig:
    """The published scaling that a file's own divisors come from: Llama 3's, whose largest divisor is its factor."""
    rope = RopeConfig(config.rope.theta, "llama3", max(divisors), 1.0, 4.0, _LLAMA3_LEN)
    theirs = inverse_frequencies(config.rope, config.head_dim, divisors)
    if not np.allclose(inverse_frequencies(rope, config.head_dim), theirs, rtol=1e-5, atol=0.0):
        raise UnsupportedModelError(
            "the file's own rotary divisors ('rope_freqs.weight') are not Llama 3's, and config.json has no others"
        )
    return rope


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return scaling


def _generation(generation: GenerationConfig) -> dict[str, Any]:
    eos = list(generation.eos_token_ids)
    ids = {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": generation.pad_token_id,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, template: str | None) -> None:
    """tokenizer.json with what is put around a text also as its post-processor, which is where other readers look."""
    special, backend = tokenizer.special, type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    before = [special.strings["bos_token"]] if special.add_bos and "bos_token" in special.strings else []
    after = [special.strings["eos_token"]] if special.add_eos and "eos_token" in special.strings else []
    if before or after:
        ids = [(token, backend.token_to_id(token)) for token in dict.fromkeys([*before, *after])]
        backend.post_processor = TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    flags = {"add_bos_token": special.add_bos, "add_eos_token": special.add_eos}
    settings |= {name: value for name, value in flags.items() if value is not None}
    _write_json(folder / "tokenizer_config.json", settings | dict(special.strings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _stored_name(config: ModelConfig) -> Callable[[str], str]:
    """From Octavo's name of a tensor to the family's."""
    family = family_named(config.architecture)
    return str if family is None else family.stored_name


def _write_weights(folder: Path, source: GGUFWeights, stored_name: Callable[[str], str], file_bytes: int, progress: bool) -> None:
    names = sorted(source.names() - {_ROPE_DIVISORS})
    shards = list(_shards(names, source, file_bytes))
    home: dict[str, str] = {}
    total = 0
    bar = show_progress("writing weights", len(names), unit="tensors") if progress else contextlib.nullcontext(lambda amount: None)
    with bar as advance:
        for number, shard in enumerate(shards, 1):
            file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = {stored_name(name): _values(source, name) for name in shard}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / file)  # it is made for its owner only
            home |= dict.fromkeys(tensors, file)
            total += sum(values.nbytes for values in tensors.values())
            advance(len(shard))
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": home})


def _shards(names: list[str], source: GGUFWeights, file_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many as fit one file."""
    shard: list[str] = []
    size = 0
    for name in names:
        num_bytes = int(np.prod(source.shape(name))) * _dtype(source, name).itemsize
        if shard and size + num_bytes > file_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += num_bytes
    if shard:
        yield shard


def _dtype(source: GGUFWeights, name: str) -> np.dtype:
    return _PLAIN["BF16"] if source.is_quantised else _PLAIN[source.kind(name)]


def _values(source: GGUFWeights, name: str) -> np.ndarray:
    return np.ascontiguousarray(source.rows(name, slice(None)).reshape(source.shape(name)).astype(_dtype(source, name), copy=False))
