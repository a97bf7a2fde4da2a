"""GGUF files: metadata, and tensors as memory-mapped raw bytes.

Knows the container format and, through the `gguf` package, block sizes and dequantisation. Knows no model family and no
tokenizer. Reads the header itself: `gguf.GGUFReader` builds an object per vocabulary entry, which takes seconds.

Source of the format: the GGUF specification of ggml (docs/gguf.md), versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from octavo_core.errors import CheckpointError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_PLAIN = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor of a file, not yet read.

    Attributes:
        shape: Slowest axis first, as NumPy has it (the file lists the fastest first).
        type_name: ggml's name of the element type, e.g. `Q4_1`.
        data: `[rows, bytes of a row]`, mapped from the file.
    """

    shape: tuple[int, ...]
    type_name: str
    data: np.ndarray

    @property
    def is_quantised(self) -> bool:
        """Whether elements share scales in blocks."""
        return self.type_name not in _PLAIN

    def rows(self, index: slice | np.ndarray) -> np.ndarray:
        """Rows as float32, dequantised.

        Raises:
            UnsupportedModelError: For a quantisation that the `gguf` package does not know.
        """
        kind = gguf.GGMLQuantizationType[self.type_name]
        try:
            return gguf.quants.dequantize(self.data[index], kind)
        except NotImplementedError:
            message = f"tensors quantised as {self.type_name} cannot be read; use a file in F16, BF16, Q8_0, Q4_1 or a K-quant"
            raise UnsupportedModelError(message) from None


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A mapped file.

    Attributes:
        path: Where it lies.
        metadata: Every key; arrays as lists.
        tensors: By name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is."""
        return any(t.is_quantised for t in self.tensors.values())


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file and map its tensors.

    Raises:
        CheckpointError: When the file is missing, truncated or not GGUF.
        UnsupportedModelError: For a version or element type not known here.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read '{path}': {error}") from None
    try:
        return _parse(path, _Cursor(data))
    except (struct.error, ValueError, OverflowError) as error:
        raise CheckpointError(f"'{path}' is not a whole GGUF file ({error}); download it again") from None


class _Cursor:
    """A reading position in mapped bytes. Raises `struct.error` or `ValueError` beyond the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.at + length
        if end > len(self.data):
            raise ValueError(f"a string of {length} bytes passes the end of the file")
        text = self.data[self.at : end].decode("utf-8", "surrogateescape")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise ValueError(f"unknown metadata type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown array element type {kind}")
        dtype = np.dtype("?" if kind == 7 else "<" + _SCALARS[kind])
        values = np.frombuffer(self.data, dtype, count, self.at) if count else np.empty(0, dtype)
        self.at += values.nbytes
        return values.tolist()


def _parse(path: Path, cursor: _Cursor) -> GGUFFile:
    magic, version = cursor.scalar("4s"), cursor.scalar("I")
    if magic != b"GGUF":
        raise CheckpointError(f"'{path}' is not a GGUF file: it begins with {magic!r}")
    if version not in (2, 3):
        raise UnsupportedModelError(f"'{path}' is GGUF version {version} (or big-endian); versions 2 and 3 little-endian are read")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
    entries = [_tensor_entry(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    return GGUFFile(path, metadata, {name: _tensor(cursor.data, start, name, *rest) for name, *rest in entries})


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset."""
    name, num_dims = cursor.string(), cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"tensor '{name}' has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _tensor(data: mmap.mmap, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    try:
        element = gguf.GGMLQuantizationType(kind)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[element]
    except (ValueError, KeyError):
        raise UnsupportedModelError(f"tensor '{name}' has the unknown ggml element type {kind}") from None
    if shape[-1] % per_block:
        raise ValueError(f"rows of tensor '{name}' are {shape[-1]} long, not a multiple of {per_block}")
    row_bytes = shape[-1] // per_block * block_bytes
    num_rows = math.prod(shape[:-1])
    if start + offset + num_rows * row_bytes > len(data):
        raise ValueError(f"tensor '{name}' passes the end of the file")
    raw = np.frombuffer(data, np.uint8, num_rows * row_bytes, start + offset)
    return GGUFTensor(shape, element.name, raw.reshape(num_rows, row_bytes))
