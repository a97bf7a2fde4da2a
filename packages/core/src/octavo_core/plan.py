"""Values that cross the seams inside and around the jit: fixed shapes, integers and flags only, no Python objects.

Axes: `tokens` flat ragged tokens of a step, `rows` index in the step, `sequences` index of a token stream in the scheduler's
and the cache's state, `groups` KV groups, `arrivals` requests handed over at once, `max_blocks` × block size = `max_len`.
All are NamedTuples: jax flattens them without help, and they serialise without pickle (`to_bytes`).
"""

from __future__ import annotations

import typing
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from octavo_core.errors import FrameError

OK: Final = 0
OUT_OF_BLOCKS: Final = 1

T = TypeVar("T", bound=tuple)  # type: ignore[type-arg]


class Arrivals(NamedTuple):
    """New sequences for the scheduler.

    `sequence` names a free index of the state, chosen by the host; −1 marks an unused entry. `limit_len` is the most tokens of
    prompt and answer together. `order` rises with arrival; `priority` lower first; `deadline`: when the first token is due, in whatever
    ticks the host counts. `use_prefix` False: never match the cache (prompt scores are wanted).
    `tenant`: index of whose share of the pool and of the steps it counts against, 0 where nobody has one; a namespace belongs to one tenant.
    """

    sequence: Int32[Array, " arrivals"]
    tokens: Int32[Array, "arrivals max_len"]
    prompt_len: Int32[Array, " arrivals"]
    limit_len: Int32[Array, " arrivals"]
    namespace: UInt32[Array, "arrivals 2"]
    tenant: Int32[Array, " arrivals"]
    priority: Int32[Array, " arrivals"]
    deadline: Int32[Array, " arrivals"]
    order: Int32[Array, " arrivals"]
    use_prefix: Bool[Array, " arrivals"]


class StepResult(NamedTuple):
    """What the host has learnt since the last plan; the newest finished step, one or two steps late.

    `accepted` counts the leading `token_ids` that joined the sequence (0: not in that step, or dropped). `finished` ends a
    sequence for whatever reason (stop, length, abort) and frees what it holds within this step. `loaded` ends LOADING. `step_s`: seconds
    that step took with so many decode rows and prompt tokens; 0: not measured.
    """

    accepted: Int32[Array, " sequences"]
    token_ids: Int32[Array, "sequences draft_plus_one"]
    finished: Bool[Array, " sequences"]
    loaded: Bool[Array, " sequences"]
    step_s: Float32[Array, ""]
    num_decodes: Int32[Array, ""]
    num_prefill_tokens: Int32[Array, ""]


class Admitted(NamedTuple):
    """Answer of `PrefixCache.admit`: tokens found, and `OK` or `OUT_OF_BLOCKS` (nothing was leased then)."""

    cached_len: Int32[Array, " arrivals"]
    status: Int32[Array, " arrivals"]


class Loaded(NamedTuple):
    """A path of blocks made findable from outside: `num_found` of them were cached, `num_new` follow whose KV must be written. 0 pads.

    `sides` are the groups that keep the last few blocks only, in order: of each the blocks that are leased with the path, by column, and
    which of them are new, so that their KV must be written too. Where no group keeps every block, `block_ids` name nothing on the device.
    """

    block_ids: Int32[Array, " max_blocks"]
    generations: Int32[Array, " max_blocks"]
    num_found: Int32[Array, ""]
    num_new: Int32[Array, ""]
    side_ids: Int32[Array, "sides max_blocks"]
    side_generations: Int32[Array, "sides max_blocks"]
    side_new: Bool[Array, "sides max_blocks"]


class CacheEvents(NamedTuple):
    """What happened in the cache since the last `release`, and how full it is.

    `stored` lists (group, block id, generation, sequence, column): the full block `column` of that sequence's tokens can be found from
    now on; `removed` lists (group, block id, generation); −1 pads. `overflow`: some were left out, followers must resynchronise.
    `num_free` counts blocks on the free list, `num_evictable` cached blocks nobody leases.
    """

    stored: Int32[Array, "max_events 5"]
    removed: Int32[Array, "max_events 3"]
    overflow: Bool[Array, ""]
    num_free: Int32[Array, " groups"]
    num_evictable: Int32[Array, " groups"]


class StepPlan(NamedTuple):
    """One forward pass. Rows are compact: `num_rows` of them, those with one new token first.

    Attributes:
        token_ids: −1: the sequence's last sampled id, which is on the device.
        positions: Of each token in its sequence.
        row: Of each token; pads carry `rows`.
        query_start: First token of each row; rows beyond `num_rows` start at `num_tokens`.
        context_len: KV tokens visible after the step; 0 pads.
        block_table: Pads point at the reserved block 0.
        slot_mapping: `block_id * block_size + offset`; −1 pads.
        sample_rows: Flat index of the token whose output is sampled; −1: the row does not sample.
        copies: Blocks to copy before the step's tokens are written, (from, to), all read before any is written; −1 pads.
        sequence: Sequence of each row; −1 pads.
        cached_len: Tokens the row's sequence found in the cache when it was first admitted.
        num_tokens, num_rows, num_single: Live tokens, live rows, rows with exactly one new token (they come first).
        preempted: Sequence that gave up its blocks in this step, or −1.
        lost_len: Tokens whose KV it gave up; what it finds in the cache when it is admitted again need not be computed again.
        num_running, num_waiting: Sequences in each state after planning.
    """

    token_ids: Int32[Array, " tokens"]
    positions: Int32[Array, " tokens"]
    row: Int32[Array, " tokens"]
    query_start: Int32[Array, " rows_plus_one"]
    context_len: Int32[Array, " rows"]
    block_table: Int32[Array, "groups rows max_blocks"]
    slot_mapping: Int32[Array, "groups tokens"]
    sample_rows: Int32[Array, " rows"]
    copies: Int32[Array, "groups max_copies 2"]
    sequence: Int32[Array, " rows"]
    cached_len: Int32[Array, " rows"]
    num_tokens: Int32[Array, ""]
    num_rows: Int32[Array, ""]
    num_single: Int32[Array, ""]
    preempted: Int32[Array, ""]
    lost_len: Int32[Array, ""]
    num_running: Int32[Array, ""]
    num_waiting: Int32[Array, ""]
    events: CacheEvents


class SamplingArrivals(NamedTuple):
    """Sampling parameters of new sequences, for `Sampler.begin`; entries match those of `Arrivals`.

    `seed` is the 64-bit seed as two lanes. `bias_ids` and `stop_ids` pad with −1. Tokens in `stop_ids` are not sampled at positions below
    `min_len`. `top_k` ≤ 0 keeps all. `num_logprobs` −1: none wanted.
    """

    sequence: Int32[Array, " arrivals"]
    tokens: Int32[Array, "arrivals max_len"]
    prompt_len: Int32[Array, " arrivals"]
    temperature: Float32[Array, " arrivals"]
    top_k: Int32[Array, " arrivals"]
    top_p: Float32[Array, " arrivals"]
    min_p: Float32[Array, " arrivals"]
    presence_penalty: Float32[Array, " arrivals"]
    frequency_penalty: Float32[Array, " arrivals"]
    repetition_penalty: Float32[Array, " arrivals"]
    seed: UInt32[Array, "arrivals 2"]
    bias_ids: Int32[Array, "arrivals max_bias"]
    bias_values: Float32[Array, "arrivals max_bias"]
    stop_ids: Int32[Array, "arrivals max_stop"]
    min_len: Int32[Array, " arrivals"]
    num_logprobs: Int32[Array, " arrivals"]


class Sampled(NamedTuple):
    """The next token of each row with its scores; rank 1 is the most likely. Scores are 0 where no row wants them."""

    token_ids: Int32[Array, " rows"]
    logprob: Float32[Array, " rows"]
    rank: Int32[Array, " rows"]
    top_ids: Int32[Array, "rows max_logprobs"]
    top_logprobs: Float32[Array, "rows max_logprobs"]


def to_bytes(value: tuple[Any, ...]) -> bytes:
    """A value of this module, its arrays of JAX or NumPy, as msgpack: dtype, shape and little-endian bytes, in field order."""
    return msgspec.msgpack.encode(_pack(value))


def _pack(value: object) -> object:
    if isinstance(value, tuple):
        return [_pack(v) for v in value]
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"d": array.dtype.str, "s": array.shape, "b": array.tobytes()}


def from_bytes(kind: type[T], data: bytes) -> T:
    """The inverse of `to_bytes`, with read-only NumPy arrays.

    Raises:
        FrameError: When the bytes do not hold a `kind`: other fields, dtypes or ranks, or one axis with two sizes.
    """
    try:
        return _unpack(kind, msgspec.msgpack.decode(data), {})
    except (TypeError, ValueError, RecursionError, msgspec.DecodeError) as error:
        raise FrameError(f"bytes do not hold a {kind.__name__}: {error}") from None


def _unpack(kind: type[T], items: object, axes: dict[str, int]) -> T:
    """`axes` collects the size of every named axis seen so far."""
    hints = typing.get_type_hints(kind)
    if not isinstance(items, list) or len(items) != len(hints):
        raise ValueError(f"wanted the {len(hints)} fields of {kind.__name__}")
    values = []
    for (name, hint), item in zip(hints.items(), items, strict=True):
        is_nested = isinstance(hint, type) and issubclass(hint, tuple)
        values.append(_unpack(hint, item, axes) if is_nested else _array(name, hint, item, axes))
    return kind(*values)


def _array(name: str, hint: Any, item: object, axes: dict[str, int]) -> np.ndarray:
    dtype = np.dtype(hint.dtypes[0]).newbyteorder("<")
    if not isinstance(item, dict) or item.keys() != {"d", "s", "b"}:
        raise ValueError(f"{name}: wanted an array")
    dims, shape = hint.dim_str.split(), item["s"]
    if item["d"] != dtype.str or len(shape) != len(dims):
        raise ValueError(f"{name}: wanted {dtype.str} of rank {len(dims)}, got {item['d']} of shape {shape}")
    for dim, size in zip(dims, shape, strict=True):
        wanted = int(dim) if dim.isdigit() else axes.setdefault(dim, size)
        if size != wanted or not size >= 0:
            raise ValueError(f"{name}: axis '{dim}' is {wanted}, got {size}")
    return np.frombuffer(item["b"], dtype).reshape(shape)
