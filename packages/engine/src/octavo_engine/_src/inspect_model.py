"""What a model is and what serving it takes, without loading its weights.

Touches disk, the network where a hub id asks for it, and JAX's devices to see which backends can serve. Allocates one KV block.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from flax import nnx

from octavo_core.errors import CheckpointError, ConfigError, OctavoError
from octavo_core.specs import KVGroupSpec
from octavo_engine._src import host
from octavo_kernels import BACKENDS, attention_backend, cpu_layers
from octavo_kvcache import memory
from octavo_models import Decoder
from octavo_models.checkpoints import ModelConfig, StoredType, describe, locate, open_checkpoint, read_model_config, stored_types
from octavo_models.text import load_text

NATIVE: Final = frozenset({"Q4_0", "Q4_1", "Q8_0"})
"""Codings that native layers compute with as they are."""
SERVES: Final = "serves"


@dataclasses.dataclass(frozen=True)
class Group:
    """A KV group, and what it costs.

    Attributes:
        token_bytes: Of all its layers together.
        sequence_bytes: Of one sequence as long as the model was made for; a window keeps only its last blocks.
    """

    kind: str
    layers: int
    kv_heads: int
    head_dim: int
    window: int | None
    token_bytes: int
    sequence_bytes: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """What `octavo models inspect` tells.

    Attributes:
        active: Parameters that one token's forward pass touches.
        attention, layers: Name of each backend, and `serves` or why it does not.
        needed_bytes: Weights as they would be kept here, and KV of one sequence of full length.
    """

    name: str
    path: str
    architecture: str
    config: ModelConfig
    parameters: int
    active: int
    stored: tuple[StoredType, ...]
    text: str
    kv_dtype: str
    groups: tuple[Group, ...]
    attention: dict[str, str]
    layers: dict[str, str]
    weights: str
    weight_bytes: int
    needed_bytes: int
    free_bytes: int


def inspect(
    model: str | None = None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    offline: bool = False,
    block_size: int = 32,
) -> Facts:
    """The facts about a folder, a .gguf file, a hub id or the default checkpoint.

    Raises:
        CheckpointError: It is not there, or damaged.
        UnsupportedModelError: It is of a kind that is not served.
    """
    name, path, config, stored = _found(model, revision, download_dir, offline)
    on_cpu = host.device_platform() == "cpu"
    shape = nnx.eval_shape(lambda: Decoder(config, dtype="float32"))
    layers, is_native = _layer_backends(shape)
    form, weight_bytes, kv_dtype = _kept(config, stored, is_native=is_native and on_cpu, on_cpu=on_cpu)
    specs = shape.kv_groups(block_size=block_size, dtype=kv_dtype)
    parameters = sum(param.size for param, _ in shape.weight_parts())
    groups = tuple(_group(spec, config.max_position_embeddings) for spec in specs)
    weight_bytes = weight_bytes or parameters * memory.element_bytes(form)
    return Facts(
        name=name,
        path=str(path),
        architecture=config.architecture,
        config=config,
        parameters=parameters,
        active=parameters - _idle(config),
        stored=stored,
        text=_text(path),
        kv_dtype=kv_dtype,
        groups=groups,
        attention=_attention_backends(specs),
        layers=layers,
        weights=form,
        weight_bytes=weight_bytes,
        needed_bytes=weight_bytes + sum(group.sequence_bytes for group in groups),
        free_bytes=host.free_bytes(),
    )


def _found(
    model: str | None, revision: str | None, download_dir: str | None, offline: bool
) -> tuple[str, Path, ModelConfig, tuple[StoredType, ...]]:
    """Name, place, configuration and element types; of a hub id what is in the cache whole, or its description."""
    is_local = model is None or Path(model).expanduser().exists() or model.endswith(".gguf")
    try:
        path, name = locate(model, revision=revision, download_dir=download_dir, offline=offline or not is_local)
        checkpoint = open_checkpoint(path, name=name)
        return name, path, checkpoint.config, stored_types(checkpoint.weight_files)
    except CheckpointError:
        if model is None or is_local or offline:
            raise
    folder, stored = describe(model, revision=revision, download_dir=download_dir)
    return model, folder, read_model_config(folder / "config.json"), stored


def _idle(config: ModelConfig) -> int:
    """Parameters of the experts that a token is not sent to."""
    moe = config.moe
    if moe is None:
        return 0
    each = 3 * config.hidden_size * moe.intermediate_size
    each += 2 * moe.intermediate_size + config.hidden_size if moe.bias else 0
    layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    return layers * (moe.num_experts - moe.experts_per_token) * each


def _kept(config: ModelConfig, stored: tuple[StoredType, ...], *, is_native: bool, on_cpu: bool) -> tuple[str, int, str]:
    """How weights would be kept by `--dtype auto --quantization auto`: a name, their bytes where these are the file's, and the KV's type."""
    if is_native and any(kind.name in NATIVE for kind in stored):
        return "as stored", sum(kind.num_bytes for kind in stored), "bfloat16"
    if config.dtype == "float32" or (on_cpu and not host.has_bf16_units()):
        return "float32", 0, "float32"
    return "bfloat16", 0, "bfloat16"


def _group(spec: KVGroupSpec, length: int) -> Group:
    block = memory.block_bytes(spec)
    kept = length if spec.window is None else min(length, spec.window + spec.block_size)
    blocks = 1 if spec.kind == "state" else -(-kept // spec.block_size)
    token = 0 if spec.kind == "state" else block // spec.block_size
    return Group(spec.kind, len(spec.layers), spec.kv_heads, spec.head_dim, spec.window, token, blocks * block)


def _attention_backends(specs: tuple[KVGroupSpec, ...]) -> dict[str, str]:
    found = {}
    for name in BACKENDS:
        try:
            chosen = attention_backend(f"{name},reference", specs)
            found[name] = SERVES if chosen.name == name else chosen.passed_over[0].reason
        except ConfigError as error:
            found[name] = str(error)
    return found


def _layer_backends(shape: Decoder) -> tuple[dict[str, str], bool]:
    try:
        cpu_layers().check(shape)
    except NotImplementedError as reason:
        return {"cpu": str(reason), "xla": SERVES}, False
    return {"cpu": SERVES, "xla": SERVES}, True


def _text(path: Path) -> str:
    try:
        tokenizer, template = load_text(path)
    except OctavoError as error:
        return f"no: {error}"
    return f"{tokenizer.vocab_size} tokens, {'chat template' if template.source else 'no chat template'}"
