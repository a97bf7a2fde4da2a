"""The two logs an engine can keep, one JSON object per line, typed here so that tools and simulator read what the engine wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Arrived(msgspec.Struct, frozen=True, array_like=True):
    """A sequence handed to the scheduler: fields of `octavo_core.plan.Arrivals` without its tokens."""

    sequence: int
    prompt_len: int
    limit_len: int
    tenant: int
    priority: int
    deadline: int
    order: int
    use_prefix: bool


class PlanCall(msgspec.Struct, frozen=True, array_like=True):
    """What a scheduler was told before it planned.

    Attributes:
        number: Of the call, from 0.
        room: Blocks free or evictable then.
        arrived: Newcomers; None: `arrive` was not called.
        accepted, finished: Of `octavo_core.plan.StepResult`, a bit for each sequence.
        step_s, num_decodes, num_prefill_tokens: Of the same.
    """

    number: int
    room: int
    arrived: list[Arrived] | None
    accepted: bytes
    finished: bytes
    step_s: float
    num_decodes: int
    num_prefill_tokens: int


class Keyframe(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler as it stood before a call, without anybody's tokens.

    Attributes:
        call: Number of the call.
        config: The scheduler's settings.
        num_blocks, block_size, max_sequences, max_arrivals: Sizes around it.
        state: Bytes of each array of its state, by name.
    """

    call: int
    config: dict[str, Any]
    num_blocks: int
    block_size: int
    max_sequences: int
    max_arrivals: int
    state: dict[str, bytes]


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the engine (`--step-log`).

    Attributes:
        step: Number of the step, from 0.
        time_s: Seconds since the engine became ready, when the step was planned.
        num_decodes: Rows that continue with one token.
        num_prefills: Rows that compute part of a prompt.
        prefill_tokens: Prompt tokens in the step.
        context_tokens: KV tokens visible to all rows together.
        bucket_tokens, bucket_rows: The compiled shape that ran.
        device_s: Seconds until the step's tokens were on the host, from its start or from the end of the step before it.
        host_s: Seconds the device waited for the host: from the end of the step before it, where one ran, to its start.
        plan_s: Seconds of planning, hidden behind the step before it or part of `host_s`.
        output_s: Seconds of taking note of its tokens, hidden behind the step after it where one was dispatched.
        num_running, num_waiting, num_free_blocks: After planning.
        preempted: Request id of the sequence that gave up its blocks, or None.
        prefill_pairs: For each prompt token of the step, the tokens it sees, itself included: what attention of prompts costs.
        calls: What the scheduler was told since the step before, the last time for this one (flight recorder).
        found: Index and length of what the cache found for sequences that were let in (flight recorder).
        keyframe: Of one of the calls (flight recorder).
    """

    step: int
    time_s: float
    num_decodes: int
    num_prefills: int
    prefill_tokens: int
    context_tokens: int
    bucket_tokens: int
    bucket_rows: int
    device_s: float
    host_s: float
    plan_s: float
    output_s: float
    num_running: int
    num_waiting: int
    num_free_blocks: int
    preempted: str | None = None
    prefill_pairs: int = 0
    calls: list[PlanCall] | msgspec.UnsetType = msgspec.UNSET
    found: list[tuple[int, int]] | msgspec.UnsetType = msgspec.UNSET
    keyframe: Keyframe | msgspec.UnsetType = msgspec.UNSET


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence (`--request-log`). Times are seconds; `arrival_s` counts from the engine's start.

    Attributes:
        queue_s: Receipt until its first step.
        ttft_s: Receipt until its first token; None when it had none.
        e2e_s: Receipt until its end.
    """

    request_id: str
    arrival_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float
    preemptions: int
    finish_reason: str


def read_log(path: str | Path, record: type[T]) -> Iterator[T]:
    """Every record of a log, in order.

    Raises:
        msgspec.DecodeError: For a line that is not such a record.
    """
    decoder = msgspec.json.Decoder(record)
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield decoder.decode(line)
