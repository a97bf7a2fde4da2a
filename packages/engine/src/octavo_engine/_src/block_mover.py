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
        attention, self._num_groups = runner.programs.attention, len(runner.programs.groups)
        one = jax.ShapeDtypeStruct((self._num_groups, 1), jnp.int32)
        shapes = [jax.eval_shape(functools.partial(_gather, attention, kind[0]), kv, one) for kind, kv in self._kinds()]
        self.piece_bytes = tuple(shape.shape[1] for shape in shapes)
        self._compile()

    def _kinds(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Of each segment what its programs depend on, the groups of its layers first, and its KV."""
        for segment, kv in zip(self._runner.programs.segments, self._runner.kv, strict=True):
            yield (segment.groups, *((x.shape, str(x.dtype)) for x in jax.tree.leaves(kv))), kv

    def _compile(self) -> None:
        """One program for each size and each kind of segment; most segments are alike."""
        attention, compiler = self._runner.programs.attention, self._runner.compiler
        for (kind, kv), size_bytes in zip(self._kinds(), self.piece_bytes, strict=True):
            gather = compiler.jit(functools.partial(_gather, attention, kind[0]))
            scatter = compiler.jit(functools.partial(_scatter, attention, kind[0]), donate=(0,), kv=kv)
            for size in SIZES:
                if (kind, size) not in self._gathers:
                    ids = compiler.placed(jax.ShapeDtypeStruct((self._num_groups, size), jnp.int32))
                    data = compiler.placed(jax.ShapeDtypeStruct((size, size_bytes), jnp.uint8))
                    self._gathers[kind, size] = compiler.compile(f"gather of groups {kind[0]}", gather, kv, ids)
                    self._scatters[kind, size] = compiler.compile(f"scatter to groups {kind[0]}", scatter, kv, ids, data)

    def gather(self, block_ids: Int32[np.ndarray, "groups ids"]) -> Iterator[tuple[slice, list[Any]]]:
        """Begin to copy blocks out: which columns of the ids, and an array for each segment whose first rows are theirs.

        A block's bytes in a group whose id is 0 mean nothing.
        """
        for part, size in _parts(block_ids.shape[1]):
            ids = _padded(block_ids[:, part], size, 0)
            yield part, [self._gathers[kind, size](kv, ids) for kind, kv in self._kinds()]

    def scatter(self, block_ids: Int32[np.ndarray, "groups ids"], pieces: Sequence[np.ndarray]) -> None:
        """Write blocks: row `i` of each piece belongs to `block_ids[:, i]`; in a group whose id is −1 nothing is written."""
        for part, size in _parts(block_ids.shape[1]):
            ids, out = _padded(block_ids[:, part], size, -1), []
            for (kind, kv), piece in zip(self._kinds(), pieces, strict=True):
                rows = piece[part]
                if len(rows) < size:
                    rows = np.concatenate([rows, np.zeros((size - len(rows), piece.shape[1]), np.uint8)])
                out.append(self._scatters[kind, size](kv, ids, rows))
            self._runner.kv = tuple(out)


def _parts(count: int) -> Iterator[tuple[slice, int]]:
    """Cut a number of blocks into slices, each with the smallest size that holds it."""
    for start in range(0, count, SIZES[-1]):
        stop = min(start + SIZES[-1], count)
        yield slice(start, stop), next(size for size in SIZES if size >= stop - start)


def _padded(ids: Int32[np.ndarray, "groups ids"], size: int, fill: int) -> Int32[np.ndarray, "groups size"]:
    return np.pad(ids, [(0, 0), (0, size - ids.shape[1])], constant_values=fill)


def _gather(
    attention: AttentionBackend[Any], groups: tuple[int, ...], kv: tuple[Any, ...], ids: Int32[Array, "groups ids"]
) -> UInt8[Array, "ids piece_bytes"]:
    return jnp.concatenate([attention.gather(layer, ids[group]) for group, layer in zip(groups, kv, strict=True)], axis=1)


def _scatter(
    attention: AttentionBackend[Any],
    groups: tuple[int, ...],
    kv: tuple[Any, ...],
    ids: Int32[Array, "groups ids"],
    data: UInt8[Array, "ids piece_bytes"],
) -> tuple[Any, ...]:
    out, first = [], 0
    for group, layer in zip(groups, kv, strict=True):
        size = jax.eval_shape(attention.gather, layer, ids[group]).shape[1]
        out.append(attention.scatter(layer, ids[group], data[:, first : first + size]))
        first += size
    return tuple(out)
