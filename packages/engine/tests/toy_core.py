"""A core for processes, without a model: tokens count up from the prompt's last one. Built by dotted name in the core's process.

Some first tokens of a prompt do harm: `STUCK` never ends a step, `CRASH` raises, `MEMORY` runs out of memory, `EXIT` ends the process.
"""

import os
import threading
import time

from octavo_core.errors import CheckpointError, OverloadedError, RequestError
from octavo_core.records import StepRecord
from octavo_core.wire import EngineOutput, EngineStats, FinishReason, ModelCard

STUCK, CRASH, MEMORY, EXIT = 901, 902, 903, 904
VOCAB = 1000


class ToyCore:
    def __init__(self, recorder, delay_s, max_queued):
        self._recorder, self._delay_s, self._max_queued = recorder, delay_s, max_queued
        self._live, self._outbox, self._steps, self._tokens, self._prompt = {}, [], 0, 0, 0

    @property
    def has_work(self):
        return bool(self._live or self._outbox)

    def check(self, requests):
        for request in requests:
            if not request.prompt_ids or not all(0 <= token < VOCAB for token in request.prompt_ids):
                raise RequestError(f"token ids are 0 to {VOCAB - 1}", param="prompt")
        if len(self._live) + len(requests) > self._max_queued:
            raise OverloadedError(f"{len(self._live)} sequences are waiting", retry_after_s=3)

    def add(self, request):
        self._live[request.request_id] = [request, 0]
        self._prompt += len(request.prompt_ids)

    def abort(self, request_id):
        if self._live.pop(request_id, None):
            self._outbox.append(EngineOutput(request_id=request_id, finish_reason=FinishReason.ABORT))

    def turn(self):
        outputs, self._outbox = self._outbox, []
        if not self._live:
            return outputs
        time.sleep(self._delay_s)
        self._record()
        for name, entry in list(self._live.items()):
            request, count = entry
            self._harm(request.prompt_ids[0])
            token = (request.prompt_ids[-1] + count + 1) % VOCAB
            entry[1] += 1
            self._tokens += 1
            ends = entry[1] >= (request.sampling.max_tokens or 10**9)
            if ends:
                del self._live[name]
            outputs.append(
                EngineOutput(
                    request_id=name,
                    token_ids=[token],
                    finish_reason=FinishReason.LENGTH if ends else None,
                    queue_s=0.0 if count == 0 else None,
                )
            )
        return outputs

    def _harm(self, token):
        if token == STUCK:
            threading.Event().wait()
        if token == CRASH:
            raise ZeroDivisionError("the toy was told to crash")
        if token == MEMORY:
            raise MemoryError("the toy has no memory left")
        if token == EXIT:
            os._exit(3)

    def _record(self):
        fields = dict.fromkeys(("device_s", "host_s", "plan_s", "output_s", "time_s"), 0.0)
        fields |= dict.fromkeys(
            ("num_prefills", "prefill_tokens", "context_tokens", "bucket_tokens", "bucket_rows", "num_waiting", "num_free_blocks"),
            0,
        )
        count = len(self._live)
        self._recorder.step(StepRecord(step=self._steps, num_decodes=count, num_running=count, **fields))
        self._steps += 1

    def stats(self):
        return EngineStats(
            num_running=len(self._live),
            steps=self._steps,
            generation_tokens=self._tokens,
            prompt_tokens=self._prompt,
            block_size=16,
        )


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
    return Built(ToyCore(recorder, config["seed"] / 1000, config["max_num_queued_reqs"]), config["model"] or "")
