"""One number or one row of an array at a time, for loops over blocks.

XLA on a CPU calls each operation of a program through a table, at a microsecond or more; but a loop of which one pass touches
less than a kilobyte it compiles into a single function of machine code, which updates arrays in place at some nanoseconds an access.
Loops that keep to `peek`, `peek_row`, `poke` and `poke_row` stay below that, as long as each pass is about one block; a test reads the
compiled programs. Indices must lie inside: as everywhere in XLA, others are moved there.

A pass reads first, in one `settled`, and writes then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

T = TypeVar("T")
Index = Int32[Array, ""] | int


def settled(read: Callable[[], T], block: Int32[Array, ""]) -> T:
    """What `read` answers, read now; any number that is not negative will do for `block`.

    Left alone, XLA reads again wherever a value is used. Where that comes after the array was written, it keeps a copy of the whole array. What
    a branch answers it does not compute a second time, and it does not know that this branch is always taken.
    """
    return lax.cond(block >= 0, read, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read)))


def peek(array: Shaped[Array, "..."], *at: Index) -> Any:
    """The number there."""
    return lax.dynamic_slice(array, _start(array, at), (1,) * array.ndim, allow_negative_indices=False).reshape(())


def peek_row(array: Shaped[Array, "..."], *at: Index) -> Any:
    """What lies there along the last axes."""
    shape = array.shape[len(at) :]
    sizes = (*(1 for _ in at), *shape)
    return lax.dynamic_slice(array, _start(array, at), sizes, allow_negative_indices=False).reshape(shape)


def poke(array: Shaped[Array, "..."], value: Any, *at: Index) -> Any:
    """The array with a number there."""
    update = jnp.asarray(value).astype(array.dtype).reshape((1,) * array.ndim)
    return lax.dynamic_update_slice(array, update, _start(array, at), allow_negative_indices=False)


def poke_row(array: Shaped[Array, "..."], row: Shaped[Array, "..."], *at: Index) -> Any:
    """The array with another row there."""
    update = row.reshape((*(1 for _ in at), *row.shape))
    return lax.dynamic_update_slice(array, update, _start(array, at), allow_negative_indices=False)


def _start(array: Shaped[Array, "..."], at: tuple[Index, ...]) -> list[Any]:
    start = [np.int32(i) if isinstance(i, int) else i for i in at]
    return start + [np.int32(0)] * (array.ndim - len(at))
