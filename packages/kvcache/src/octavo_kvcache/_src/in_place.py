"""Compiling an operation so that it updates the arrays of a state where they are. Knows nothing of trees but that they are pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

S = TypeVar("S")

CPU_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
"""Without region analysis XLA copies whole arrays inside an operation that updates them in place."""


class InPlace(Generic[S]):
    """An operation `(state, *arguments) -> (state, *answers)`, compiled at its first call. The state given is consumed.

    Args:
        operation: Pure.
        compiler_options: For XLA.
    """

    def __init__(self, operation: Callable[..., tuple[Any, ...]], compiler_options: dict[str, Any] | None = None) -> None:
        options = CPU_OPTIONS if compiler_options is None else compiler_options
        self._jitted = jax.jit(operation, donate_argnums=0, compiler_options=options)

    def __call__(self, state: S, *arguments: Any) -> tuple[Any, ...]:
        """The next state, and the operation's answers."""
        return self._jitted(state, *arguments)  # type: ignore[no-any-return]
