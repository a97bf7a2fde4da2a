"""Refusing arguments before they are traced: shapes and types, which are known then. Values are the operations' business."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.errors import ConfigError
from octavo_kvcache._src.state import RadixState


def check_array(name: str, array: Any, shape: tuple[int, ...], dtype: str, who: str) -> None:
    """Refuse an argument of another shape or type. Python numbers count as arrays without axes.

    Raises:
        ConfigError: Saying what came and what was wanted.
    """
    got = _described(array)
    if got != (shape, dtype):
        raise ConfigError(f"{name} is {got[1]}{list(got[0])}; wanted {dtype}{list(shape)} for {who}")


def _described(array: Any) -> tuple[tuple[int, ...], str]:
    """Shape and type; of what is no array the name of its class."""
    if isinstance(array, jax.Array | np.ndarray | np.generic | bool | int | float):
        return np.shape(array), jnp.result_type(array).name
    return (), type(array).__name__


def check_count(count: Any) -> None:
    """Refuse a number of blocks that is not one."""
    check_array("count", count, (), "int32", "one number")


def check_handles(block_ids: Any, generations: Any) -> None:
    """Refuse handles that are not two lists of the same length."""
    shape = (*_described(block_ids)[0], 0)[:1]
    check_array("block_ids", block_ids, shape, "int32", "a list of handles")
    check_array("generations", generations, shape, "int32", "handles, one for each of block_ids")


def check_prompt(radix: RadixState, tokens: Any, namespace: Any) -> None:
    """Refuse tokens that do not fill whole blocks of the tree, or what is no namespace."""
    size = radix.tokens.shape[1]
    length = (*_described(tokens)[0], size)[0]
    whole = max(-(-length // size), 1) * size
    check_array("tokens", tokens, (whole,), "int32", f"a tree with blocks of {size} tokens; pad to whole blocks")
    check_array("namespace", namespace, (2,), "uint32", "a tree's namespace")


def check_like(name: str, value: Any, wanted: Any, advice: str) -> None:
    """Refuse a state whose arrays are not those of `wanted`.

    Raises:
        ConfigError: Naming the first that differs.
    """
    expected, structure = jax.tree_util.tree_flatten_with_path(wanted)
    if str(jax.tree.structure(value)) != str(structure):
        raise ConfigError(f"{name} has other parts than wanted; {advice}")
    for (path, want), got in zip(expected, jax.tree.leaves(value), strict=True):
        check_array(f"{name}{jax.tree_util.keystr(path)}", got, want.shape, want.dtype.name, advice)
