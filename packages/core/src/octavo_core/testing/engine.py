"""The smallest legal `Engine`, and the conformance suite of the seam.

Size: the suite reads best beside the engine that passes it.

`ToyEngine` has no model: its logits are a pseudo-random function of the last three tokens. Everything else is real: sampling
parameters, scores, queue, abort, counters, a prefix memory that reports cached tokens. Imports numpy, and no jax, so that
frontends can be tested without it.

`ENGINE_CHECKS` are coroutines `check(engine, prompt_ids)`; each holds for every engine, whatever its weights.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np

from octavo_core.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from octavo_core.keys import block_keys
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FinishReason, ModelCard, SamplingParams, TokenLogprobs

_BLOCK = 16
_SCRIPT_LOGIT = 60.0


class ToyEngine:
    """An engine over pseudo-random logits.

    Args:
        card: The model it pretends to be.
        script: Tokens it prefers above all others, position by position, then again from the first; empty for none.
        delay_s: Time from one token to the next.
        max_running: Sequences generated at once; the others wait.
        max_waiting: Sequences that may wait; one more is an `OverloadedError`.
        fail_at: Number of tokens after which every sequence ends with `FinishReason.ERROR`; None: never.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        script: Sequence[int] = (),
        delay_s: float = 0.0,
        max_running: int = 256,
        max_waiting: int = 4096,
        fail_at: int | None = None,
    ) -> None:
        self.card = card
        self.error: str | None = None
        self._script, self._delay_s, self._fail_at = list(script), delay_s, fail_at
        self._max_running, self._max_waiting = max_running, max_waiting
        self._live: dict[str, bool] = {}
        self._unread: set[str] = set()
        self._running = 0
        self._blocks: set[bytes] = set()
        self._counters = dict.fromkeys(
            ("steps", "prompt_tokens", "generation_tokens", "prefix_queries_tokens", "prefix_hits_tokens"), 0
        )

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen, its value and why."""
        return [("engine", "toy", "asked for")]

    def close(self) -> None:
        """End the engine: nothing is served afterwards."""
        self.error = "the engine was closed"

    def stats(self) -> EngineStats:
        """A reading of the counters."""
        waiting = len(self._live) - self._running
        return EngineStats(
            is_ready=self.error is None,
            error=self.error,
            num_running=self._running,
            num_waiting=waiting,
            block_size=_BLOCK,
            **self._counters,
        )

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored. One whose outputs nobody has begun to read is forgotten at once."""
        if request_id in self._unread:
            self._unread.discard(request_id)
            del self._live[request_id]
        elif request_id in self._live:
            self._live[request_id] = True

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """One output per token."""
        async with aclosing(self.submit([request])[0]) as outputs:
            async for output in outputs:
                yield output

    def submit(self, requests: Sequence[EngineRequest]) -> list[AsyncGenerator[EngineOutput, None]]:
        """Queue all or none."""
        for request in requests:
            self._refuse(request, len(requests))
        names = [request.request_id for request in requests]
        self._live |= dict.fromkeys(names, False)
        self._unread |= set(names)
        return [self._outputs(request) for request in requests]

    async def _outputs(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        aborted = EngineOutput(request_id=request.request_id, finish_reason=FinishReason.ABORT)
        if request.request_id not in self._unread:
            yield aborted
            return
        self._unread.discard(request.request_id)
        try:
            async with self._turn(request.request_id) as is_running:
                if not is_running:
                    yield aborted
                    return
                async with aclosing(self._tokens(request)) as outputs:
                    async for output in outputs:
                        yield output
        finally:
            del self._live[request.request_id]

    def _refuse(self, request: EngineRequest, count: int) -> None:
        if self.error is not None:
            raise EngineDeadError(self.error)
        ids, limit = request.prompt_ids, self.card.max_model_len
        if not ids:
            raise RequestError("wanted at least one prompt token, got none", param="prompt")
        if min(ids) < 0 or max(ids) >= self.card.vocab_size:
            raise RequestError(f"token ids are in [0, {self.card.vocab_size}), got {min(ids)}..{max(ids)}", param="prompt")
        if len(ids) + (request.sampling.max_tokens or 1) > limit:
            raise ContextLengthError(f"prompt and answer have at most {limit} tokens, the prompt has {len(ids)}", param="prompt")
        if len(self._live) - self._running + count > self._max_waiting:
            raise OverloadedError(f"at most {self._max_waiting} sequences wait, and so many do; try again later")

    @asynccontextmanager
    async def _turn(self, request_id: str) -> AsyncIterator[bool]:
        """Wait to be among the running; False when aborted before."""
        while self._running >= self._max_running and not self._live[request_id]:
            await asyncio.sleep(0.001)
        if self._live[request_id]:
            yield False
            return
        self._running += 1
        try:
            yield True
        finally:
            self._running -= 1

    async def _tokens(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        sampling, prompt = request.sampling, request.prompt_ids
        cached = self._match(request)
        scores = _prompt_scores(self, prompt, sampling.prompt_logprobs) if sampling.prompt_logprobs is not None else None
        ids = list(prompt)
        seed = sampling.seed if sampling.seed is not None else time.perf_counter_ns()
        limit = min(sampling.max_tokens or self.card.max_model_len, self.card.max_model_len - len(prompt))
        for position in range(limit):
            await asyncio.sleep(self._delay_s)
            token, entry = _choose(self, ids, len(prompt), sampling, seed)
            ids.append(token)
            self._counters["generation_tokens"] += 1
            self._counters["steps"] += 1
            reason, stop = self._end(request, token, position + 1, limit)
            yield EngineOutput(
                request_id=request.request_id,
                token_ids=[token],
                logprobs=[entry] if entry is not None else None,
                prompt_logprobs=scores if position == 0 else None,
                finish_reason=reason,
                stop_token_id=stop,
                num_cached_tokens=cached,
                queue_s=0.0 if position == 0 else None,
                error="the toy was told to fail" if reason is FinishReason.ERROR else None,
            )
            if reason is not None:
                return

    def _end(self, request: EngineRequest, token: int, count: int, limit: int) -> tuple[FinishReason | None, int | None]:
        if self._live[request.request_id]:
            return FinishReason.ABORT, None
        if self.error is not None or (self._fail_at is not None and count >= self._fail_at):
            return FinishReason.ERROR, None
        if token in self._stops(request.sampling) and count > request.sampling.min_tokens:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if count >= limit else (None, None)

    def _stops(self, sampling: SamplingParams) -> set[int]:
        return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.card.eos_token_ids))

    def _match(self, request: EngineRequest) -> int:
        """Remember the prompt's full blocks; answer how many tokens were known, never the whole prompt."""
        keys = block_keys(request.prompt_ids, request.namespace, _BLOCK)
        known = 0
        while known < len(keys) and keys[known] in self._blocks:
            known += 1
        self._blocks.update(keys)
        hits = (
            0
            if request.sampling.prompt_logprobs is not None
            else min(known * _BLOCK, (len(request.prompt_ids) - 1) // _BLOCK * _BLOCK)
        )
        self._counters["prompt_tokens"] += len(request.prompt_ids)
        self._counters["prefix_queries_tokens"] += len(request.prompt_ids)
        self._counters["prefix_hits_tokens"] += hits
        return hits

    def logits(self, ids: Sequence[int], position: int | None = None) -> np.ndarray:
        """Scores after a token sequence; `position` counts generated tokens, None within a prompt."""
        generator = np.random.default_rng(zlib.crc32(np.asarray(ids[-3:], np.int64).tobytes()))
        scores = 2.0 * generator.standard_normal(self.card.vocab_size)
        if self._script and position is not None:
            scores[self._script[position % len(self._script)]] += _SCRIPT_LOGIT
        return scores


def _choose(
    engine: ToyEngine, ids: list[int], prompt_len: int, sampling: SamplingParams, seed: int
) -> tuple[int, TokenLogprobs | None]:
    position = len(ids) - prompt_len
    logits = engine.logits(ids, position)
    seen, counts = np.unique(np.asarray(ids[prompt_len:], np.int64), return_counts=True)
    logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    known = np.unique(np.asarray(ids, np.int64))
    logits[known] = np.where(
        logits[known] > 0, logits[known] / sampling.repetition_penalty, logits[known] * sampling.repetition_penalty
    )
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if position < sampling.min_tokens:
        logits[list(engine._stops(sampling))] = -np.inf
    token = _draw(logits, sampling, np.random.default_rng([seed % 2**64, position]))
    return token, None if sampling.logprobs is None else _score(logits, token, sampling.logprobs)


def _draw(logits: np.ndarray, sampling: SamplingParams, generator: np.random.Generator) -> int:
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    scaled = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
    probs = scaled / scaled.sum()
    keep = (np.cumsum(probs) - probs < sampling.top_p) & (probs >= sampling.min_p * probs[0])
    if sampling.top_k > 0:
        keep[sampling.top_k :] = False
    probs = np.where(keep, probs, 0.0)
    return int(order[generator.choice(len(order), p=probs / probs.sum())])


def _score(logits: np.ndarray, token: int, num_top: int) -> TokenLogprobs:
    logprobs = logits - logits.max()
    logprobs = logprobs - np.log(np.exp(logprobs).sum())
    top = np.argsort(-logprobs, kind="stable")[:num_top]
    rank = 1 + int((logprobs > logprobs[token]).sum())
    return TokenLogprobs(token, float(logprobs[token]), rank, top.tolist(), logprobs[top].tolist())


def _prompt_scores(engine: ToyEngine, prompt: Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    return [None, *(_score(engine.logits(prompt[:i]), prompt[i], num_top) for i in range(1, len(prompt)))]


async def collect(engine: Any, request: EngineRequest) -> list[EngineOutput]:
    """Every output of a request; stops early at nothing."""
    async with aclosing(engine.generate(request)) as outputs:
        return [output async for output in outputs]


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    """The generated tokens of some outputs, joined."""
    return [token for output in outputs for token in output.token_ids]


def _request(name: str, prompt_ids: Sequence[int], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling})
    return EngineRequest(request_id=f"conformance-{name}", prompt_ids=list(prompt_ids), sampling=params)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise AssertionError(sentence)


async def _require_idle(engine: Any, timeout_s: float = PATIENCE_S) -> None:
    """Wait until nothing runs and nothing waits."""
    deadline = time.monotonic() + timeout_s
    while (stats := engine.stats()).num_running or stats.num_waiting:
        _require(time.monotonic() < deadline, f"still busy {timeout_s} s after the last request ended: {stats}")
        await asyncio.sleep(0.01)


async def check_ends_once_and_last(engine: Any, prompt_ids: Sequence[int]) -> None:
    """`max_tokens` tokens come, and exactly the last output has a finish reason."""
    for count in (1, 2, 7):
        outputs = await collect(engine, _request("length", prompt_ids, max_tokens=count))
        reasons = [output.finish_reason for output in outputs]
        _require(reasons == [None] * (len(outputs) - 1) + [FinishReason.LENGTH], f"max_tokens={count}: finish reasons {reasons}")
        _require(len(tokens_of(outputs)) == count, f"max_tokens={count}: {len(tokens_of(outputs))} tokens")
    await _require_idle(engine)


async def check_greedy_and_seeded_repeat(engine: Any, prompt_ids: Sequence[int]) -> None:
    """Greedy and seeded requests repeat; alone and among others alike."""
    for params in ({}, {"temperature": 1.0, "seed": 7}):
        alone = tokens_of(await collect(engine, _request("alone", prompt_ids, **params)))
        many = await asyncio.gather(*(collect(engine, _request(f"batch-{i}", prompt_ids, **params)) for i in range(4)))
        for outputs in many:
            _require(tokens_of(outputs) == alone, f"{params}: {tokens_of(outputs)} in a batch, {alone} alone")


async def check_closing_frees(engine: Any, prompt_ids: Sequence[int]) -> None:
    """Closing the iterator, or cancelling its reader, ends the request."""
    async with aclosing(engine.generate(_request("closed", prompt_ids, max_tokens=200))) as outputs:
        await anext(outputs)
    task = asyncio.create_task(collect(engine, _request("cancelled", prompt_ids, max_tokens=200)))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await _require_idle(engine)


async def check_abort_ends_the_stream(engine: Any, prompt_ids: Sequence[int]) -> None:
    """An aborted request's stream ends with ABORT; unknown ids are ignored."""
    await engine.abort("conformance-nobody")
    request = _request("aborted", prompt_ids, max_tokens=200)
    reasons = []
    async with aclosing(engine.generate(request)) as outputs:
        async for output in outputs:
            reasons.append(output.finish_reason)
            await engine.abort(request.request_id)
    _require(reasons[-1:] == [FinishReason.ABORT], f"the stream ended with {reasons[-1:]}")
    await _require_idle(engine)


async def check_stop_tokens(engine: Any, prompt_ids: Sequence[int]) -> None:
    """A stop token ends the sequence, is included and named; `min_tokens` keeps it from being sampled."""
    tokens = tokens_of(await collect(engine, _request("free", prompt_ids)))
    stop, at = tokens[-1], tokens.index(tokens[-1])
    outputs = await collect(engine, _request("stop", prompt_ids, stop_token_ids=(stop,)))
    _require(tokens_of(outputs) == tokens[: at + 1], f"{tokens_of(outputs)} is not {tokens[: at + 1]}")
    _require(outputs[-1].finish_reason is FinishReason.STOP and outputs[-1].stop_token_id == stop, f"ended with {outputs[-1]}")
    late = tokens_of(await collect(engine, _request("late", prompt_ids, stop_token_ids=(stop,), min_tokens=8)))
    _require(stop not in late and len(late) == 8, f"min_tokens=8 gave {late} with stop token {stop}")


async def check_logprobs(engine: Any, prompt_ids: Sequence[int]) -> None:
    """One entry per token, best first, the greedy token on top; none unless asked for."""
    for output in await collect(engine, _request("unscored", prompt_ids)):
        _require(output.logprobs is None, "scores without asking")
    for num_top in (0, 3):
        outputs = await collect(engine, _request("scored", prompt_ids, logprobs=num_top))
        entries = [entry for output in outputs for entry in output.logprobs or []]
        _require([entry.token_id for entry in entries] == tokens_of(outputs), "entries do not name the tokens")
        for entry in entries:
            _require(len(entry.top_ids) == len(entry.top_logprobs) == num_top, f"asked for {num_top}, got {entry}")
            _require(sorted(entry.top_logprobs, reverse=True) == entry.top_logprobs, f"not best first: {entry}")
            _require(entry.logprob <= 1e-6 and entry.rank == 1, f"a greedy token has rank 1: {entry}")


async def check_prompt_logprobs(engine: Any, prompt_ids: Sequence[int]) -> None:
    """One score per prompt token but the first, also when the prompt is cached; the same each time."""
    await collect(engine, _request("warm", prompt_ids))
    runs = [await collect(engine, _request(f"prompt-{i}", prompt_ids, prompt_logprobs=1)) for i in range(2)]
    for outputs in runs:
        scores = outputs[0].prompt_logprobs
        _require(scores is not None and len(scores) == len(prompt_ids), "wanted one entry per prompt token with the first output")
        named = [entry and entry.token_id for entry in scores or []]
        _require(named == [None, *list(prompt_ids)[1:]], f"entries name {named}, the prompt is {prompt_ids}")
        _require(all(output.prompt_logprobs is None for output in outputs[1:]), "prompt scores came twice")
    first, second = ([entry.logprob for entry in outputs[0].prompt_logprobs or [] if entry] for outputs in runs)
    _require(np.allclose(first, second, atol=1e-3), f"scores differ between runs: {first} {second}")


async def check_bad_requests_are_refused(engine: Any, prompt_ids: Sequence[int]) -> None:
    """An empty prompt and ids outside the vocabulary raise `RequestError`, and later requests are served."""
    for bad in ([], [-1], [2**31 - 1]):
        try:
            await collect(engine, _request("bad", bad))
        except RequestError:
            continue
        raise AssertionError(f"prompt {bad} was served")
    _require(
        len(tokens_of(await collect(engine, _request("good", prompt_ids)))) == 8, "a good request after bad ones was not served"
    )


async def check_submit_queues_all_or_none(engine: Any, prompt_ids: Sequence[int]) -> None:
    """Of several sequences one of which is wrong none is run; of right ones each has its own outputs."""
    good = [_request(f"group-{i}", prompt_ids) for i in range(3)]
    try:
        for outputs in engine.submit([*good, _request("group-bad", [])]):
            [output async for output in outputs]
    except RequestError:
        pass
    else:
        raise AssertionError("a group with an empty prompt was served")
    await _require_idle(engine)
    alone = tokens_of(await collect(engine, good[0]))
    for outputs in engine.submit(good):
        _require(tokens_of([output async for output in outputs]) == alone, "a sequence of a group has other tokens than alone")
    for request in [_request(f"unread-{i}", prompt_ids, max_tokens=200) for i in range(2)]:
        engine.submit([request])
        await engine.abort(request.request_id)
    await _require_idle(engine)


async def check_counters(engine: Any, prompt_ids: Sequence[int]) -> None:
    """A ready engine says so, and its counters rise by what was served."""
    await _require_idle(engine)
    before = engine.stats()
    await collect(engine, _request("counted", prompt_ids))
    await _require_idle(engine)
    after = engine.stats()
    _require(after.is_ready and after.error is None, f"not ready: {after}")
    _require(after.generation_tokens - before.generation_tokens >= 8, f"8 tokens came, counted {after} after {before}")
    _require(
        after.prompt_tokens - before.prompt_tokens >= len(prompt_ids), f"{len(prompt_ids)} prompt tokens, {after} after {before}"
    )


ENGINE_CHECKS: tuple[Callable[[Any, Sequence[int]], Awaitable[None]], ...] = (
    check_ends_once_and_last,
    check_greedy_and_seeded_repeat,
    check_closing_frees,
    check_abort_ends_the_stream,
    check_stop_tokens,
    check_logprobs,
    check_prompt_logprobs,
    check_bad_requests_are_refused,
    check_submit_queues_all_or_none,
    check_counters,
)
"""The conformance suite: `for check in ENGINE_CHECKS: await check(engine, prompt_ids)`."""
