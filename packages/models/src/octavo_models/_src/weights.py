"""What a loader asks of a weight file, whatever its format, and the buffers it fills.

Knows dtypes and NumPy buffers. Knows no file format and no model family.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from octavo_core.errors import CheckpointError, ConfigError, UnsupportedModelError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ALIGNMENT = 64
_CHUNK_ELEMENTS = 1 << 19


READABLE = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)


@runtime_checkable
class WeightSource(Protocol):
    """Tensors of a checkpoint by name."""

    rope_divisors: tuple[float, ...] | None
    """The checkpoint's own divisors of the rotary frequencies, where it has some."""

    def names(self) -> frozenset[str]:
        """All tensors there are."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that `names` lists."""

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor seen as a matrix, all its axes but the last together; elements of a vector."""


def weight_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype of a name.

    Raises:
        ConfigError: For anything but float32 and bfloat16.
    """
    known = {"float32": np.dtype(np.float32), "bfloat16": BFLOAT16}
    name = jnp.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in known:
        raise ConfigError(f"weights are kept in float32 or bfloat16, got '{name}'")
    return known[name]


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that JAX can take over on CPU without copying: its address is a multiple of 64."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def row_chunks(num_rows: int, row_len: int) -> list[slice]:
    """Slices of rows that fit the processor's cache: converting a tensor whole is twice as slow."""
    step = max(1, _CHUNK_ELEMENTS // max(row_len, 1))
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def fill(source: WeightSource, parts: tuple[tuple[str, int], ...], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Tensors of a checkpoint, one below the other, as one array.

    Args:
        source: Where they are.
        parts: Name of each and its rows in the whole, seen as a matrix (or as a vector, where it has as many elements as rows).
        shape: Of the whole.
        dtype: Of the result.

    Raises:
        CheckpointError: When one is missing or has another shape; the message names it.
        UnsupportedModelError: When its elements are no plain floating-point numbers.
    """
    out = empty_aligned(shape, dtype)
    num_rows = sum(length for _, length in parts)
    flat = out.reshape(-1) if out.size == num_rows else out.reshape(num_rows, -1)
    start = 0
    for name, length in parts:
        _check(source, name, (length, *flat.shape[1:]))
        _read(source, name, flat[start : start + length])
        start += length
    return out


def _check(source: WeightSource, name: str, wanted: tuple[int, ...]) -> None:
    if name not in source.names():
        raise CheckpointError(f"the checkpoint has no tensor '{name}' (wanted shape {wanted}); it is incomplete or of another kind")
    if source.shape(name) != wanted:
        raise CheckpointError(f"tensor '{name}' has shape {source.shape(name)}, but the configuration asks for {wanted}")


def _read(source: WeightSource, name: str, out: np.ndarray) -> None:
    for rows in row_chunks(out.shape[0], out[0].size):
        values = source.rows(name, rows)
        if values.dtype not in READABLE:
            raise UnsupportedModelError(
                f"tensor '{name}' has elements of type {values.dtype}; read are {', '.join(dtype.name for dtype in READABLE)}"
            )
        out[rows] = values
