"""What completions and chat answers have in common: identity, usage, and the choices of a request as engine sequences.

An endpoint is a `Format`: it turns deltas into chunk choices and joined deltas into final choices. Plain answers are made by
joining the very deltas a stream would have sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo_core.errors import RequestError
from octavo_core.keys import namespace_of
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_server._src.assemble import Choice, Delta, assemble, merge
from octavo_server._src.fields import Generation
from octavo_server._src.prompts import Prompt, check_length
from octavo_server._src.sse import send_events
from octavo_server._src.state import Served, ServerState
from octavo_server._src.text import Text, TextStream

MAX_SEQUENCES = 1024


@dataclasses.dataclass(frozen=True)
class Call:
    """One HTTP request: who asks, when it came."""

    request_id: str
    key: int | None
    arrival_s: float

    @classmethod
    def of(cls, scope: Scope) -> Call:
        """What the middleware left in the scope."""
        state = scope.get("state", {})
        return cls(state.get("request_id") or uuid.uuid4().hex, state.get("key"), time.monotonic())


@runtime_checkable
class Format(Protocol):
    """How one endpoint writes its answers."""

    prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """A chunk choice before anything else, if the endpoint has one."""

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunk choices for a delta."""

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The final choice for all deltas of one choice joined."""

    def envelope(self, whole: Sequence[Delta]) -> dict[str, Any]:
        """Fields of the final answer beside the common ones."""


class Usage:
    """Counts tokens of a request as its deltas come. A prompt counts once, however many choices it has."""

    def __init__(self, prompts: Sequence[Prompt], n: int) -> None:
        self._prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._n = n
        self._cached: list[int | None] = [None] * len(prompts)
        self._completion_tokens = 0

    def take(self, index: int, delta: Delta) -> None:
        """Count a delta of a choice; of a prompt's choices the one with the least from the cache tells."""
        self._completion_tokens += len(delta.token_ids)
        if delta.cached_tokens is not None:
            known = self._cached[index // self._n]
            self._cached[index // self._n] = delta.cached_tokens if known is None else min(known, delta.cached_tokens)

    def read(self) -> dict[str, Any]:
        """The usage object so far."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(count or 0 for count in self._cached)},
        }


@dataclasses.dataclass(frozen=True)
class Job:
    """A validated request: its prompts, how to sample, and how to write the answer."""

    request: Generation
    prompts: list[Prompt]
    sampling: SamplingParams
    format: Format
    drops_generated: bool = False


def check_prompts(prompts: Sequence[Prompt], served: Served, n: int, max_tokens: int | None, *, param: str) -> None:
    """Refuse too many sequences, and prompts that do not fit with the tokens asked for."""
    if len(prompts) * n > MAX_SEQUENCES:
        raise RequestError(f"prompts times n is at most {MAX_SEQUENCES}, got {len(prompts)} times {n}", param="n")
    for prompt in prompts:
        check_length(len(prompt.ids), max_tokens, served.card, param=param)


def choices_of(state: ServerState, call: Call, served: Served, job: Job) -> list[Choice]:
    """The sequences of a request, prompt by prompt, each with an id of its own; seeds rise with the choice."""
    request, sampling = job.request, job.sampling
    entry = None if call.key is None else state.keys.entries[call.key]
    namespace = namespace_of("" if entry is None else entry.own_tenant, request.cache_salt or "")
    root = uuid.uuid4().hex
    choices = []
    for index in range(len(job.prompts) * request.n):
        prompt = job.prompts[index // request.n]
        seed = sampling.seed if sampling.seed is None else _wrapped(sampling.seed + index % request.n)
        engine_request = EngineRequest(
            request_id=f"{root}-{index}",
            prompt_ids=prompt.ids,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            namespace=namespace,
            tenant=0 if entry is None else entry.quota,
            priority=request.priority if entry is None else entry.clamp(request.priority),
            deadline_s=None if request.deadline_ms is None else request.deadline_ms / 1e3,
            arrival_s=call.arrival_s,
        )
        choices.append(Choice(engine_request, _text_stream(served.text, request)))
    return choices


def _wrapped(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def _text_stream(text: Text | None, request: Generation) -> TextStream | None:
    if text is None:
        if request.stop:
            raise RequestError("stop strings need a tokenizer (--skip-tokenizer-init is on); use stop_token_ids", param="stop")
        return None
    return TextStream(
        text.tokenizer,
        stops=request.stop,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
    )


async def answer(
    state: ServerState, served: Served, call: Call, job: Job, receive_scope: Scope, receive: Receive, send: Send
) -> None:
    """Generate and send, streamed or plain."""
    head = {"id": f"{job.format.prefix}-{call.request_id}", "created": int(time.time()), "model": _name(served, job.request)}
    deltas = _deltas(state, served, call, job)
    usage = Usage(job.prompts, job.request.n)
    if job.request.stream:
        return await send_events(send, _events(head, job, deltas, usage))
    body = await _whole(head, job, deltas, usage)
    await Response(msgspec.json.encode(body), media_type="application/json")(receive_scope, receive, send)


def _name(served: Served, request: Generation) -> str:
    return request.model if request.model is not None else served.names[0]


async def _deltas(state: ServerState, served: Served, call: Call, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    choices = choices_of(state, call, served, job)
    if call.key is not None:
        state.quotas.spend(call.key, sum(len(prompt.ids) for prompt in job.prompts))
    promised = served.engine.submit([choice.request for choice in choices])
    streams = [assemble(state, served, *pair) for pair in zip(choices, promised, strict=True)]
    try:
        async with aclosing(merge(streams)) as merged:
            async for index, delta in merged:
                if call.key is not None:
                    state.quotas.spend(call.key, len(delta.token_ids))
                yield index, _without_generated(delta) if job.drops_generated else delta
    finally:
        for outputs in promised:  # those of streams that nobody began to read, too
            await asyncio.shield(outputs.aclose())  # type: ignore[attr-defined]


def _without_generated(delta: Delta) -> Delta:
    """For `max_tokens=0`: the engine makes at least one token, the client asked for none."""
    reason = "length" if delta.finish_reason is not None else None
    entries: list[Any] | None = None if delta.entries is None else []
    return dataclasses.replace(delta, text="", token_ids=[], entries=entries, finish_reason=reason, stop_reason=None)


async def _events(
    head: dict[str, Any], job: Job, deltas: AsyncGenerator[tuple[int, Delta], None], usage: Usage
) -> AsyncGenerator[dict[str, Any], None]:
    options = job.request.stream_options
    told, continuous = (options.include_usage, options.continuous_usage_stats) if options is not None else (False, False)
    head = {**head, "object": job.format.chunk_object}

    def chunk(choice: dict[str, Any]) -> dict[str, Any]:
        extra = {"usage": usage.read() if continuous else None} if told else {}
        return {**head, "choices": [choice], **extra}

    opened: set[int] = set()
    async with aclosing(deltas):
        async for index, delta in deltas:
            usage.take(index, delta)
            if index not in opened:
                opened.add(index)
                opening = job.format.opening(index)
                if opening is not None:
                    yield chunk(opening)
            for choice in job.format.chunks(index, delta):
                yield chunk(choice)
    if told:
        yield {**head, "choices": [], "usage": usage.read()}


async def _whole(head: dict[str, Any], job: Job, deltas: AsyncGenerator[tuple[int, Delta], None], usage: Usage) -> dict[str, Any]:
    joined: dict[int, list[Delta]] = {}
    async with aclosing(deltas):
        async for index, delta in deltas:
            usage.take(index, delta)
            joined.setdefault(index, []).append(delta)
    whole = [join(joined[index]) for index in sorted(joined)]
    choices = [job.format.choice(index, delta) for index, delta in enumerate(whole)]
    extra = job.format.envelope(whole)
    return {**head, "object": job.format.object, "choices": choices, "usage": usage.read(), "system_fingerprint": None, **extra}


def join(deltas: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    scored = [delta.entries for delta in deltas if delta.entries is not None]
    return Delta(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        entries=[entry for entries in scored for entry in entries] if scored else None,
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        prompt_scores=deltas[0].prompt_scores,
        cached_tokens=deltas[0].cached_tokens,
    )
