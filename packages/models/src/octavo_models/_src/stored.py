"""How a checkpoint keeps its weights: element types, counts and bytes, from the headers of its files.

Reads no weights. Knows GGUF's tensor table and the headers of safetensors files; imports no jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError, safe_open

from octavo_core.errors import CheckpointError
from octavo_models._src.gguf_meta import GgufHeader, read_gguf, tensor_bytes

_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I8": "int8",
    "U8": "uint8",
}
_GGML: Final = {
    0: "float32", 1: "float16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "int8", 28: "float64", 29: "IQ1_M", 30: "bfloat16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names that ggml gives its types."""


class StoredType(NamedTuple):
    """Tensors of one element type."""

    name: str
    num_tensors: int
    num_elements: int
    num_bytes: int


def stored_types(files: Sequence[Path]) -> tuple[StoredType, ...]:
    """The element types of the weights in these files, the largest first.

    Raises:
        CheckpointError: A file cannot be read.
    """
    return summed(entry for path in files for entry in (_gguf(read_gguf(path)) if path.suffix == ".gguf" else _safetensors(path)))


def summed(entries: Iterable[tuple[str, int, int]]) -> tuple[StoredType, ...]:
    """Tensors as (type, elements, bytes), added up by type."""
    found: dict[str, StoredType] = {}
    for kind, elements, num_bytes in entries:
        name = _NAMES.get(kind, kind)
        before = found.get(name, StoredType(name, 0, 0, 0))
        found[name] = StoredType(name, before.num_tensors + 1, before.num_elements + elements, before.num_bytes + num_bytes)
    return tuple(sorted(found.values(), key=lambda one: -one.num_bytes))


def _gguf(header: GgufHeader) -> Iterable[tuple[str, int, int]]:
    for tensor in header.tensors.values():
        kind = _GGML.get(tensor.ggml_type, f"ggml type {tensor.ggml_type}")
        yield kind, math.prod(tensor.shape), tensor_bytes(tensor)


def _safetensors(path: Path) -> Iterable[tuple[str, int, int]]:
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                elements = math.prod(part.get_shape())
                yield part.get_dtype(), elements, elements * element_bits(part.get_dtype()) // 8
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' is not a whole safetensors file ({error}); download it again") from None


def element_bits(kind: str) -> int:
    """Bits of a safetensors element type: the digits that follow its first letters; `BOOL` has 8."""
    digits = kind.partition("_")[0].lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(digits) if digits.isdecimal() else 8
