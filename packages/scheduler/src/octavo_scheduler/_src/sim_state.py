"""The state of a simulated engine: the scheduler's and the cache's own, the host's books, the clock, and what became of each request.

Knows shapes; knows no rule.
"""

from __future__ import annotations

import typing
from typing import Any, Final, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from octavo_core.plan import Arrivals, StepResult
from octavo_scheduler._src.sim_trace import Trace

T = TypeVar("T")


TICK_S: Final = 1e-5
"""Of the clock: five hours fit 32 bits, and what a tick cannot hold is carried on."""
MAX_S: Final = 2**31 * TICK_S * 0.9

PENDING: Final = 0
TAKEN: Final = 1
DONE: Final = 2
REFUSED: Final = 3


class Requests(NamedTuple):
    """A trace as arrays of the device; what pads it never arrives.

    Attributes:
        arrival: In ticks.
        order: Position in the queue: what the scheduler calls order.
        parts: Names of the prompt's parts, as in `Trace`.
        found: Tokens a counting cache finds.
    """

    arrival: Int32[Array, " requests"]
    prompt_len: Int32[Array, " requests"]
    output_len: Int32[Array, " requests"]
    limit_len: Int32[Array, " requests"]
    parts: Int32[Array, "requests parts"]
    found: Int32[Array, " requests"]
    tenant: Int32[Array, " requests"]
    priority: Int32[Array, " requests"]


def requests_of(trace: Trace, *, with_parts: bool = True) -> Requests:
    """A trace for the device, padded to a power of two, so that traces of about one length share a compiled program.

    Args:
        trace: What arrives.
        with_parts: Tell what prompts consist of; a counting cache does not ask.
    """
    padding = (1 << max(6, (len(trace) - 1).bit_length())) - len(trace)

    def padded(column: np.ndarray, value: int) -> Array:
        widths = [(0, padding)] + [(0, 0)] * (column.ndim - 1)
        return jnp.asarray(np.pad(column, widths, constant_values=value).astype(np.int32))

    return Requests(
        arrival=padded(np.round(trace.arrival_s / TICK_S), 2**31 - 1),
        prompt_len=padded(trace.prompt_len, 1),
        output_len=padded(trace.output_len, 1),
        limit_len=padded(trace.limit_len, 2),
        parts=padded(trace.parts if with_parts else trace.parts[:, :1], -1),
        found=padded(trace.cached_len, 0),
        tenant=padded(trace.tenant, 0),
        priority=padded(trace.priority, 0),
    )


class Books(NamedTuple):
    """What became of each request so far.

    Attributes:
        status: `PENDING`, `TAKEN` (it has an index), `DONE` or `REFUSED`.
        started, first, last: Ticks of its first step, first and newest token; −1 before.
        gap: Longest time between two tokens, in ticks.
        made: Tokens made.
        cached: Tokens of the prompt found at its first admission.
        preemptions: Times it gave its blocks up.
    """

    status: Int32[Array, " requests"]
    started: Int32[Array, " requests"]
    first: Int32[Array, " requests"]
    last: Int32[Array, " requests"]
    gap: Int32[Array, " requests"]
    made: Int32[Array, " requests"]
    cached: Int32[Array, " requests"]
    preemptions: Int32[Array, " requests"]


class Serving(NamedTuple):
    """What became so far of the request at each index; it goes to the `Books` when the request ends.

    Attributes:
        output_len: Tokens it is to make.
        started, first, last, gap, made, cached, preemptions: As in `Books`.
    """

    output_len: Int32[Array, " sequences"]
    started: Int32[Array, " sequences"]
    first: Int32[Array, " sequences"]
    last: Int32[Array, " sequences"]
    gap: Int32[Array, " sequences"]
    made: Int32[Array, " sequences"]
    cached: Int32[Array, " sequences"]
    preemptions: Int32[Array, " sequences"]


class World(NamedTuple):
    """Everything that a step of the simulation changes.

    Attributes:
        scheduler, cache: Their states.
        request: Request of each index of the state, −1 where it is free.
        ended: The request there has made its last token; the index is free once the scheduler knows.
        results: What the scheduler is still to be told, the oldest first.
        queue: Requests in order of their turn; entries from `num_offered` on mean nothing.
        num_offered, cursor: Requests in the queue, and how many of them were taken or refused.
        num_waiting: As the newest plan said.
        now: Clock, in ticks, and what is left of a tick.
        knobs: Settings of the scheduler that are values of the program, by name.
        serving: What becomes of the requests that have an index.
        books: What became of requests; of those that have not ended, as of the end of the program that ran last.
    """

    scheduler: Any
    cache: Any
    request: Int32[Array, " sequences"]
    ended: Bool[Array, " sequences"]
    results: tuple[StepResult, ...]
    queue: Int32[Array, " requests"]
    num_offered: Int32[Array, ""]
    cursor: Int32[Array, ""]
    num_waiting: Int32[Array, ""]
    now: Int32[Array, ""]
    rest: Float32[Array, ""]
    knobs: dict[str, Int32[Array, "..."]]
    serving: Serving
    books: Books


class StepLine(NamedTuple):
    """A step for the log of a simulation. Times in ticks; a step of 0 rows only waited.

    Attributes:
        start, end: Of the step.
        num_decodes, num_prefills, prefill_tokens, context_tokens, prefill_pairs: As in `octavo_core.records.StepRecord`.
        sampled: Tokens made.
        num_running, num_waiting, num_free_blocks: After planning; those without an index wait too.
        preempted: Request that gave up its blocks, or −1.
        lost: Tokens it has to compute again.
    """

    start: Int32[Array, "*steps"]
    end: Int32[Array, "*steps"]
    num_decodes: Int32[Array, "*steps"]
    num_prefills: Int32[Array, "*steps"]
    prefill_tokens: Int32[Array, "*steps"]
    context_tokens: Int32[Array, "*steps"]
    prefill_pairs: Float32[Array, "*steps"]
    sampled: Int32[Array, "*steps"]
    num_running: Int32[Array, "*steps"]
    num_waiting: Int32[Array, "*steps"]
    num_free_blocks: Int32[Array, "*steps"]
    preempted: Int32[Array, "*steps"]
    lost: Int32[Array, "*steps"]


_NEW: Final = {"started": -1, "first": -1, "last": -1}


def empty_books(count: int) -> Books:
    """Nothing happened yet."""

    def all_of(value: int) -> Int32[Array, " requests"]:
        return jnp.full(count, value, jnp.int32)

    return Books(**{name: all_of(_NEW.get(name, 0)) for name in Books._fields})


def nobody_served(sequences: int) -> Serving:
    """No index is taken."""
    return Serving(**{name: jnp.full(sequences, _NEW.get(name, 0), jnp.int32) for name in Serving._fields})


def newly_served(output_len: Int32[Array, " arrivals"]) -> Serving:
    """Requests that nothing became of yet."""
    like = jnp.zeros_like(output_len)
    return Serving(**{name: like + _NEW.get(name, 0) for name in Serving._fields})._replace(output_len=output_len)


_ALIASES: Final = {"sequence": -1}


def blank(kind: type[T], sizes: dict[str, int]) -> T:
    """A value of `octavo_core.plan` that says nothing, field by field: zeros of the annotated axes and dtype, −1 for sequences.

    By annotation, so that a field that a seam gains later is there too.
    """
    fields: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        shape = tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in hint.dim_str.split())
        fields[name] = jnp.full(shape, _ALIASES.get(name, 0), np.dtype(hint.dtypes[0]))
    return kind(**fields)


def blank_arrivals(max_arrivals: int, max_len: int) -> Arrivals:
    """Nobody arrives."""
    return blank(Arrivals, {"arrivals": max_arrivals, "max_len": max_len})


def blank_result(sequences: int) -> StepResult:
    """Nothing learnt."""
    return blank(StepResult, {"sequences": sequences, "draft_plus_one": 1})
