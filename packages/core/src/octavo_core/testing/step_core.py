"""A core for the step loop of a process, without a model: tokens count up from the prompt's last one. Imports no jax.

Built in the core's process by its dotted name, `octavo_core.testing.step_core:build`. Everything around it is real: the process, its
frames, its supervisor. Some first tokens of a prompt do harm, to see what the others make of it: `STUCK` never ends a step, `CRASH`
raises, `MEMORY` runs out of memory, `EXIT` ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any, Final

from octavo_core.errors import CheckpointError, OverloadedError, RequestError
from octavo_core.ids import id_range
from octavo_core.records import StepRecord
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FinishReason, ModelCard

STUCK: Final = 501
CRASH: Final = 502
MEMORY: Final = 503
EXIT: Final = 504
VOCAB: Final = 512
NUM_TOKENS: Final = 400
"""Tokens it generates: 0 to one less."""
CONTEXT: Final = 4096
"""Tokens of prompt and answer, where the configuration does not say."""


class CountingCore:
    """The core itself.

    Args:
        recorder: Takes in a record of every step.
        step_s: What a step takes.
        max_queued: Sequences there may be; 0: any number.
        context: Tokens of prompt and answer, for a sequence that names no bound of its own.
    """

    def __init__(self, recorder: Any, step_s: float, max_queued: int, context: int) -> None:
        self._recorder, self._step_s, self._max_queued, self._context = recorder, step_s, max_queued, context
        self._live: dict[str, tuple[EngineRequest, int]] = {}
        self._outbox: list[EngineOutput] = []
        self._steps = self._generated = self._prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        """A turn would do something."""
        return bool(self._live or self._outbox)

    def check(self, requests: list[EngineRequest]) -> None:
        """Refuse tokens that are none, and more sequences than there may be."""
        for request in requests:
            low, high = id_range(request.prompt_ids) if request.prompt_ids else (-1, -1)
            if low < 0 or high >= VOCAB:
                raise RequestError(f"token ids are 0 to {VOCAB - 1}", param="prompt")
        if self._max_queued and len(self._live) + len(requests) > self._max_queued:
            raise OverloadedError(f"{len(self._live)} sequences are waiting, at most {self._max_queued} may", retry_after_s=3)

    def add(self, request: EngineRequest) -> None:
        """Queue a checked request; it runs from the next step on."""
        self._live[request.request_id] = (request, 0)
        self._prompt_tokens += len(request.prompt_ids)

    def abort(self, request_id: str) -> None:
        """End a request, if there is such a one."""
        if self._live.pop(request_id, None):
            self._outbox.append(EngineOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    def turn(self) -> list[EngineOutput]:
        """A token for everybody."""
        outputs, self._outbox = self._outbox, []
        if self._live:
            time.sleep(self._step_s)
            self._record()
            outputs += [self._next(*entry) for entry in list(self._live.values())]
        return outputs

    def _next(self, request: EngineRequest, count: int) -> EngineOutput:
        _harm(request.prompt_ids[0])
        self._generated += 1
        ends = count + 1 >= (request.sampling.max_tokens or self._context - len(request.prompt_ids))
        if ends:
            del self._live[request.request_id]
        else:
            self._live[request.request_id] = (request, count + 1)
        return EngineOutput(
            request_id=request.request_id,
            token_ids=[(request.prompt_ids[-1] + count + 1) % NUM_TOKENS],
            finish_reason=FinishReason.LENGTH if ends else None,
            queue_s=0.0 if count == 0 else None,
        )

    def _record(self) -> None:
        zeros: dict[str, Any] = dict.fromkeys(("device_s", "host_s", "plan_s", "output_s", "time_s"), 0.0)
        counts = (
            "num_prefills",
            "prefill_tokens",
            "context_tokens",
            "bucket_tokens",
            "bucket_rows",
            "num_waiting",
            "num_free_blocks",
        )
        zeros |= dict.fromkeys(counts, 0)
        self._recorder.step(StepRecord(step=self._steps, num_decodes=len(self._live), num_running=len(self._live), **zeros))
        self._steps += 1

    def stats(self) -> EngineStats:
        """Gauges and counters."""
        return EngineStats(
            num_running=len(self._live),
            steps=self._steps,
            generation_tokens=self._generated,
            prompt_tokens=self._prompt_tokens,
            block_size=16,
        )


def _harm(token: int) -> None:
    if token == STUCK:
        threading.Event().wait()
    if token == CRASH:
        raise ZeroDivisionError("the core was told to crash")
    if token == MEMORY:
        raise MemoryError("the core has no memory left")
    if token == EXIT:
        os._exit(3)


class BuiltCountingCore:
    """What is built."""

    recompiles = 0

    def __init__(self, core: CountingCore, root: str, context: int) -> None:
        self.core = core
        self.table = [("engine", "counts", "asked for")]
        self.card = ModelCard(name="org/toy", root=root, max_model_len=context, vocab_size=VOCAB)

    def audit(self) -> list[str]:
        """There is no cache."""
        return []

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is held."""


def _has(root: str | None, name: str) -> bool:
    return bool(root) and os.path.exists(os.path.join(str(root), name))


def build(config: dict[str, Any], recorder: Any) -> BuiltCountingCore:
    """Build the core of an engine's configuration.

    Args:
        config: `seed` is the step's length in milliseconds, `model` the folder of the tokenizer.
        recorder: The flight recorder.

    Raises:
        CheckpointError: `model` is "broken", or a folder where there is something of that name. A folder with "killed" is as bad as one
            that memory does not hold.
    """
    if config["model"] == "broken" or _has(config["model"], "broken"):
        raise CheckpointError("the checkpoint is damaged")
    if _has(config["model"], "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    context = config["max_model_len"] or CONTEXT
    core = CountingCore(recorder, config["seed"] / 1000, config["max_num_queued_reqs"], context)
    return BuiltCountingCore(core, config["model"] or "", context)
