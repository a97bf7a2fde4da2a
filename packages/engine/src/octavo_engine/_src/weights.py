"""Which layers serve and in which form their weights are kept: `--quantization`, decided once, before anything is read.

Touches the disk. Knows what a packer answers; knows no packer by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from octavo_core.errors import ConfigError
from octavo_core.seams import Model
from octavo_engine._src import plug
from octavo_engine._src.device import tree_bytes
from octavo_engine.config import EngineConfig
from octavo_models import Placement, load_model, load_packed
from octavo_models.checkpoints import Checkpoint, ModelConfig

Table = list[tuple[str, str, str]]


class Loaded(NamedTuple):
    """A model with its weights.

    Attributes:
        dtype: Of its arithmetic outside dots.
        kv_dtype: Of stored KV, unless the operator chooses another.
        is_packed: Its layers are calls of native kernels: compiled at once, and pads cost nothing.
    """

    model: Any
    dtype: str
    kv_dtype: str
    is_packed: bool

    def is_native(self, attention: Any) -> bool:
        """Attention comes from the package that packed the layers: then nothing in a layer is left for XLA to compile."""
        layers = self.model.layers()
        return type(attention).__module__.partition(".")[0] == type(layers[0]).__module__.partition(".")[0]


def load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: tuple[str, str],
    packer: Callable[[], Any],
    table: Table,
    placement: Placement | None = None,
) -> Loaded:
    """Read the model and tell what was chosen.

    Args:
        config: The operator's wishes.
        checkpoint: What to read.
        dtype: Of the arithmetic where no kernels pack the layers, and why.
        packer: Makes the packer of native layers, or raises `NotImplementedError` with the reason it cannot serve.
        table: Is told.
        placement: Divides the weights among devices, which native layers do not serve.

    Raises:
        ConfigError: A quantisation was asked for that cannot be had here.
    """
    started_s = time.monotonic()
    make = None if config.model_class is None else _model_class(config.model_class)
    try:
        if placement is not None:
            raise NotImplementedError("weights are divided among devices")
        if make is not None:
            raise NotImplementedError("--model-class")
        loaded = _load_packed(config, checkpoint, dtype, packer, table)
    except NotImplementedError as reason:
        if config.quantization not in ("auto", "none"):
            raise ConfigError(f"--quantization {config.quantization} cannot be had: {reason}; use --quantization none") from None
        loaded = Loaded(load_model(checkpoint, dtype=dtype[0], placement=placement, make=make), dtype[0], dtype[0], False)
        table.append(("dtype", *dtype))
        table.append(("layers", "xla", f"cpu: {reason}"))
    size = tree_bytes(nnx.state(loaded.model)) / 2**20
    table.append(("weights", f"{size:.0f} MiB", f"read in {time.monotonic() - started_s:.1f} s"))
    return loaded


def _model_class(name: str) -> Callable[..., Any]:
    """What makes another model, checked as it is made."""
    found = plug.find("--model-class", name, "a ModelConfig and a dtype")

    def make(config: ModelConfig, *, dtype: Any, rope_divisors: Any) -> Any:
        more = {} if rope_divisors is None else {"rope_divisors": rope_divisors}
        told = f"{config.architecture} in {jnp.dtype(dtype).name}"
        return plug.build("--model-class", name, Model, lambda: found(config, dtype=dtype, **more), told)

    return make


def _load_packed(
    config: EngineConfig, checkpoint: Checkpoint, dtype: tuple[str, str], packer: Callable[[], Any], table: Table
) -> Loaded:
    if config.layer_backend == "xla":
        raise NotImplementedError("--layer-backend")
    made = packer()
    mode, why = "none", "--quantization"

    def pack(model: Any, stored: Any) -> Any:
        nonlocal mode, why
        mode, why = _quantization(config, made.has_native_blocks(model, stored))
        return made.pack(model, stored, mode, is_exact=mode == "none" and dtype[0] == "float32")

    # The stream, norms and attention are float32 whatever the weights are.
    model, packed = load_packed(checkpoint, pack, dtype="float32")
    table.append(
        ("dtype", "float32", "arithmetic of the native layers, whatever their weights" if dtype[0] != "float32" else dtype[1])
    )
    table.append(("layers", "cpu", made.told))
    table.append(("quantization", mode if mode != "stored" else "as stored", f"{why}; matrices: {packed.forms}"))
    return Loaded(model, "float32", "bfloat16" if packed.is_quantised else dtype[0], True)


def _quantization(config: EngineConfig, has_native_blocks: bool) -> tuple[str, str]:
    """The rule of `auto`, and of nothing else."""
    if config.quantization != "auto":
        return config.quantization, "--quantization"
    if config.dtype != "auto":
        return "none", f"auto: --dtype {config.dtype} asks for weights as floats"
    if has_native_blocks:
        return "stored", "auto: the checkpoint's own 4- and 8-bit blocks, activations in int8 by 32"
    return "none", "auto: the checkpoint has no 4- or 8-bit blocks; int8 is yours to choose"
