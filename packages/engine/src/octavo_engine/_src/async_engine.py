"""`AsyncEngine`: the step loop in a thread of its own, asyncio on the other side. Implements `octavo_core.seams.Engine`.

Who owns what: the loop thread alone touches the core. Callers put requests and aborts into `_inbox` and wake it; the thread hands
each turn's outputs to the callers' event loops in one call per loop. If a turn raises, the engine is dead: every stream ends with an error.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final

import msgspec

from octavo_core.errors import EngineDeadError, RequestError
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FinishReason, ModelCard
from octavo_engine._src.compose import SWITCH_INTERVAL_S, Built, Table, build
from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

IDLE_S: Final = 0.5


class _Stream(AsyncIterator[EngineOutput]):
    """The outputs of one request on their way to its reader; bounded by the request's own length.

    Ending it early, read or not, aborts the request.
    """

    def __init__(self, engine: AsyncEngine, request_id: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.outputs: deque[EngineOutput] = deque()
        self.news = asyncio.Event()
        self._engine, self._request_id = engine, request_id
        self._finished = False

    async def __anext__(self) -> EngineOutput:
        if self._finished:
            raise StopAsyncIteration
        while not self.outputs:
            await self.news.wait()
            self.news.clear()
        output = self.outputs.popleft()
        self._finished = output.finish_reason is not None
        if output.finish_reason is FinishReason.ERROR and self._engine.error is not None:
            raise EngineDeadError(self._engine.error)
        return output

    async def aclose(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        if not self._finished:
            self._finished = True
            self._engine.forget(self._request_id)
            await self._engine.abort(self._request_id)


class AsyncEngine:
    """A running engine. Make one with `start`."""

    def __init__(self, built: Built) -> None:
        self._built = built
        self.card: ModelCard = built.card
        self._core = built.core
        self._streams: dict[str, _Stream] = {}
        self._forgotten = Counter[str]()
        self._inbox: deque[EngineRequest | str] = deque()
        self._wake = threading.Event()
        self._closing = False
        self.error: str | None = None
        self._last_turn_s = time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="octavo-engine-core", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, config: EngineConfig) -> AsyncEngine:
        """Load, compile and start the step loop. Blocks until it is ready.

        Raises:
            ConfigError: For settings that cannot work.
            CheckpointError: For a model that cannot be read.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        return cls(build(config))

    def startup_table(self) -> Table:
        """What was chosen and why: (what, value, reason)."""
        return self._built.table

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs until the one with a finish reason; closing the iterator early aborts. See the seam."""
        async with aclosing(self.submit([request])[0]) as outputs:
            async for output in outputs:
                yield output

    def submit(self, requests: Sequence[EngineRequest]) -> list[_Stream]:
        """Queue all of these, or none; each iterator is `generate`'s. See the seam."""
        names = [request.request_id for request in requests]
        with self._lock:
            if self.error is not None:
                raise EngineDeadError(self.error)
            taken = next((name for i, name in enumerate(names) if name in self._streams or name in names[:i]), None)
            if taken is not None:
                raise RequestError(f"request id '{taken}' is in use; ids of live requests are unique")
            # One C call: the loop thread takes from the inbox meanwhile.
            queued = [item for item in tuple(self._inbox) if isinstance(item, EngineRequest)]
            self._core.check(list(requests), also_waiting=queued)
            streams = [_Stream(self, name) for name in names]
            self._streams.update(zip(names, streams, strict=True))
            self._inbox.extend(requests)
        self._wake.set()
        return streams

    def forget(self, request_id: str) -> None:
        """Nobody reads this request's outputs any more; what comes of it until its end is for no later request of that id."""
        with self._lock:
            if self._streams.pop(request_id, None) is not None:
                self._forgotten[request_id] += 1

    def _post(self, request_id: str) -> None:
        self._inbox.append(request_id)
        self._wake.set()

    async def abort(self, request_id: str) -> None:
        """End a request; its stream, if it is read, ends with `FinishReason.ABORT`."""
        self._post(request_id)

    def stats(self) -> EngineStats:
        """A reading of the step loop."""
        age = time.monotonic() - self._last_turn_s
        is_ready = self.error is None and not self._closing
        reading = self._core.stats()
        if self.error is not None:
            reading = msgspec.structs.replace(reading, num_running=0, num_waiting=0, kv_usage=0.0, kv_wasted_slots=0, kv_waste=0.0)
        return msgspec.structs.replace(
            reading, is_ready=is_ready, error=self.error, last_step_age_s=age, recompiles=self._built.compiles.count
        )

    def close(self) -> None:
        """Stop the step loop; streams that still run end with an error."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=30)
        self._built.close()

    # The loop thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._last_turn_s = time.monotonic()
                self._read_inbox()
                self._deliver(self._core.turn())
                if not self._core.has_work and not self._inbox:
                    self._built.logs.flush()
                    self._wake.wait(IDLE_S)
                    self._wake.clear()
            self._fail("the engine is shutting down")
        except Exception as error:
            logger.exception("the step loop ended")
            self._fail(f"the step loop ended: {type(error).__name__}: {error}")

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, EngineRequest):
                self._core.add(item)
            else:
                self._core.abort(item)

    def _fail(self, reason: str) -> None:
        """End every stream with an error, whatever state the core is in, and take no more."""
        with self._lock:
            self.error = reason
            self._forgotten.clear()
            names = list(self._streams)
        self._deliver([EngineOutput(request_id=name, finish_reason=FinishReason.ERROR, error=reason) for name in names])

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, EngineOutput]]] = {}
        with self._lock:
            readers = [self._reader_of(output) for output in outputs]
        for stream, output in zip(readers, outputs, strict=True):
            if stream is not None and not stream.loop.is_closed():
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, batch)
            except RuntimeError:  # the caller's loop has closed: nobody is left to tell
                logger.debug("%d outputs had no reader", len(batch))

    def _reader_of(self, output: EngineOutput) -> _Stream | None:
        name, ends = output.request_id, output.finish_reason is not None
        if name in self._forgotten:
            if ends:
                self._forgotten[name] -= 1
                if not self._forgotten[name]:
                    del self._forgotten[name]
            return None
        return self._streams.pop(name, None) if ends else self._streams.get(name)


def _hand_over(batch: list[tuple[_Stream, EngineOutput]]) -> None:
    for stream, output in batch:
        stream.outputs.append(output)
        stream.news.set()
