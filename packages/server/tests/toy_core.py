"""A core for processes, without a model: tokens count up from the prompt's last one. Built by dotted name in the core's process.

A prompt whose first token is `STUCK` never ends a step, one with `EXIT` ends the process.
"""

import os
import threading
import time

from octavo_core.errors import CheckpointError, OverloadedError
from octavo_core.wire import EngineOutput, EngineStats, FinishReason, ModelCard

STUCK, EXIT = 501, 502
VOCAB = 512


class ToyCore:
    def __init__(self, delay_s, max_queued):
        self._delay_s, self._max_queued = delay_s, max_queued
        self._live, self._outbox, self._steps, self._tokens = {}, [], 0, 0

    @property
    def has_work(self):
        return bool(self._live or self._outbox)

    def check(self, requests):
        if len(self._live) + len(requests) > self._max_queued:
            raise OverloadedError(f"{len(self._live)} sequences are waiting, at most {self._max_queued} may", retry_after_s=3)

    def add(self, request):
        self._live[request.request_id] = [request, 0]

    def abort(self, request_id):
        if self._live.pop(request_id, None):
            self._outbox.append(EngineOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    def turn(self):
        outputs, self._outbox = self._outbox, []
        if not self._live:
            return outputs
        time.sleep(self._delay_s)
        self._steps += 1
        for name, entry in list(self._live.items()):
            request, count = entry
            if request.prompt_ids[0] == STUCK:
                threading.Event().wait()
            if request.prompt_ids[0] == EXIT:
                os._exit(3)
            entry[1] += 1
            self._tokens += 1
            ends = entry[1] >= (request.sampling.max_tokens or 10**9)
            if ends:
                del self._live[name]
            token = (request.prompt_ids[-1] + count + 1) % 400
            reason = FinishReason.LENGTH if ends else None
            outputs.append(EngineOutput(request_id=name, token_ids=[token], finish_reason=reason, queue_s=None if count else 0.0))
        return outputs

    def stats(self):
        return EngineStats(num_running=len(self._live), steps=self._steps, generation_tokens=self._tokens, block_size=16)


class Built:
    recompiles = 0

    def __init__(self, core, root):
        self.core, self.table = core, [("engine", "toy", "asked for")]
        self.card = ModelCard(name="org/toy", root=root, max_model_len=4096, vocab_size=VOCAB)

    def audit(self):
        return []

    def flush(self):
        pass

    def close(self):
        pass


def build(config, recorder):
    """`seed` is the step's length in milliseconds, `max_num_queued_reqs` the bound; a `model` "broken" cannot be read."""
    if config["model"] == "broken":
        raise CheckpointError("the checkpoint is damaged")
    return Built(ToyCore(config["seed"] / 1000, config["max_num_queued_reqs"]), config["model"])
