"""From engine outputs to deltas of text: the one path that plain and streamed answers share.

Knows stop strings, whole characters and finish reasons; knows no endpoint and no JSON. Every way out of `assemble` (end, stop
string, error, cancellation) frees the sequence in the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from octavo_core.wire import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from octavo_server._src.metrics import SequenceTimer
from octavo_server._src.openai_errors import AbortedError, GenerationError
from octavo_server._src.state import Served, ServerState
from octavo_server._src.text import TextStream

_QUEUED_PER_SEQUENCE = 8
Entry = tuple[int, TokenLogprobs | None]
"""A token and its scores; None for the first token of a prompt, which has none."""


@dataclasses.dataclass(frozen=True)
class Delta:
    """News of one choice.

    Attributes:
        text: What may be shown now; a later delta never takes it back.
        token_ids: Tokens that came, shown or still held back.
        entries: Their scores, when asked for.
        finish_reason: `stop` or `length`, in the last delta and only there.
        stop_reason: The stop string or token that ended it.
        prompt_scores, cached_tokens: In the first delta.
    """

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    entries: list[Entry] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_scores: list[TokenLogprobs | None] | None = None
    cached_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """One sequence to generate: what the engine is asked, and how its tokens become text (None: not at all)."""

    request: EngineRequest
    text: TextStream | None


async def assemble(state: ServerState, served: Served, choice: Choice, outputs: Any) -> AsyncGenerator[Delta, None]:
    """The deltas of one sequence, from the outputs the engine promised for it.

    Raises:
        OctavoError: The engine refused the request or could not go on.
    """
    request = choice.request
    timer = SequenceTimer(state.metrics, request.arrival_s, len(request.prompt_ids))
    reason, is_first, has_ended = "abort", True, False
    state.live.add(request.request_id)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                has_ended = output.finish_reason is not None
                delta = _delta(choice, output)
                timer.token(len(delta.token_ids), queue_s=output.queue_s)
                if is_first:
                    delta = dataclasses.replace(delta, prompt_scores=output.prompt_logprobs, cached_tokens=output.num_cached_tokens)
                    is_first = False
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                    break
                yield delta
        if reason == "abort":
            raise GenerationError("the engine ended the sequence without saying why")
        yield delta
    except AbortedError:
        raise
    except Exception:
        reason = "error"
        raise
    finally:
        state.live.discard(request.request_id)
        timer.end(reason)
        if not has_ended:
            await asyncio.shield(served.engine.abort(request.request_id))


def _delta(choice: Choice, output: EngineOutput) -> Delta:
    """One output as a delta; what comes after a stop string is dropped."""
    if output.finish_reason is FinishReason.ERROR:
        raise GenerationError(output.error or "the engine could not go on with this request")
    if output.finish_reason is FinishReason.ABORT:
        raise AbortedError("the request was ended by the server before it was complete; send it again")
    reason = output.finish_reason.value if output.finish_reason is not None else None
    if choice.text is None:
        return Delta("", output.token_ids, _entries(output, len(output.token_ids)), reason, output.stop_token_id)
    shown = ""
    for count, token in enumerate(output.token_ids, 1):
        is_end = output.stop_token_id is not None and count == len(output.token_ids)
        text, matched = choice.text.push(token, is_end=is_end)
        shown += text
        if matched is not None:
            return Delta(shown, output.token_ids[:count], _entries(output, count), "stop", matched)
    if reason is not None:
        text, matched = choice.text.finish()
        shown += text
        if matched is not None:
            return Delta(shown, output.token_ids, _entries(output, len(output.token_ids)), "stop", matched)
    return Delta(shown, output.token_ids, _entries(output, len(output.token_ids)), reason, output.stop_token_id)


def _entries(output: EngineOutput, count: int) -> list[Entry] | None:
    return None if output.logprobs is None else [(entry.token_id, entry) for entry in output.logprobs[:count]]


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of several choices as they come, each with its choice's index. The first failure ends all.

    A slow reader fills a short queue, and then the choices wait.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(_QUEUED_PER_SEQUENCE * len(streams))
    pumps = [asyncio.ensure_future(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                num_open -= 1
            else:
                yield index, news
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[Delta, None], queue: asyncio.Queue[tuple[int, Delta | Exception | None]]
) -> None:
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put((index, delta))
        await queue.put((index, None))
    except Exception as error:
        await queue.put((index, error))
