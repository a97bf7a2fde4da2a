"""What frontend and engine core say to each other: one frame header and a few typed messages.

Knows bytes; knows no transport. In one process the messages travel as objects, between processes as frames: `octavo_core.frames` has
the layout of outputs, whose tokens and scores travel as raw arrays.

Shapes: token ids are ints in `[0, vocab_size)`, those of a prompt 4 bytes each in a frame; log-probabilities are natural logarithms.
"""

from __future__ import annotations

import ctypes
import enum
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from octavo_core import errors
from octavo_core.errors import FrameError, RequestError

MAGIC: Final = 0x4F435456
VERSION: Final = 3


class FrameHeader(ctypes.LittleEndianStructure):
    """The 48 bytes before every payload. `length` counts the payload's bytes; `sequence` rises by one per frame and direction."""

    _pack_ = 1
    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint16),
        ("kind", ctypes.c_uint16),
        ("flags", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("sequence", ctypes.c_uint64),
    ]


HEADER_BYTES: Final = ctypes.sizeof(FrameHeader)


class FrameKind(enum.IntEnum):
    """What the payload is: sequences to queue together, an id to abort, outputs of a step, a refusal of a REQUEST, a reading."""

    REQUEST = 1
    ABORT = 2
    OUTPUT = 3
    REFUSED = 4
    STATS = 5


MORE: Final = 1
"""Flag: the payload goes on in the next frame."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended. `ABORT`: the caller went away. `ERROR`: the engine could not go on; `Output.error` says why."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen, with the neutral value as each default.

    Attributes:
        max_tokens: Most tokens to generate, ≥ 1. None: up to the context's end.
        min_tokens: End-of-sequence and stop tokens are not sampled before this many.
        temperature: 0 is greedy.
        top_k: 0 or −1 keep every token.
        top_p: Smallest set of tokens with this much probability, in (0, 1].
        min_p: Drop tokens less likely than this times the most likely, in [0, 1].
        seed: 64-bit; None: the engine draws one.
        presence_penalty: Subtracted from logits of generated tokens, −2..2.
        frequency_penalty: Same, times their count, −2..2.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen in prompt or output, > 0.
        logit_bias: Added to the logits of these token ids.
        logprobs: None: none; 0: of the chosen token; n: also of the n most likely.
        prompt_logprobs: The same for every prompt token but the first; the cached prefix is then recomputed.
        stop_token_ids: Token ids that end the sequence; the ending token is not part of the text.
        ignore_eos: Do not end at the model's end-of-sequence tokens.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    Attributes:
        request_id: Unique among live requests; names it in outputs, logs and aborts.
        prompt_ids: At least one token id: a list, or an array of C ints, as which they come out of a frame.
        namespace: What `octavo_core.keys.namespace_of` answered.
        tenant: Index of whose share of the pool its blocks count against; the same for every request of a namespace.
        priority: Lower is served first; ties by arrival.
        deadline_s: Seconds from receipt by which the first token is due; None: whenever.
        arrival_s: Receipt at the frontend, seconds of `time.monotonic()`.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    namespace: bytes = bytes(8)
    tenant: int = 0
    priority: int = 0
    deadline_s: float | None = None
    arrival_s: float = 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Scores of one position: the token there, its log-probability and rank (1 = most likely), and the n most likely, best first."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """News of one sequence: tokens since the last output, and its end.

    Attributes:
        token_ids: New tokens, never those already sent. An ending stop or end-of-sequence token is included.
        logprobs: One entry per new token, when asked for.
        prompt_logprobs: Once, with the first output: one entry per prompt token, None for the first.
        finish_reason: Set in the last output and only there.
        stop_token_id: The stop or end-of-sequence token that ended it.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        queue_s: With the first output: seconds from receipt to its first step.
        error: A sentence for the caller when `finish_reason` is `ERROR`.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_s: float | None = None
    error: str | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend must know of the model it serves.

    Attributes:
        name: Name clients use.
        root: Folder or .gguf file with tokenizer and chat template.
        max_model_len: Most tokens of prompt and answer together.
        vocab_size: Rows of the embedding; ids are below it.
        eos_token_ids: End-of-sequence tokens, from generation_config.json or config.json.
        sampling_defaults: Sampling fields set by generation_config.json.
        max_logprobs: Most alternatives per position.
    """

    name: str
    root: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float | int] = {}
    max_logprobs: int = 20


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of one tier of KV blocks below the device. Gauges are of now, counters since the start.

    Attributes:
        name: `host`, `disk` or `remote`.
        state: `on`, `read-only` after a failed write, `off` after failed reads, or while a store is not joined.
        num_leased: Blocks that something is under way with; 0 when idle.
        num_blocks, used_bytes, total_bytes: Blocks that can be found; storage taken, and allowed.
        hits, misses: Blocks asked for, by answer; what was corrupt is a miss too.
        verified, corrupt: Blocks whose checksum was compared, by outcome.
        stored, dropped, evicted: Blocks taken in, refused, and given up for others.
        errors: Calls the storage failed.
        read_bytes, written_bytes, read_s, write_s: Moved, and the time it took, summed over threads.
    """

    name: str
    state: str = "on"
    num_leased: int = 0
    num_blocks: int = 0
    used_bytes: int = 0
    total_bytes: int = 0
    hits: int = 0
    misses: int = 0
    verified: int = 0
    corrupt: int = 0
    stored: int = 0
    dropped: int = 0
    evicted: int = 0
    errors: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A reading of the step loop. Gauges are of now, counters since the start.

    Attributes:
        is_ready: Everything is compiled and the step loop answers.
        error: Why the step loop has ended, if it has.
        last_step_age_s: Seconds since the loop last came round; it comes round at least every second when idle.
        kv_usage: Share of KV blocks that hold a live sequence's tokens, 0..1.
        kv_wasted_slots, kv_waste: Slots in blocks of running sequences that hold no token, and their share of those blocks' slots, 0..1.
        prefix_queries_tokens, prefix_hits_tokens: Prompt tokens looked up and found; a resumed sequence does not count again.
        preemptions, preempted_tokens: Sequences that gave up their KV, and the tokens of KV they gave up.
        kv_event_batches_dropped: Steps whose KV events were not published because the publisher could not keep up.
        recompiles: Compilations after the engine became ready; a healthy engine shows 0.
        kv_tiers: Tiers of KV below the device, from near to far; empty where there are none.
    """

    is_ready: bool = False
    error: str | None = None
    last_step_age_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    kv_wasted_slots: int = 0
    kv_waste: float = 0.0
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0
    kv_event_batches_dropped: int = 0
    recompiles: int = 0
    kv_tiers: list[TierStats] = []


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why the sequences of a REQUEST frame were not queued, none of them: an error of `octavo_core.errors` by class name."""

    kind: str
    message: str
    count: int = 1
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 1.0

    @classmethod
    def of(cls, error: Exception, count: int) -> Refusal:
        """What the other side is told of an error."""
        fields = {name: value for name in ("param", "code", "retry_after_s") if (value := getattr(error, name, None)) is not None}
        return cls(kind=type(error).__name__, message=str(error), count=count, **fields)

    def error(self) -> Exception:
        """The error again."""
        kind = getattr(errors, self.kind, None)
        if kind is errors.OverloadedError:
            return errors.OverloadedError(self.message, retry_after_s=self.retry_after_s)
        if isinstance(kind, type) and issubclass(kind, errors.RequestError):
            return kind(self.message, param=self.param, code=self.code)
        return errors.EngineDeadError(f"{self.kind}: {self.message}")


Message = list[EngineRequest] | str | Refusal | EngineStats
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[FrameKind, msgspec.msgpack.Decoder[Any]] = {
    FrameKind.REQUEST: msgspec.msgpack.Decoder(tuple[list[EngineRequest], list[bytes]]),
    FrameKind.ABORT: msgspec.msgpack.Decoder(str),
    FrameKind.REFUSED: msgspec.msgpack.Decoder(Refusal),
    FrameKind.STATS: msgspec.msgpack.Decoder(EngineStats),
}


def encode(message: Message) -> bytes:
    """The payload of every kind but OUTPUT.

    Raises:
        RequestError: A prompt has something else than integers of 4 bytes.
    """
    return _ENCODER.encode(_without_ids(message) if isinstance(message, list) else message)


def decode(kind: int, payload: bytes) -> Message:
    """The inverse of `encode`.

    Raises:
        FrameError: When kind or payload are not what this version writes.
    """
    try:
        message: Any = _DECODERS[FrameKind(kind)].decode(payload)
        return _with_ids(*message) if kind == FrameKind.REQUEST else message
    except (KeyError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise FrameError(f"a frame of kind {kind} does not decode: {error}") from None


def _without_ids(requests: list[EngineRequest]) -> tuple[list[EngineRequest], list[bytes]]:
    """Ids as raw bytes: as a list of objects a long prompt would hold up, on either side, whoever else is served."""
    try:
        prompts = [array("i", request.prompt_ids).tobytes() for request in requests]
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids are integers of 4 bytes: {error}", param="prompt") from None
    return [msgspec.structs.replace(request, prompt_ids=()) for request in requests], prompts


def _with_ids(requests: list[EngineRequest], prompts: list[bytes]) -> list[EngineRequest]:
    pairs = zip(requests, prompts, strict=True)
    return [msgspec.structs.replace(request, prompt_ids=array("i", prompt)) for request, prompt in pairs]


def pack_frame(kind: FrameKind, payload: bytes, *, sequence: int, step: int = 0, request: int = 0, flags: int = 0) -> bytes:
    """A payload behind its header."""
    header = FrameHeader(MAGIC, VERSION, int(kind), flags, len(payload), request, step, sequence)
    return bytes(header) + payload


def unpack_frame(frame: bytes) -> tuple[FrameHeader, bytes]:
    """The inverse of `pack_frame`.

    Raises:
        FrameError: When magic, version, kind or length are not what this version writes.
    """
    if len(frame) < HEADER_BYTES:
        raise FrameError(f"a frame has at least {HEADER_BYTES} bytes, got {len(frame)}")
    header = FrameHeader.from_buffer_copy(frame)
    if header.magic != MAGIC or header.version != VERSION:
        raise FrameError(f"wanted magic {MAGIC:#x} version {VERSION}, got {header.magic:#x} version {header.version}")
    if header.length != len(frame) - HEADER_BYTES:
        raise FrameError(f"the header promises {header.length} payload bytes, {len(frame) - HEADER_BYTES} came")
    if header.kind not in _KINDS:
        raise FrameError(f"a frame is of kind {', '.join(map(str, _KINDS))}, got {header.kind}")
    return header, frame[HEADER_BYTES:]


_KINDS: Final = tuple(int(kind) for kind in FrameKind)
