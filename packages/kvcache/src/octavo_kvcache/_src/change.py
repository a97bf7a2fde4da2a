"""Changes to arrays as values: a kernel says what becomes of which entries, and scatters make it so where the arrays lie.

What a native function answers is another array than what it was given, so it may read an array as long as the pool and not change it. Knows
nothing of trees.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool


@functools.partial(jax.tree_util.register_dataclass, data_fields=("index", "values", "wanted"), meta_fields=("is_gain",))
@dataclasses.dataclass(frozen=True)
class Change:
    """Entries of an array that become, or gain, some values.

    Attributes:
        index: Of each entry, an array for each leading axis it needs; inside where it is wanted.
        values: Their trailing axes are the rest of the array's.
        wanted: The others change nothing.
        is_gain: Added rather than put; then the same entry may come several times. What is put must be at different entries.
    """

    index: tuple[Array, ...]
    values: Array
    wanted: Bool[Array, " n"]
    is_gain: bool = False


def change(arrays: Mapping[str, Any], changes: Mapping[str, Sequence[Change]]) -> dict[str, Any]:
    """The arrays that change, by name, after their changes; `arrays` may have others."""
    after = {name: arrays[name] for name in changes}
    for name, some in changes.items():
        for c in some:
            at = after[name].at[(jnp.where(c.wanted, c.index[0], after[name].shape[0]), *c.index[1:])]
            after[name] = (at.add if c.is_gain else at.set)(c.values, mode="drop")
    return after
