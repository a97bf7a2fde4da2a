"""Loading a model whose weights somebody packs: parameters are handed out as the checkpoint stores them, and what is left is filled.

Knows which tensors make up a parameter. Knows nothing of how they are packed. Memory stays near one packed copy: nothing is converted
that the packer does not ask for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from octavo_models._src.checkpoint import Checkpoint
from octavo_models._src.decoder import Decoder
from octavo_models._src.gguf_weights import GGUFWeights
from octavo_models._src.layers import Parts
from octavo_models._src.load import open_weights
from octavo_models._src.progress import progress as show_progress
from octavo_models._src.weights import BFLOAT16, WeightSource, fill, weight_dtype

T = TypeVar("T")


class StoredWeights:
    """The weights of an unfilled model, by its parameters.

    Args:
        source: Where they are.
        parts: Parameters and the tensors that make them up.
    """

    def __init__(self, source: WeightSource, parts: list[tuple[nnx.Param, Parts]]) -> None:
        self._source = source
        self._parts = {id(param): (param, names) for param, names in parts}

    def blocks(self, param: nnx.Param) -> tuple[str, np.ndarray] | None:
        """GGUF's name of the coding and the raw rows of a parameter whose tensors all have that coding; None for any other."""
        _, names = self._parts[id(param)]
        if not isinstance(self._source, GGUFWeights) or any(name not in self._source.names() for name, _ in names):
            return None
        stored = [self._source.blocks(name) for name, _ in names]
        kinds = {kind for kind, _ in stored}
        return (kinds.pop(), np.concatenate([rows for _, rows in stored])) if len(kinds) == 1 else None

    def values(self, param: nnx.Param) -> np.ndarray:
        """A parameter in bfloat16 where that is what its tensors hold, otherwise in float32. Raises as `load_model` does."""
        _, names = self._parts[id(param)]
        held = {self._source.rows(name, slice(0, 1)).dtype for name, _ in names if name in self._source.names()}
        return fill(self._source, names, param.shape, BFLOAT16 if held == {BFLOAT16} else np.dtype(np.float32))


def load_packed(
    checkpoint: Checkpoint, pack: Callable[[Decoder, StoredWeights], T], *, dtype: str, progress: bool = True
) -> tuple[Decoder, T]:
    """Build a model, let `pack` replace parts of it, and fill the parameters that are left.

    Args:
        checkpoint: What `resolve` answered.
        pack: Changes the unfilled model in place; what it answers is handed on. What it raises leaves no trace.
        dtype: As for `load_model`. A token table whose head was packed keeps the checkpoint's own bfloat16.
        progress: Show a bar on standard error.

    Raises:
        CheckpointError, UnsupportedModelError, ConfigError: As `load_model` does.
    """
    numpy_dtype = weight_dtype(dtype)
    source = open_weights(checkpoint)
    model = nnx.eval_shape(lambda: Decoder(checkpoint.config, dtype=numpy_dtype, rope_divisors=source.rope_divisors))
    parts = list(model.weight_parts())
    stored = StoredWeights(source, parts)
    bar = show_progress("packing weights", len(parts), unit="tensors") if progress else contextlib.nullcontext(lambda amount: None)
    with bar as advance:
        had_head = model.head is not None
        answer = pack(model, stored)
        lookup_only = model.embed.weight if model.head is not None and not had_head else None
        left = {id(node) for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Param)}
        for param, names in parts:
            if id(param) in left:
                values = stored.values(param) if param is lookup_only else fill(source, names, param.shape, np.dtype(param.dtype))
                param.set_value(_on_device(values))
            advance(1)
    return model, answer


def _on_device(values: np.ndarray) -> jax.Array:
    array: Any = jnp.asarray(values)
    return array
