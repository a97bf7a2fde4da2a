"""A weight matrix packed for the kernels, and from which rows of a checkpoint it comes.

Knows the formats; knows no model and no file. Packing copies every value once, in C++.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32

from octavo_kernels_cpu._src.library import Library

PANEL = 16
GROUP = 32
ALIGNMENT = 64


class Format(enum.IntEnum):
    """How a packed matrix keeps its values: as floats, as int8 with a scale for 32 inputs, as 4 bits with scale and minimum.

    Activations enter `Q8` and `Q4` as int8, `Q8F`, whose weights are those of `Q8`, as 16 bits, the others as they are.
    """

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3
    Q8F = 4


class Source(enum.IntEnum):
    """What rows are made of; the last three are GGUF's blocks, as raw bytes."""

    F32 = 0
    BF16 = 1
    Q8_0 = 2
    Q4_0 = 3
    Q4_1 = 4


class Raw(NamedTuple):
    """Rows as a checkpoint has them.

    Attributes:
        source: What they are made of.
        rows: `[outputs, …]`, contiguous: values, or a block's bytes.
        inputs: Values in a row.
    """

    source: Source
    rows: np.ndarray
    inputs: int


class Matrix(nnx.Module):
    """A packed weight `[outputs, inputs]` with its bias.

    Attributes:
        data: Panels, as bytes.
        bias: `[outputs, to the next multiple of 16]`, or None.
    """

    def __init__(
        self, library: Library, raw: Raw, form: Format, *, order: np.ndarray | None = None, bias: np.ndarray | None = None
    ) -> None:
        """Pack.

        Args:
            library: Whose packing to use.
            raw: The rows.
            form: The format wanted.
            order: Which row is which output; −1 for a row of zeros. None: as they are.
            bias: Of each row.

        Raises:
            NotImplementedError: The rows cannot be packed so.
        """
        order = np.arange(len(raw.rows), dtype=np.int32) if order is None else order.astype(np.int32)
        self.form, self.outputs, self.inputs = int(form), len(order), raw.inputs
        size = library.packed_bytes(form, raw.source, self.outputs, raw.inputs)
        if size < 0:
            raise NotImplementedError(
                f"a weight of {self.outputs} × {raw.inputs} in {raw.source.name} cannot be packed as {form.name}"
            )
        order = np.ascontiguousarray(np.pad(order, (0, -len(order) % PANEL), constant_values=-1))
        data = empty_aligned(size)
        library.pack(form, raw.source, raw.inputs, np.ascontiguousarray(raw.rows), order, data)
        self.data = nnx.Param(jnp.asarray(data))
        self.bias = None if bias is None else Static(_in_order(bias, order))


class Static:
    """A value that takes part in a module's structure and compares by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and other.value is self.value


def empty_aligned(num_bytes: int) -> np.ndarray:
    """Uninitialised bytes that JAX takes over without copying."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def row_bytes(form: int, rows: int, inputs: int) -> int:
    """Scratch memory of rows on their way into a product, as such or as a prompt's."""
    prompt = aligned(-(-rows // PANEL) * PANEL * inputs * 2)
    if form not in (Format.Q8, Format.Q4, Format.Q8F):
        return aligned(rows * inputs * 4) + prompt
    room, planes = -(-rows // PANEL) * PANEL, 2 if form == Format.Q8F else 1
    return prompt + planes * aligned(room * inputs) + (1 + planes) * aligned(room * (inputs // GROUP) * 4)


def aligned(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def scratch(num_bytes: int) -> jax.ShapeDtypeStruct:
    """A result that nobody reads: XLA finds room for it among its temporaries."""
    return jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)


def call(library: Library, operation: str, results: Any, *args: Any, aliases: dict[int, int] | None = None, **numbers: Any) -> Any:
    """Call an operation; whole numbers become int64, others float32."""
    attributes = {k: np.float32(v) if isinstance(v, float) else np.int64(v) for k, v in numbers.items()}
    function: Any = jax.ffi.ffi_call(library.target(operation), results, input_output_aliases=aliases)
    return function(*args, **attributes)


def score(library: Library, matrix: Matrix, x: Float32[Array, "rows inputs"]) -> Float32[Array, "rows outputs"]:
    """`x @ W.T + b`. Cost: W's bytes once for every 48 rows; rows of zeros at the end cost only their answers."""
    room = row_bytes(matrix.form, len(x), matrix.inputs)
    out = jax.ShapeDtypeStruct((len(x), matrix.outputs), jnp.float32)
    bias = jnp.zeros(0, jnp.float32) if matrix.bias is None else jnp.asarray(matrix.bias.value)
    y, _ = call(library, "score", (out, scratch(room)), x, matrix.data[...], bias, format=matrix.form)
    return y


def _in_order(bias: np.ndarray, order: np.ndarray) -> np.ndarray:
    wide = np.zeros(len(order), np.float32)
    wide[order >= 0] = np.asarray(bias, np.float32)[order[order >= 0]]
    return wide
