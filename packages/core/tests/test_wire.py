import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import FrameError
from octavo_core.wire import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    EngineOutput,
    EngineRequest,
    FinishReason,
    FrameHeader,
    FrameKind,
    SamplingParams,
    TokenLogprobs,
    pack_frame,
    unpack_frame,
)

UINT64 = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)
SCORES = st.floats(-1e6, 0.0)

sampling = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 2**31 - 1),
    seed=st.none() | UINT64,
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=5),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    ignore_eos=st.booleans(),
)
requests = st.builds(
    EngineRequest,
    request_id=st.text(max_size=20),
    prompt_ids=TOKENS,
    sampling=sampling,
    namespace=st.binary(min_size=8, max_size=8),
    priority=st.integers(-(2**31), 2**31 - 1),
    arrival_s=st.floats(0, 1e9),
)
scores = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 2**31 - 1),
    logprob=SCORES,
    rank=st.integers(1, 2**31 - 1),
    top_ids=TOKENS,
    top_logprobs=st.lists(SCORES, max_size=20),
)
outputs = st.builds(
    EngineOutput,
    request_id=st.text(max_size=20),
    token_ids=TOKENS,
    logprobs=st.none() | st.lists(scores, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | scores, max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | st.integers(0, 2**31 - 1),
    num_cached_tokens=st.integers(0, 2**31 - 1),
    error=st.none() | st.text(max_size=30),
)
messages = st.one_of(
    st.tuples(st.just(FrameKind.REQUEST), requests),
    st.tuples(st.just(FrameKind.OUTPUT), outputs),
    st.tuples(st.just(FrameKind.ABORT), st.text(max_size=30)),
)


def frame_of(payload: bytes, kind: int = FrameKind.OUTPUT) -> bytes:
    return bytes(FrameHeader(MAGIC, VERSION, kind, 0, len(payload), 0, 0, 0)) + payload


def test_the_header_is_48_little_endian_bytes_in_the_documented_order() -> None:
    assert HEADER_BYTES == 48
    header = FrameHeader(MAGIC, VERSION, 2, 3, 4, 5, 6, 7)
    assert bytes(header) == b"".join(
        n.to_bytes(w, "little") for n, w in [(MAGIC, 4), (VERSION, 2), (2, 2), (3, 8), (4, 8), (5, 8), (6, 8), (7, 8)]
    )


@given(messages, UINT64, UINT64, UINT64)
def test_a_frame_comes_back_as_it_was_sent(message, sequence: int, step: int, request: int) -> None:
    kind, value = message
    frame = pack_frame(kind, value, sequence=sequence, step=step, request=request)
    header, back = unpack_frame(frame)
    assert back == value
    assert (header.kind, header.sequence, header.step, header.request) == (kind, sequence, step, request)
    assert header.length == len(frame) - HEADER_BYTES


def test_a_payload_written_by_plain_msgpack_is_understood() -> None:
    payload = msgspec.msgpack.encode({"request_id": "r", "token_ids": [1, 2], "finish_reason": "stop"})
    _, back = unpack_frame(frame_of(payload))
    assert back == EngineOutput(request_id="r", token_ids=[1, 2], finish_reason=FinishReason.STOP)


@given(messages, st.data())
def test_a_truncated_frame_is_refused(message, data) -> None:
    frame = pack_frame(*message, sequence=1)
    with pytest.raises(FrameError, match=r"bytes"):
        unpack_frame(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(messages, st.binary(min_size=1, max_size=9))
def test_a_frame_with_bytes_after_its_end_is_refused(message, extra: bytes) -> None:
    with pytest.raises(FrameError, match="payload bytes"):
        unpack_frame(pack_frame(*message, sequence=1) + extra)


@given(messages, st.data())
def test_a_corrupt_frame_is_refused_or_decodes_never_anything_else(message, data) -> None:
    frame = bytearray(pack_frame(*message, sequence=1))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FrameError):
        unpack_frame(bytes(frame))


@given(st.binary(max_size=200), st.integers(0, 5))
def test_any_payload_is_refused_or_decodes_never_anything_else(payload: bytes, kind: int) -> None:
    with contextlib.suppress(FrameError):
        unpack_frame(frame_of(payload, kind))


@pytest.mark.parametrize("field", ["magic", "version", "kind"])
def test_a_frame_of_another_protocol_version_or_kind_is_refused(field: str) -> None:
    frame = pack_frame(FrameKind.ABORT, "r", sequence=1)
    header = FrameHeader.from_buffer_copy(frame)
    setattr(header, field, 99)
    with pytest.raises(FrameError, match=r"99|0x63"):
        unpack_frame(bytes(header) + frame[HEADER_BYTES:])


def test_a_payload_nested_too_deeply_is_refused() -> None:
    with pytest.raises(FrameError, match="does not decode"):
        unpack_frame(frame_of(b"\x81\xa1x" + b"\x91" * 5000 + b"\x01"))


def test_a_list_that_promises_more_than_came_is_refused() -> None:
    with pytest.raises(FrameError, match="does not decode"):
        unpack_frame(frame_of(b"\x82\xaarequest_id\xa1a\xa9token_ids\xdd\xff\xff\xff\xff"))


def test_sampling_defaults_are_neutral_and_cost_nothing_on_the_wire() -> None:
    assert msgspec.msgpack.encode(SamplingParams()) == msgspec.msgpack.encode({})
