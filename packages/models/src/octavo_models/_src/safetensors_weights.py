"""Weights from safetensors files, single or sharded, memory-mapped.

Knows the file format: the `safetensors` package checks a file, its header says where each tensor lies. Knows no model family: names and
element types are passed through as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from octavo_core.errors import CheckpointError, UnsupportedModelError

_DTYPES: Final = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class _Tensor(NamedTuple):
    """Where a tensor lies: bytes of a mapped file."""

    raw: np.ndarray
    kind: str
    shape: tuple[int, ...]


class SafetensorsWeights:
    """A `WeightSource` over safetensors files.

    Args:
        files: In any order; no two hold the same name.

    Raises:
        CheckpointError: When a file is missing, truncated or not safetensors.
    """

    rope_divisors: tuple[float, ...] | None = None

    def __init__(self, files: Sequence[str | Path]) -> None:
        self._tensors: dict[str, _Tensor] = {}
        for path in files:
            self._tensors.update(_open(path))

    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that `names` lists."""
        return self._tensors[name].shape

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor as they are stored.

        Raises:
            UnsupportedModelError: For an element type not known here.
        """
        tensor = self._tensors[name]
        if tensor.kind not in _DTYPES:
            raise UnsupportedModelError(f"tensor '{name}' has element type {tensor.kind}; read are {', '.join(_DTYPES)}")
        values = tensor.raw.view(_DTYPES[tensor.kind])
        return values[index] if len(tensor.shape) < 2 else values.reshape(math.prod(tensor.shape[:-1]), -1)[index]


def _open(path: str | Path) -> dict[str, _Tensor]:
    try:
        safe_open(path, framework="numpy")
        # As a plain array: slices of `np.memmap` carry bookkeeping that costs loading time.
        raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file ({error}); download it again") from None
    start = 8 + int(raw[:8].view("<u8")[0])
    header = msgspec.json.decode(raw[8:start].tobytes())
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            found[name] = _Tensor(raw[start + first : start + last], entry["dtype"], tuple(entry["shape"]))
    return found
