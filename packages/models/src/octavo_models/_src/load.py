"""Building a model and filling it with a checkpoint's weights.

Touches the disk. Knows the families and the weight formats; the arithmetic is the families' own, parsing is the formats'. Memory
stays near one copy of the weights: the model is built abstractly, then filled one array at a time.
"""

from __future__ import annotations

import contextlib
import logging

import jax.numpy as jnp
from flax import nnx

from octavo_models._src.checkpoint import Checkpoint
from octavo_models._src.gguf_weights import GGUFWeights
from octavo_models._src.llama import Llama
from octavo_models._src.progress import progress as show_progress
from octavo_models._src.safetensors_weights import SafetensorsWeights
from octavo_models._src.weights import WeightSource, fill, weight_dtype

logger = logging.getLogger(__name__)


def load_model(checkpoint: Checkpoint, *, dtype: str, progress: bool = True) -> Llama:
    """Build the model of a checkpoint and read its weights. The weights of a quantised GGUF file are bfloat16 values in every dtype.

    Args:
        checkpoint: What `resolve` answered.
        dtype: Of weights and dot operands: `float32` or `bfloat16`.
        progress: Show a bar on standard error.

    Raises:
        CheckpointError: For a tensor that is missing or of the wrong shape, or a file that is truncated or corrupt.
        UnsupportedModelError: For a quantisation or element type that cannot be read.
        ConfigError: For another dtype.
    """
    numpy_dtype = weight_dtype(dtype)
    source = open_weights(checkpoint)
    model = nnx.eval_shape(lambda: Llama(checkpoint.config, dtype=numpy_dtype, rope_divisors=source.rope_divisors))
    parts = list(model.weight_parts())
    total = sum(param.size for param, _ in parts) * numpy_dtype.itemsize
    bar = show_progress("loading weights", total, unit="B") if progress else contextlib.nullcontext(lambda amount: None)
    with bar as advance:
        for param, names in parts:
            filled = fill(source, names, param.shape, numpy_dtype)
            param.set_value(jnp.asarray(filled))
            advance(filled.nbytes)
    _log_unused(source, {name for _, names in parts for name, _ in names})
    return model


def open_weights(checkpoint: Checkpoint) -> WeightSource:
    """The weight source of a checkpoint's format. Raises as `load_model` does."""
    if checkpoint.kind == "hf":
        return SafetensorsWeights(checkpoint.weight_files)
    config = checkpoint.config
    return GGUFWeights(checkpoint.weight_files[0], num_heads=config.num_heads, num_kv_heads=config.num_kv_heads)


def _log_unused(source: WeightSource, used: set[str]) -> None:
    unused = sorted(source.names() - used)
    if unused:
        logger.debug("tensors of the checkpoint that the model has no use for: %s", ", ".join(unused))
