"""Weights from safetensors files, single or sharded, memory-mapped.

Knows the file format through the `safetensors` package. Knows no model family: names are passed through as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.weights import row_chunks

_DTYPES = ("F32", "F16", "BF16")


class SafetensorsWeights:
    """A `WeightSource` over safetensors files.

    Args:
        files: In any order; no two hold the same name.

    Raises:
        CheckpointError: When a file is missing, truncated or not safetensors.
    """

    rope_divisors: tuple[float, ...] | None = None

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._where: dict[str, Any] = {}
        for path in files:
            handle = _open(path)
            self._where.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that `names` lists."""
        return tuple(self._where[name].get_slice(name).get_shape())

    def read(self, name: str, out: np.ndarray) -> None:
        """Convert a tensor into `out`.

        Raises:
            UnsupportedModelError: For an element type other than float32, float16 and bfloat16.
        """
        tensor = self._where[name].get_slice(name)
        if tensor.get_dtype() not in _DTYPES:
            wanted = ", ".join(_DTYPES)
            raise UnsupportedModelError(f"tensor '{name}' has element type {tensor.get_dtype()}; read are {wanted}")
        for rows in row_chunks(out.shape[0], out[0].size):
            out[rows] = tensor[rows].astype(out.dtype, copy=False)


def _open(path: str | Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file ({error}); download it again") from None
