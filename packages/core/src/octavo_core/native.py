"""Small functions compiled as one native function each, where XLA on a CPU would run every operation in them by itself.

An operation on 256 integers takes some tens of nanoseconds; handing it to XLA's executor takes several times that, and a step is hundreds of
them. In one function a loop over rows costs a few nanoseconds a row, so what needs a scatter, a sort or a cumulative sum elsewhere is
written as such a loop here. Knows neither schedulers nor caches.
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
S = TypeVar("S")
Y = TypeVar("Y")

_inside: Final = contextvars.ContextVar("inside one_kernel", default=False)
_beside: Final = contextvars.ContextVar("in what stands for a batched kernel", default=False)


def one_kernel(function: F) -> F:
    """Compile `function`, a pure function of pytrees of arrays, as one native function on a CPU; elsewhere this changes nothing.

    What it calls is part of it, other such functions included. It may use no scatter, sort or random numbers, which XLA has no native form
    of, and no operation so large that XLA would share it among threads: some thousands of entries where much is computed of each (`each`).
    The functions below are loops in a kernel and what vectorises best elsewhere. Batched by `vmap` it is called for one entry after
    another on a CPU: a branch not taken then costs nothing.

    Source: XLA compiles a call marked `xla_cpu_small_call` by its emitter of whole computations, as it does small loops.
    """

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        if _inside.get() or _beside.get():
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
    """Call what was traced as `jaxpr` with the arguments it reads; `flat` is the same where it is batched and this is no CPU."""
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
        # What is called in it, `jnp.where` for one, is marked too; loops are not, see `loop`.
        with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
            return jax.jit(of_read)(*some)[:-1]

    @marked.def_vmap
    def batched(axis_size: int, is_batched: list[bool], *some: Array) -> tuple[list[Array], list[bool]]:
        axes = [0 if batch else None for batch in is_batched]

        def in_turn(*some: Array) -> list[Array]:
            mapped = [x for x, batch in zip(some, is_batched, strict=True) if batch]

            def one(mapped: list[Array]) -> list[Array]:
                rest = iter(mapped)
                return marked(*[next(rest) if batch else x for x, batch in zip(some, is_batched, strict=True)])

            return lax.map(one, mapped)

        def side_by_side(*some: Array) -> list[Array]:
            token = _beside.set(True)
            try:
                return jax.vmap(lambda *some: flat(*all_of(some)), axes, axis_size=axis_size)(*some)
            finally:
                _beside.reset(token)

        out = lax.platform_dependent(*some, cpu=in_turn, default=side_by_side)
        return out, [True] * len(out)

    return marked(*[leaf for leaf, reads in zip(leaves, is_read, strict=True) if reads])


def _entry(array: Array) -> Array:
    """The first entry, as 32 bits."""
    entry = array.reshape(-1)[0]
    return entry.astype(jnp.int32) if entry.dtype == bool else lax.bitcast_convert_type(entry, jnp.int32)


def loop(count: int | Array, body: Callable[[Array, S], S], start: S) -> S:
    """`lax.fori_loop` as a bare `while`: that of a known count is lowered with a call in it, which the mark of `one_kernel` keeps from being
    inlined, and then every turn goes through memory."""

    def turn(carry: tuple[Array, S]) -> tuple[Array, S]:
        return carry[0] + 1, body(*carry)

    return lax.while_loop(lambda carry: carry[0] < count, turn, (jnp.int32(0), start))[1]


def turns(step: Callable[[S], tuple[S, Y]], state: S, length: int) -> tuple[S, Y]:
    """`lax.scan` of a step that is given nothing."""
    if not _inside.get():
        return lax.scan(lambda state, _: step(state), state, None, length=length)
    like = jax.eval_shape(step, state)[1]
    lines = jax.tree.map(lambda line: jnp.zeros((length, *line.shape), line.dtype), like)

    def turn(i: Array, now: tuple[S, Y]) -> tuple[S, Y]:
        state, line = step(now[0])
        return state, jax.tree.map(lambda lines, line: put(lines, (i,), line), now[1], line)

    return loop(length, turn, (state, lines))


def each(count: int, entry: Callable[[Array], Array]) -> Array:
    """`entry` of 0 to `count` − 1, in a row: one after another in a kernel, where what it looks at may be wide and all entries together may not
    (XLA would share that among threads, which it cannot in a kernel: it fails to compile)."""
    if not _inside.get():
        return jax.vmap(entry)(jnp.arange(count, dtype=jnp.int32))
    like = jax.eval_shape(entry, jax.ShapeDtypeStruct((), jnp.int32))
    return loop(count, lambda i, out: put(out, (i,), entry(i)), jnp.zeros((count, *like.shape), like.dtype))


def is_kernel() -> bool:
    """Whether what is traced now becomes part of a kernel."""
    return _inside.get()


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

    last = jnp.max(jnp.where(wanted, jnp.arange(1, wanted.size + 1, dtype=jnp.int32), 0))
    return loop(last, write, array)


def put_one(array: Array, index: Array, value: Array, wanted: Bool[Array, ""]) -> Array:
    """`array` with `value` at an index, which must be inside, if that is `wanted`."""
    if not _inside.get():
        return array.at[jnp.where(wanted, index, array.shape[0])].set(value, mode="drop")
    return put(array, (index,), jnp.where(wanted, value, array[index]))


def unless(shortcut: Bool[Array, ""], short: Callable[[], S], long: Callable[[], S]) -> S:
    """`long()`, where `short()` gives the same if `shortcut`: taken in a kernel, where a branch costs little, and nowhere else."""
    if not _inside.get():
        return long()
    return lax.cond(shortcut, short, long)


def if_so(wanted: Bool[Array, ""], change: Callable[[S], S], state: S) -> S:
    """`change(state)` if `wanted`: a loop of at most one turn in a kernel, so that what does not change stays where it is."""
    if not _inside.get():
        return lax.cond(wanted, change, lambda same: same, state)
    return loop(wanted.astype(jnp.int32), lambda _, state: change(state), state)


def sorted_again(order: Int32[Array, " n"], keys: tuple[Int32[Array, " n"], ...]) -> Int32[Array, " n"]:
    """A permutation in order of keys, the most telling last: sorted by index where they are equal, or in a kernel as `order` has them, which is
    best nearly sorted there."""
    if not _inside.get():
        return jnp.lexsort(keys).astype(jnp.int32)

    def is_before(a: Array, b: Array) -> Array:
        less = jnp.bool_(False)
        for key in keys:
            less = (key[a] < key[b]) | ((key[a] == key[b]) & less)
        return less

    def insert(i: Array, order: Array) -> Array:
        this = order[i]

        def goes_on(now: tuple[Array, Array]) -> Array:
            return (now[0] > 0) & is_before(this, now[1][jnp.maximum(now[0] - 1, 0)])

        def shift(now: tuple[Array, Array]) -> tuple[Array, Array]:
            return now[0] - 1, put(now[1], (now[0],), now[1][now[0] - 1])

        place, order = lax.while_loop(goes_on, shift, (i, order))
        return put(order, (place,), this)

    return loop(order.size, insert, order)


def inverse(order: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Where each index stands in a permutation."""
    places = jnp.arange(order.size, dtype=jnp.int32)
    if not _inside.get():
        return jnp.zeros_like(places).at[order].set(places)
    return loop(order.size, lambda i, places: put(places, (order[i],), i), places)


def running_sum(x: Shaped[Array, " n"]) -> Int32[Array, " n"]:
    """Inclusive sums."""
    if not _inside.get():
        return jnp.cumsum(x, dtype=jnp.int32)

    def add(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total = carry[1] + x[i].astype(jnp.int32)
        return put(carry[0], (i,), total), total

    return loop(x.size, add, (jnp.zeros(x.size, jnp.int32), jnp.int32(0)))[0]


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

    return loop(values.size, look, (to, start))[0]
