"""Small functions compiled as one native function each, where XLA on a CPU would run every operation in them by itself.

An operation on 256 integers takes some tens of nanoseconds; handing it to XLA's executor takes several times that, and a step is hundreds of
them. In one function a loop over rows costs a few nanoseconds a row, so what needs a scatter, a sort or a cumulative sum elsewhere is
written as such a loop here. Knows no scheduler.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Int32, Shaped

F = TypeVar("F", bound=Callable[..., Any])

_inside: Final = contextvars.ContextVar("inside one_kernel", default=False)


def one_kernel(function: F) -> F:
    """Compile `function`, a pure function of pytrees of arrays, as one native function on a CPU; elsewhere this changes nothing.

    What it calls is part of it, other such functions included. It may use no scatter, sort or random numbers, which XLA has no native form
    of; the functions below are loops in a kernel and what vectorises best elsewhere. Batched by `vmap` it is no kernel.

    Source: XLA compiles a call marked `xla_cpu_small_call` by its emitter of whole computations, as it does small loops.
    """

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        if _inside.get():
            return function(*arguments)
        leaves, tree = jax.tree.flatten(arguments)
        shapes: list[Any] = []

        def flat(*leaves: Array) -> list[Array]:
            out, shape = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            shapes.append(shape)
            return out

        token = _inside.set(True)
        try:
            jaxpr = jax.make_jaxpr(flat)(*leaves)
        finally:
            _inside.reset(token)
        return jax.tree.unflatten(shapes[-1], _call(flat, jaxpr, leaves))

    return traced  # type: ignore[return-value]


def _call(flat: Callable[..., list[Array]], jaxpr: Any, leaves: list[Any]) -> list[Array]:
    """Call what was traced as `jaxpr` with the arguments it reads; `flat` is the same where it is batched."""
    read = {id(v) for eqn in jaxpr.jaxpr.eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    is_read = [id(v) in read for v in jaxpr.jaxpr.invars]

    def all_of(some: tuple[Array, ...]) -> list[Array]:
        rest, avals = iter(some), [v.aval for v in jaxpr.jaxpr.invars]
        return [next(rest) if reads else jnp.zeros(a.shape, a.dtype) for reads, a in zip(is_read, avals, strict=True)]

    def of_read(*some: Array) -> list[Array]:
        # XLA aborts at an argument that proves to be of no use, so an entry of each is one.
        witness = functools.reduce(jnp.bitwise_xor, [_entry(a) for a in some if a.size], jnp.int32(0))
        return [*jaxpr_as_fun(jaxpr)(*all_of(some)), witness]

    @jax.custom_batching.custom_vmap
    def marked(*some: Array) -> list[Array]:
        # Only the call is marked: the operations in it were traced before.
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jax.jit(of_read)(*some)[:-1]

    @marked.def_vmap
    def batched(axis_size: int, is_batched: list[bool], *some: Array) -> tuple[list[Array], list[bool]]:
        axes = [0 if batch else None for batch in is_batched]
        out = jax.vmap(lambda *some: flat(*all_of(some)), axes, axis_size=axis_size)(*some)
        return out, [True] * len(out)

    return marked(*[leaf for leaf, reads in zip(leaves, is_read, strict=True) if reads])


def _entry(array: Array) -> Array:
    """The first entry, as 32 bits."""
    entry = array.reshape(-1)[0]
    return entry.astype(jnp.int32) if entry.dtype == bool else lax.bitcast_convert_type(entry, jnp.int32)


def put(array: Array, index: tuple[Any, ...], value: Array) -> Array:
    """`array` with `value` in place of the entry, or the whole of the trailing axes, at `index`, which must be inside."""
    at = (*index, *[0] * (array.ndim - len(index)))
    return lax.dynamic_update_slice(
        array, jnp.asarray(value, array.dtype).reshape((*[1] * len(index), *array.shape[len(index) :])), at
    )


def put_all(array: Array, index: tuple[Array, ...], values: Array, wanted: Bool[Array, " n"]) -> Array:
    """`array` with each of the `values` that is `wanted` at its index: a scatter, or a loop where there is none."""
    at = tuple(jnp.where(wanted, i, size) for i, size in zip(index, array.shape, strict=False))
    if not _inside.get():
        return array.at[at].set(values, mode="drop")
    at = tuple(jnp.clip(i, 0, size - 1) for i, size in zip(index, array.shape, strict=False))

    def write(i: Array, array: Array) -> Array:
        where = tuple(axis[i] for axis in at)
        return put(array, where, jnp.where(wanted[i], values[i], array[where]))

    return lax.fori_loop(0, wanted.size, write, array)


def inverse(order: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Where each index stands in a permutation."""
    places = jnp.arange(order.size, dtype=jnp.int32)
    if not _inside.get():
        return jnp.zeros_like(places).at[order].set(places)
    return lax.fori_loop(0, order.size, lambda i, places: put(places, (order[i],), i), places)


def running_sum(x: Shaped[Array, " n"]) -> Int32[Array, " n"]:
    """Inclusive sums."""
    if not _inside.get():
        return jnp.cumsum(x, dtype=jnp.int32)

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total = carry[1] + x[i].astype(jnp.int32)
        return put(carry[0], (i,), total), total

    return lax.fori_loop(0, x.size, add, (jnp.zeros(x.size, jnp.int32), jnp.int32(0)))[0]


def pick_in_turn(
    values: Int32[Array, " n"], wanted: Bool[Array, " n"], to: Int32[Array, " size"], start: Array
) -> Int32[Array, " size"]:
    """The `wanted` ones of `values` in a row, in `to` from `start` on; its last entry, and those behind the row, come to mean nothing."""
    if not _inside.get():
        at = jnp.where(wanted, start + jnp.cumsum(wanted) - 1, to.size)
        return to.at[at].set(values, mode="drop")

    def look(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # Written in any case: what was not wanted is written over by the next.
        return put(carry[0], (carry[1],), values[i]), carry[1] + wanted[i]

    return lax.fori_loop(0, values.size, look, (to, start))[0]
