"""A GGUF file's metadata and tensor table. What model they describe is read by `gguf_config`.

Reads the header only, through a memory map and in a fraction of the time of `gguf.GGUFReader`, so that a frontend can have the
tokenizer without numpy views of every string. Tensor data are the weight loader's; here only their place is checked.

Source: the GGUF specification of ggml (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.fields import Fields
from octavo_models._src.model_config import GenerationConfig

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS: Final = 4
_MAX_NAME_BYTES: Final = 65535


class GgufTensor(NamedTuple):
    """A row of the tensor table. `shape` is in GGUF's order, fastest axis first; `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What stands before the tensor data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values and refuses to pass the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.size = data, path, 0, len(data)

    def need(self, count: int) -> None:
        if count > self.size - self.at:
            raise CheckpointError(f"{self.path}: truncated: {count} bytes wanted at {self.at}, the file has {self.size}")

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        self.need(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += size
        return value

    def raw(self) -> bytes:
        length = self.scalar("Q")
        self.need(length)
        self.at += length
        return self.data[self.at - length : self.at]

    def text(self) -> str:
        try:
            return self.raw().decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: a string before byte {self.at} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY and depth < 2:
            return self.array(self.scalar("I"), self.scalar("Q"), depth)
        raise CheckpointError(f"{self.path}: unknown value type {kind} before byte {self.at}")

    def texts(self, count: int) -> list[str]:
        """An array of strings: `text` in one loop, for vocabularies have a hundred thousand."""
        found, data, size, length = [], self.data, self.size, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = self.at + 8
                end = start + length(data, self.at)[0] if start <= size else start
                if end > size:
                    self.need(end - self.at)
                found.append(data[start:end].decode("utf-8"))
                self.at = end
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: a string at byte {self.at} is not UTF-8") from None
        return found

    def array(self, kind: int, count: int, depth: int) -> list[Any]:
        if kind in _SCALARS:
            code = f"<{count}{_SCALARS[kind]}"
            self.need(count * struct.calcsize("<" + _SCALARS[kind]))
            values = list(struct.unpack_from(code, self.data, self.at))
            self.at += struct.calcsize(code)
            return values
        self.need(count * 8)
        if kind == _STRING:
            return self.texts(count)
        return [self.value(kind, depth + 1) for _ in range(count)]


def read_gguf(path: Path) -> GgufHeader:
    """Metadata and tensor table of a GGUF file.

    Raises:
        CheckpointError: When the file cannot be read, is no GGUF, or is cut short anywhere, tensor data included.
        UnsupportedModelError: For a version, byte order or split file this version does not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(_Cursor(data, path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def _read(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    cursor.need(4)
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError(f"{path}: wanted a GGUF file, but it does not begin with 'GGUF'")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedModelError(f"{path}: GGUF version {version} is not read; little-endian versions 2 and 3 are")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.need(12 * num_values + 24 * num_tensors)
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModelError(f"{path}: a GGUF split over {metadata['split.count']} files is not read; merge it first")
    return GgufHeader(path, metadata, _tensors(cursor, num_tensors, metadata))


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensor]:
    rows = []
    for _ in range(count):
        name, dims = cursor.text(), cursor.scalar("I")
        if dims > _MAX_DIMS:
            raise CheckpointError(f"{cursor.path}: tensor '{name[:80]}' has {dims} axes, at most {_MAX_DIMS} are possible")
        shape = tuple(cursor.array(10, dims, 0))
        rows.append(GgufTensor(name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = Fields(metadata, str(cursor.path)).integer("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    for row in rows:
        _check_inside(cursor, row, start)
    return {row.name: row._replace(offset=start + row.offset) for row in rows}


def tensor_bytes(tensor: GgufTensor) -> int:
    """Bytes of a tensor's data; 0 where its type's size is not known here."""
    block, size = _TYPE_SIZES.get(tensor.ggml_type, (1, 0))
    return math.prod(tensor.shape) // block * size


def _check_inside(cursor: _Cursor, tensor: GgufTensor, start: int) -> None:
    """Every tensor must lie in the file; where its type's size is not known here, at least its first byte."""
    end = start + tensor.offset + (tensor_bytes(tensor) if tensor.ggml_type in _TYPE_SIZES else 1)
    if end > cursor.size:
        raise CheckpointError(f"{cursor.path}: truncated: tensor '{tensor.name}' ends at {end}, the file has {cursor.size} bytes")


_PLAIN_SIZES: Final = {0: 4, 1: 2, 24: 1, 25: 2, 26: 4, 27: 8, 28: 8, 30: 2}
_SIZES_OF_32: Final = {2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 9: 40, 20: 18, 39: 17}
_SIZES_OF_256: Final = {
    10: 84,
    11: 110,
    12: 144,
    13: 176,
    14: 210,
    15: 292,
    16: 66,
    17: 74,
    18: 98,
    19: 50,
    21: 110,
    22: 82,
    23: 136,
    29: 56,
}
# Elements and bytes of a block of each ggml type.
_TYPE_SIZES: Final = {
    kind: (block, size)
    for block, sizes in ((1, _PLAIN_SIZES), (32, _SIZES_OF_32), (256, _SIZES_OF_256))
    for kind, size in sizes.items()
}


def generation_config(header: GgufHeader) -> GenerationConfig:
    """End, begin and padding tokens; GGUF carries no sampling defaults."""
    fields = Fields(header.metadata, str(header.path))
    eos = fields.token_ids("tokenizer.ggml.eos_token_id") + fields.token_ids("tokenizer.ggml.eot_token_id")
    bos, pad = fields.token_ids("tokenizer.ggml.bos_token_id"), fields.token_ids("tokenizer.ggml.padding_token_id")
    return GenerationConfig(tuple(dict.fromkeys(eos)), bos[0] if bos else None, pad[0] if pad else None)
