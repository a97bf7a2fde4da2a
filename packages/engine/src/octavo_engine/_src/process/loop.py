"""The step loop of a core process, and the thread that reports on it. Does nothing that could wait for a frontend."""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
import zmq

from octavo_core.wire import EngineOutput, EngineStats, FinishReason, ModelCard
from octavo_engine._src.process import messages
from octavo_engine._src.process.awake import AwakeClock
from octavo_engine._src.process.hub import Hub, StepCore

IDLE_S: Final = 0.25
TELL_S: Final = 0.05
"""Readings go out at most this often while steps run; whenever a sequence ends in any case."""
REPORT_S: Final = 0.25
LAST_WORD_S: Final = 30.0
"""How long a core that cannot go on waits for its reason to be heard: on a busy machine that takes a while."""


@runtime_checkable
class BuiltCore(Protocol):
    """A core that is ready, and what is worth telling about it."""

    core: StepCore
    card: ModelCard
    table: messages.Table

    @property
    def recompiles(self) -> int:
        """Compilations since it became ready."""

    def audit(self) -> list[str]:
        """What is wrong with the cache's books, once nothing runs."""

    def flush(self) -> None:
        """Nothing is to do: write down what waits."""

    def close(self) -> None:
        """End."""


class CoreLoop:
    """Turns a core until told to stop.

    Args:
        built: The core.
        hub: Its frontends.
    """

    def __init__(self, built: BuiltCore, hub: Hub) -> None:
        self._built, self._core, self._hub = built, built.core, hub
        self.stopping = False
        self.turns = 0
        self._told_s = 0.0

    def run(self) -> None:
        """Until `stopping`. What was running then ends with an error.

        Raises:
            Exception: What a turn raised. Nothing can be trusted after it.
        """
        while not self.stopping:
            self.turns += 1
            self._hub.take_in()
            outputs = self._core.turn()
            now_s = time.monotonic()
            if now_s - self._told_s >= TELL_S or any(output.finish_reason is not None for output in outputs):
                self._told_s = now_s
                self._hub.tell(self.stats())
            if outputs:
                self._hub.hand_out(outputs, self.turns)
            self._hub.flush()
            if not self._core.has_work:
                self._built.flush()
                self._hub.sleep(IDLE_S)
        self._hub.take_in()

    def stats(self) -> EngineStats:
        """A reading of the loop."""
        return msgspec.structs.replace(
            self._core.stats(), is_ready=not self.stopping, last_step_age_s=0.0, recompiles=self._built.recompiles
        )


def ended(request_id: str, reason: str) -> EngineOutput:
    """The last word to a sequence that cannot go on."""
    return EngineOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=reason)


class Reporter:
    """Tells the supervisor several times a second that this process lives and how old the loop's last turn is."""

    def __init__(self, spec: messages.CoreSpec) -> None:
        self._generation = spec.generation
        self._context: Any = zmq.Context()
        self._endpoint = messages.report_endpoint(spec.folder)
        self._report = messages.Report(generation=spec.generation, phase=messages.Phase.STARTING)
        self._loop: CoreLoop | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-reporter", daemon=True)
        self._thread.start()

    def ready(self, built: BuiltCore, loop: CoreLoop) -> None:
        """The loop begins."""
        self._loop = loop
        self._say(messages.Phase.READY, card=built.card, table=built.table)

    def failed(self, error: BaseException) -> None:
        """The core cannot go on; returns once the supervisor has been told."""
        self._say(messages.Phase.FAILED, error=str(error), kind=type(error).__name__)
        self.close(wait_s=LAST_WORD_S)

    def _say(self, phase: messages.Phase, **fields: Any) -> None:
        self._report = messages.Report(generation=self._generation, phase=phase, **fields)
        self._wake.set()

    def close(self, wait_s: float = 2.0) -> None:
        """Send what is to be sent and end; wait so long for it."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout=wait_s)

    def _run(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.connect(self._endpoint)
        clock, seen, at_s = AwakeClock(), -1, 0.0
        while True:
            now_s = clock.tick()
            turns = self._loop.turns if self._loop is not None else -2
            if turns != seen:
                seen, at_s = turns, now_s
            age_s = now_s - at_s if self._loop is not None else 0.0
            socket.send(messages.encode(msgspec.structs.replace(self._report, age_s=age_s)))
            if self._is_closed:
                break
            self._wake.wait(REPORT_S)
            self._wake.clear()
        socket.close(linger=int(LAST_WORD_S * 1e3))
        self._context.term()
