"""Many small arrays as one: every array that enters or leaves a program costs a microsecond or more, whatever its size.

Knows dtypes and shapes; knows nothing of what they mean.
"""

from __future__ import annotations

import math
from typing import Any, Final, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")
WORDS: Final = tuple(np.dtype(name) for name in ("int32", "uint32", "float32", "bool"))
"""What a 32-bit word can hold."""


class Packing(Generic[T]):
    """How a pytree is packed: leaves of at most `limit` elements into one int32 array, the others as they are.

    Args:
        like: A tree of arrays, or of their shapes and dtypes.
        limit: Elements of the largest array that is packed.
    """

    def __init__(self, like: T, *, limit: int = 8_192) -> None:
        self._tree: Any
        leaves, self._tree = jax.tree.flatten(like)
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        sizes = [math.prod(shape) for shape in self._shapes]
        self._packed = [size <= limit and dtype in WORDS for size, dtype in zip(sizes, self._dtypes, strict=True)]
        ends = np.cumsum([size if packed else 0 for size, packed in zip(sizes, self._packed, strict=True)]).tolist()
        self._spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._size = ends[-1] if ends else 0
        self._parts = list(zip(self._spans, self._shapes, self._dtypes, self._packed, strict=True))

    def pack(self, tree: T) -> tuple[jax.Array, list[jax.Array]]:
        """The packed array and the large leaves, under a trace."""
        leaves = jax.tree.leaves(tree)
        words = [_to_words(leaf) for leaf, packed in zip(leaves, self._packed, strict=True) if packed]
        return jnp.concatenate(words), [leaf for leaf, packed in zip(leaves, self._packed, strict=True) if not packed]

    def unpack(self, words: jax.Array, large: list[jax.Array]) -> T:
        """The inverse of `pack`, under a trace."""
        rest = iter(large)
        leaves = [
            _from_words(words[span], dtype).reshape(shape) if packed else next(rest) for span, shape, dtype, packed in self._parts
        ]
        return jax.tree.unflatten(self._tree, leaves)  # type: ignore[no-any-return]

    def pack_host(self, tree: T) -> np.ndarray:
        """The packed array of a tree of NumPy arrays without large leaves."""
        words = np.empty(self._size, np.int32)
        for leaf, span in zip(jax.tree.leaves(tree), self._spans, strict=True):
            part = np.asarray(leaf)
            words[span] = part.ravel() if part.dtype.kind == "b" else part.ravel().view(np.int32)
        return words

    def unpack_host(self, words: np.ndarray, large: list[np.ndarray]) -> T:
        """The tree of NumPy arrays: views of the packed one, and the large leaves."""
        rest, leaves = iter(large), []
        for span, shape, dtype, packed in self._parts:
            if not packed:
                leaves.append(next(rest))
                continue
            part = words[span]
            if dtype.kind == "b":
                part = part != 0
            elif dtype != np.int32:
                part = part.view(dtype)
            leaves.append(part if len(shape) == 1 else part.reshape(shape))
        return self._tree.unflatten(leaves)  # type: ignore[no-any-return]


def _to_words(leaf: jax.Array) -> jax.Array:
    flat = jnp.ravel(leaf)
    return flat.astype(jnp.int32) if flat.dtype == bool else jax.lax.bitcast_convert_type(flat, jnp.int32)


def _from_words(words: jax.Array, dtype: np.dtype) -> jax.Array:
    return words != 0 if dtype.kind == "b" else jax.lax.bitcast_convert_type(words, dtype)
