"""The step log and the request log: JSON lines, typed in `octavo_core.records`. Touches the disk."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import IO

import msgspec
import numpy as np

from octavo_core.errors import ConfigError
from octavo_core.plan import StepPlan
from octavo_core.records import RequestRecord, StepRecord
from octavo_engine._src.process.flight import FlightRecorder
from octavo_engine._src.sequence import Sequence

logger = logging.getLogger(__name__)


class Logs:
    """Appends records to the files that were asked for.

    Args:
        step_log, request_log: Paths, or None for no such log.
        recorder: Told every step.

    Raises:
        ConfigError: When a file cannot be opened for writing.
    """

    def __init__(self, step_log: str | None, request_log: str | None, recorder: FlightRecorder | None = None) -> None:
        self.recorder = recorder
        self._encoder = msgspec.json.Encoder()
        self._steps = _open("--step-log", step_log)
        self._requests = _open("--request-log", request_log)

    @property
    def wants_steps(self) -> bool:
        """Steps are logged."""
        return self._steps is not None or self.recorder is not None

    def step(self, record: StepRecord) -> None:
        """Append a step."""
        if self.recorder is not None:
            self.recorder.step(record)
            record = msgspec.structs.replace(record, calls=msgspec.UNSET, found=msgspec.UNSET)
        self._steps = self._steps and self._append(self._steps, record)

    def request(self, sequence: Sequence, origin_s: float, now_s: float) -> None:
        """Append a finished sequence; times count from `origin_s`."""
        if self._requests is None:
            return
        began = sequence.arrival_s
        record = RequestRecord(
            request_id=sequence.request.request_id,
            arrival_s=began - origin_s,
            prompt_tokens=sequence.prompt_len,
            cached_tokens=sequence.cached_len,
            output_tokens=len(sequence.output),
            queue_s=None if sequence.started_s is None else sequence.started_s - began,
            ttft_s=None if sequence.first_token_s is None else sequence.first_token_s - began,
            e2e_s=now_s - began,
            preemptions=sequence.preemptions,
            finish_reason=str(sequence.finish),
        )
        self._requests = self._append(self._requests, record)

    def _append(self, file: IO[bytes] | None, record: StepRecord | RequestRecord) -> IO[bytes] | None:
        """The file to go on with: none once the disk refuses. A log is no reason to stop serving."""
        return file and _attempt(file, lambda: file.write(self._encoder.encode(record) + b"\n"))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._steps = self._steps and _attempt(self._steps, self._steps.flush)
        self._requests = self._requests and _attempt(self._requests, self._requests.flush)

    def close(self) -> None:
        """Flush and close; nothing is logged afterwards."""
        for file in (self._steps, self._requests):
            if file is not None:
                _attempt(file, file.close)
        self._steps = self._requests = None


def prefill_pairs(plan: StepPlan) -> int:
    """For each prompt token of a step, the tokens it sees, itself included."""
    if plan.num_single == plan.num_rows:
        return 0
    query = np.diff(plan.query_start)[int(plan.num_single) : int(plan.num_rows)].astype(np.int64)
    context = plan.context_len[int(plan.num_single) : int(plan.num_rows)]
    return int(np.sum(query * context - query * (query - 1) // 2))


def _attempt(file: IO[bytes], operation: Callable[[], object]) -> IO[bytes] | None:
    """The file, or None when the operation failed; it is closed then, and what it still held is lost."""
    try:
        operation()
    except OSError as error:
        logger.warning("the log %s ends here: %s", file.name, error)
        with contextlib.suppress(OSError):
            file.close()
        return None
    return file


def _open(flag: str, path: str | None) -> IO[bytes] | None:
    if path is None:
        return None
    try:
        return open(path, "ab")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from None
