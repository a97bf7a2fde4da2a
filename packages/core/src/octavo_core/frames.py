"""The layout of OUTPUT payloads: the outputs of one step as raw arrays, what few of them have in msgpack behind.

    counts      uint32[5]      outputs, tokens, scores, alternatives, bytes of extras
    handles     uint64[outputs]
    num_tokens, num_scores, num_cached   int32[outputs]     scores −1: none were asked for
    token_ids   int32[tokens]
    scores      int32[scores] token, float32[scores] logprob, int32[scores] rank, int32[scores] alternatives
    alternatives   int32[alternatives] token, float32[alternatives] logprob
    extras      msgpack {index: Extra}

Little-endian, for processes of one machine. Reading a payload checks every count before it is used. Log-probabilities are rounded
to float32, which is what an engine computes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from octavo_core.errors import ConfigError, FrameError
from octavo_core.wire import EngineOutput, FinishReason, TokenLogprobs

_COUNTS: Final = 5
_NONE: Final = -1
if sys.byteorder != "little":
    raise ConfigError("frames are little-endian, and so must the machine be; use --in-process on this one")


class Extra(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What few outputs have: an end, scores of the prompt (so many after the output's own; the first token has none)."""

    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    queue_s: float | None = None
    num_prompt_scores: int = _NONE


_EXTRAS = msgspec.msgpack.Decoder(dict[int, Extra])


def pack_outputs(outputs: Sequence[tuple[int, EngineOutput]]) -> bytes:
    """Outputs, each with the handle of its sequence, as one payload."""
    heads = [array("i") for _ in range(3)]
    scores = _Scores()
    tokens = array("i")
    extras: dict[int, Extra] = {}
    for index, (_, output) in enumerate(outputs):
        tokens.extend(output.token_ids)
        for head, value in zip(heads, (len(output.token_ids), scores.add(output.logprobs), output.num_cached_tokens), strict=True):
            head.append(value)
        if output.finish_reason is not None or output.prompt_logprobs is not None or output.queue_s is not None:
            wanted = scores.add(output.prompt_logprobs)
            extras[index] = Extra(output.finish_reason, output.stop_token_id, output.error, output.queue_s, wanted)
    more = msgspec.msgpack.encode(extras) if extras else b""
    counts = array("I", (len(outputs), len(tokens), len(scores.columns[0]), len(scores.columns[4]), len(more)))
    handles = array("Q", (handle for handle, _ in outputs))
    return b"".join((counts, handles, *heads, tokens, *scores.columns, more))


class _Scores:
    """Columns of scores: token, logprob, rank, number of alternatives; then those alternatives' tokens and logprobs."""

    def __init__(self) -> None:
        self.columns: tuple[array[Any], ...] = tuple(array(kind) for kind in "ifiiif")

    def add(self, entries: Sequence[TokenLogprobs | None] | None) -> int:
        if entries is None:
            return _NONE
        token, logprob, rank, num_top, top_ids, top_logprobs = self.columns
        for entry in entries:
            given = entry or TokenLogprobs(_NONE, 0.0, 0, [], [])
            token.append(given.token_id)
            logprob.append(given.logprob)
            rank.append(given.rank)
            num_top.append(len(given.top_ids))
            top_ids.extend(given.top_ids)
            top_logprobs.extend(given.top_logprobs)
        return len(entries)


def unpack_outputs(payload: bytes, name_of: Callable[[int], str]) -> list[tuple[int, EngineOutput]]:
    """The inverse of `pack_outputs`; `name_of` answers the request id of a handle.

    Raises:
        FrameError: The payload contradicts itself.
    """
    try:
        return list(_unpack(memoryview(payload), name_of))
    except (ValueError, IndexError, TypeError, OverflowError, msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"a frame of outputs does not decode: {error}") from None


def _unpack(view: memoryview, name_of: Callable[[int], str]) -> Iterator[tuple[int, EngineOutput]]:
    reader = _Reader(view)
    num_outputs, num_tokens, num_scores, num_top, num_extra = reader.take("I", _COUNTS)
    handles = reader.take("Q", num_outputs)
    lengths, scored, cached = (reader.take("i", num_outputs) for _ in range(3))
    tokens = reader.take("i", num_tokens)
    columns = [reader.take(kind, num_scores) for kind in "ifii"] + [reader.take(kind, num_top) for kind in "if"]
    more = reader.rest(num_extra)
    extras = _EXTRAS.decode(more) if num_extra else {}
    _check_sums(lengths, scored, extras, columns[3], num_tokens, num_scores, num_top)
    entries, at, none = _entries(columns), 0, Extra()
    for index, handle in enumerate(handles):
        extra = extras.get(index, none)
        taken = [next(entries) for _ in range(scored[index])] if scored[index] >= 0 else None
        prompt = [next(entries) for _ in range(extra.num_prompt_scores)] if extra.num_prompt_scores >= 0 else None
        output = EngineOutput(
            request_id=name_of(handle),
            token_ids=tokens[at : at + lengths[index]],
            logprobs=None if taken is None else [entry for entry in taken if entry is not None],
            prompt_logprobs=prompt,
            finish_reason=extra.finish_reason,
            stop_token_id=extra.stop_token_id,
            num_cached_tokens=cached[index],
            queue_s=extra.queue_s,
            error=extra.error,
        )
        at += lengths[index]
        yield handle, output


def _check_sums(
    lengths: list[int], scored: list[int], extras: dict[int, Extra], tops: list[int], num_tokens: int, num_scores: int, num_top: int
) -> None:
    if any(n < 0 for n in lengths) or any(n < 0 for n in tops) or any(n < _NONE for n in scored):
        raise ValueError("a negative count")
    if any(not 0 <= index < len(lengths) for index in extras):
        raise ValueError("an extra of no output")
    told = sum(n for n in scored if n > 0) + sum(e.num_prompt_scores for e in extras.values() if e.num_prompt_scores > 0)
    if (sum(lengths), told, sum(tops)) != (num_tokens, num_scores, num_top):
        raise ValueError("counts that do not add up")


def _entries(columns: list[list[Any]]) -> Iterator[TokenLogprobs | None]:
    token, logprob, rank, num_top, top_ids, top_logprobs = columns
    at = 0
    for i in range(len(token)):
        end = at + num_top[i]
        scores = TokenLogprobs(token[i], logprob[i], rank[i], top_ids[at:end], top_logprobs[at:end])
        yield None if token[i] == _NONE else scores
        at = end


class _Reader:
    """Takes arrays from the front of a payload."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def take(self, kind: str, count: int) -> list[Any]:
        end = self._at + count * array(kind).itemsize
        if end > len(self._view):
            raise ValueError(f"{len(self._view)} bytes where {end} are promised")
        part = self._view[self._at : end].cast(kind).tolist()  # type: ignore[call-overload]
        self._at = end
        return part

    def rest(self, count: int) -> memoryview:
        if self._at + count != len(self._view):
            raise ValueError(f"{len(self._view)} bytes where {self._at + count} are promised")
        return self._view[self._at :]
