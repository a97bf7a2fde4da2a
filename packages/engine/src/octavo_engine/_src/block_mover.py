"""Blocks between the device's pools and arrays of bytes, by programs compiled at start for a few numbers of blocks.

Touches device memory. What is gathered is a copy: it is right whatever later steps write, because the device runs what it is given in
order. On a mesh a block is the bytes of its first device, its second, and so on, on all of them: one array for the host. What is scattered
is copied from the caller's arrays, which nobody may change any more: on a CPU a device array may alias them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from octavo_core.seams import AttentionBackend
from octavo_engine._src.runner import ModelRunner

SIZES: Final = (2, 16)
"""Blocks moved at once: the numbers programs are compiled for."""


class BlockMover:
    """Moves blocks of one runner.

    Args:
        runner: Whose KV it is.

    Attributes:
        piece_bytes: Bytes of a block in each array: one for each segment of layers.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._gathers: dict[tuple[Any, int], Any] = {}
        self._scatters: dict[tuple[Any, int], Any] = {}
        attention = runner.programs.attention
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        shapes = [jax.eval_shape(functools.partial(_gather, attention), kv, one) for kv in runner.kv]
        self.piece_bytes = tuple(shape.shape[1] for shape in shapes)
        self._compile()

    @staticmethod
    def _kind(kv: Any) -> tuple[Any, ...]:
        return tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(kv))

    def _compile(self) -> None:
        """One program for each size and each kind of segment; most segments are alike."""
        attention, compiler = self._runner.programs.attention, self._runner.compiler
        gather = compiler.jit(functools.partial(_gather, attention))
        for kv, size_bytes in zip(self._runner.kv, self.piece_bytes, strict=True):
            scatter = compiler.jit(functools.partial(_scatter, attention), donate=(0,), kv=kv)
            for size in SIZES:
                key = self._kind(kv), size
                if key not in self._gathers:
                    ids, data = compiler.ints(size), compiler.placed(jax.ShapeDtypeStruct((size, size_bytes), jnp.uint8))
                    self._gathers[key] = compiler.compile("gather", gather, kv, ids)
                    self._scatters[key] = compiler.compile("scatter", scatter, kv, ids, data)

    def gather(self, block_ids: Sequence[int]) -> Iterator[tuple[slice, list[Any]]]:
        """Begin to copy blocks out: which of the ids, and an array for each segment whose first rows are theirs."""
        for part, size in _parts(len(block_ids)):
            ids = _padded(block_ids[part], size, 0)
            yield part, [self._gathers[self._kind(kv), size](kv, ids) for kv in self._runner.kv]

    def scatter(self, block_ids: Sequence[int], pieces: Sequence[np.ndarray]) -> None:
        """Write blocks: row `i` of each piece belongs to `block_ids[i]`."""
        for part, size in _parts(len(block_ids)):
            ids, out = _padded(block_ids[part], size, -1), []
            for kv, piece in zip(self._runner.kv, pieces, strict=True):
                rows = piece[part]
                if len(rows) < size:
                    rows = np.concatenate([rows, np.zeros((size - len(rows), piece.shape[1]), np.uint8)])
                out.append(self._scatters[self._kind(kv), size](kv, ids, rows))
            self._runner.kv = tuple(out)


def _parts(count: int) -> Iterator[tuple[slice, int]]:
    """Cut a number of blocks into slices, each with the smallest size that holds it."""
    for start in range(0, count, SIZES[-1]):
        stop = min(start + SIZES[-1], count)
        yield slice(start, stop), next(size for size in SIZES if size >= stop - start)


def _padded(ids: Sequence[int], size: int, fill: int) -> np.ndarray:
    return np.array([*ids, *[fill] * (size - len(ids))], np.int32)


def _gather(attention: AttentionBackend[Any], kv: tuple[Any, ...], ids: Int32[Array, " ids"]) -> UInt8[Array, "ids piece_bytes"]:
    return jnp.concatenate([attention.gather(layer, ids) for layer in kv], axis=1)


def _scatter(
    attention: AttentionBackend[Any], kv: tuple[Any, ...], ids: Int32[Array, " ids"], data: UInt8[Array, "ids piece_bytes"]
) -> tuple[Any, ...]:
    out, first = [], 0
    for layer in kv:
        size = jax.eval_shape(attention.gather, layer, ids).shape[1]
        out.append(attention.scatter(layer, ids, data[:, first : first + size]))
        first += size
    return tuple(out)
