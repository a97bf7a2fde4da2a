"""Building a model and filling it with a checkpoint's weights.

Touches the disk. Knows which view of which format a checkpoint needs; the arithmetic is the model's, parsing the formats'. Memory
stays near one copy of the weights: the model is built abstractly, then filled one array at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo_models._src.checkpoint import Checkpoint
from octavo_models._src.decoder import Decoder
from octavo_models._src.families import family_named
from octavo_models._src.gguf_weights import GGUFWeights
from octavo_models._src.placement import Placement
from octavo_models._src.progress import progress as show_progress
from octavo_models._src.safetensors_weights import SafetensorsWeights
from octavo_models._src.weight_views import Dequantised, Renamed, StackedExperts
from octavo_models._src.weights import WeightSource, fill, weight_dtype

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: str,
    progress: bool = True,
    placement: Placement | None = None,
    make: Callable[..., Any] | None = None,
) -> Any:
    """Build the model of a checkpoint and read its weights. The weights of a quantised GGUF file are bfloat16 values in every dtype.

    Args:
        checkpoint: What `resolve` answered.
        dtype: Of weights and dot operands: `float32` or `bfloat16`.
        progress: Show a bar on standard error.
        placement: Where the weights go; None: whole, on the default device.
        make: Makes another model than a `Decoder` of the same arguments; its `weight_parts` says what it is filled with.

    Raises:
        CheckpointError: For a tensor that is missing or of the wrong shape, or a file that is truncated or corrupt.
        UnsupportedModelError: For a quantisation or element type that cannot be read.
        ConfigError: For another dtype.
    """
    numpy_dtype = weight_dtype(dtype)
    source = open_weights(checkpoint)
    build = Decoder if make is None else make
    model = nnx.eval_shape(lambda: build(checkpoint.config, dtype=numpy_dtype, rope_divisors=source.rope_divisors))
    parts = list(model.weight_parts())
    place = _whole if placement is None else placement.of(model)
    total = sum(param.size * param.dtype.itemsize for param, _ in parts)
    bar = show_progress("loading weights", total, unit="B") if progress else contextlib.nullcontext(lambda amount: None)
    with bar as advance:
        for param, names in parts:
            filled = fill(source, names, param.shape, np.dtype(param.dtype))
            param.set_value(place(param, filled))
            advance(filled.nbytes)
    _log_unused(source, {name for _, names in parts for name, _ in names})
    return model


def _whole(param: nnx.Param[Any], values: np.ndarray) -> jax.Array:
    return jnp.asarray(values)


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The weights of a checkpoint under Octavo's names. Raises as `load_model` does."""
    config = checkpoint.config
    if checkpoint.kind == "gguf":
        return GGUFWeights(checkpoint.weight_files[0], num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)
    family = family_named(config.architecture)
    source: WeightSource = SafetensorsWeights(checkpoint.weight_files)
    if family is not None and family.renames:
        source = Renamed(source, family.tensor_name)
    if config.quantisation is not None:
        source = Dequantised(source, config.quantisation)
    if config.moe is not None:
        source = StackedExperts(source, interleaved=config.moe.swiglu_alpha is not None)
    return source


def _log_unused(source: WeightSource, used: set[str]) -> None:
    if isinstance(source, StackedExperts):
        used = {base for name in used for base in source.used(name)} | used
    unused = sorted(source.names() - used)
    if unused:
        logger.debug("tensors of the checkpoint that the model has no use for: %s", ", ".join(unused))
