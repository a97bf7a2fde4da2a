"""Compiling an operation so that only the arrays it changes cross the jit's boundary as donated ones.

Each donated array costs a microsecond or more at every call, whether it changes or not; an operation on a tree changes a third of
its arrays. Knows nothing of trees but that they are pytrees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax

S = TypeVar("S")

CPU_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
"""Without region analysis XLA copies whole arrays inside an operation that updates them in place."""


class InPlace(Generic[S]):
    """An operation `(state, *arguments) -> (state, *answers)`, compiled at its first call. The state given is consumed.

    Args:
        operation: Pure. Arrays it hands through untouched stay where they are.
        compiler_options: For XLA.
    """

    def __init__(self, operation: Callable[..., tuple[Any, ...]], compiler_options: dict[str, Any] | None = None) -> None:
        self._operation = operation
        self._changed: tuple[bool, ...] | None = None
        self._tree: Any = None
        self._pick_changed = self._pick_kept = self._merge = _picker([])
        options = CPU_OPTIONS if compiler_options is None else compiler_options
        self._jitted = jax.jit(self._run, donate_argnums=0, compiler_options=options)

    def __call__(self, state: S, *arguments: Any) -> tuple[Any, ...]:
        """The next state, and the operation's answers."""
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(state)
        if self._changed is None:
            self._tree = tree
            jax.eval_shape(self._watch, leaves, *arguments)
        new, answers = self._jitted(self._pick_changed(leaves), self._pick_kept(leaves), *arguments)
        return tree.unflatten(self._merge((*new, *leaves))), *answers

    def _watch(self, leaves: list[Any], *arguments: Any) -> None:
        """Trace once to see which arrays come out as other values than went in."""
        after = jax.tree.leaves(self._operation(self._tree.unflatten(leaves), *arguments)[0])
        self._changed = tuple(a is not b for a, b in zip(leaves, after, strict=True))
        changed = [n for n, change in enumerate(self._changed) if change]
        kept = [n for n, change in enumerate(self._changed) if not change]
        self._pick_changed, self._pick_kept = _picker(changed), _picker(kept)
        self._merge = _picker([changed.index(n) if n in changed else len(changed) + n for n in range(len(leaves))])

    def _run(self, changed: Sequence[Any], kept: Sequence[Any], *arguments: Any) -> tuple[list[Any], list[Any]]:
        parts, mask = (iter(kept), iter(changed)), self._changed or ()
        leaves = [next(parts[change]) for change in mask]
        state, *answers = self._operation(self._tree.unflatten(leaves), *arguments)
        after = jax.tree.leaves(state)
        if any(a is not b and not change for a, b, change in zip(leaves, after, mask, strict=True)):
            raise TypeError("the operation changes other arrays for these shapes than for the first; make another InPlace for them")
        return [leaf for leaf, change in zip(after, mask, strict=True) if change], answers


def _picker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these entries of a sequence."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda entries: tuple(entries[n] for n in indices)
