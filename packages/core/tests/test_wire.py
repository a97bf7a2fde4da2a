import contextlib
from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core import errors
from octavo_core.errors import FrameError
from octavo_core.ids import id_range
from octavo_core.wire import (
    HEADER_BYTES,
    MAGIC,
    VERSION,
    EngineRequest,
    EngineStats,
    FrameHeader,
    FrameKind,
    Refusal,
    SamplingParams,
    decode,
    encode,
    pack_frame,
    unpack_frame,
)

UINT64 = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)

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
    prompt_ids=TOKENS.map(lambda ids: array("i", ids)),
    sampling=sampling,
    namespace=st.binary(min_size=8, max_size=8),
    priority=st.integers(-(2**31), 2**31 - 1),
    arrival_s=st.floats(0, 1e9),
)
refusals = st.builds(
    Refusal,
    kind=st.sampled_from(["RequestError", "OverloadedError", "ContextLengthError"]),
    message=st.text(max_size=30),
    count=st.integers(1, 100),
    param=st.none() | st.text(max_size=9),
    code=st.none() | st.text(max_size=9),
)
messages = st.one_of(
    st.tuples(st.just(FrameKind.REQUEST), st.lists(requests, min_size=1, max_size=3)),
    st.tuples(st.just(FrameKind.REFUSED), refusals),
    st.tuples(st.just(FrameKind.STATS), st.builds(EngineStats, steps=UINT64, error=st.none() | st.text(max_size=9))),
    st.tuples(st.just(FrameKind.ABORT), st.text(max_size=30)),
)


def packed(message, **fields) -> bytes:
    kind, value = message
    return pack_frame(kind, encode(value), **{"sequence": 1, **fields})


def unpacked(frame: bytes):
    header, payload = unpack_frame(frame)
    return header, decode(header.kind, payload)


def frame_of(payload: bytes, kind: int = FrameKind.REFUSED) -> bytes:
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
    frame = packed(message, sequence=sequence, step=step, request=request)
    header, back = unpacked(frame)
    assert back == value
    assert (header.kind, header.sequence, header.step, header.request) == (kind, sequence, step, request)
    assert header.length == len(frame) - HEADER_BYTES


def test_a_payload_written_by_plain_msgpack_is_understood() -> None:
    payload = msgspec.msgpack.encode({"kind": "OverloadedError", "message": "full", "count": 2})
    _, back = unpacked(frame_of(payload))
    assert back == Refusal(kind="OverloadedError", message="full", count=2)


@given(messages, st.data())
def test_a_truncated_frame_is_refused(message, data) -> None:
    frame = packed(message)
    with pytest.raises(FrameError, match=r"bytes"):
        unpack_frame(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(messages, st.binary(min_size=1, max_size=9))
def test_a_frame_with_bytes_after_its_end_is_refused(message, extra: bytes) -> None:
    with pytest.raises(FrameError, match="payload bytes"):
        unpack_frame(packed(message) + extra)


@given(messages, st.data())
def test_a_corrupt_frame_is_refused_or_decodes_never_anything_else(message, data) -> None:
    frame = bytearray(packed(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FrameError):
        unpacked(bytes(frame))


@given(st.binary(max_size=200), st.integers(0, 6))
def test_any_payload_is_refused_or_decodes_never_anything_else(payload: bytes, kind: int) -> None:
    with contextlib.suppress(FrameError):
        unpacked(frame_of(payload, kind))


@pytest.mark.parametrize("field", ["magic", "version", "kind"])
def test_a_frame_of_another_protocol_version_or_kind_is_refused(field: str) -> None:
    frame = packed((FrameKind.ABORT, "r"))
    header = FrameHeader.from_buffer_copy(frame)
    setattr(header, field, 99)
    with pytest.raises(FrameError, match=r"99|0x63"):
        unpack_frame(bytes(header) + frame[HEADER_BYTES:])


def test_a_payload_nested_too_deeply_is_refused() -> None:
    with pytest.raises(FrameError, match="does not decode"):
        unpacked(frame_of(b"\x81\xa1x" + b"\x91" * 5000 + b"\x01"))


def test_a_list_that_promises_more_than_came_is_refused() -> None:
    with pytest.raises(FrameError, match="does not decode"):
        unpacked(frame_of(b"\xdd\xff\xff\xff\xff", FrameKind.REQUEST))


def test_a_list_of_ids_comes_back_as_an_array_and_has_the_range_of_one() -> None:
    ids = [7, 2**31 - 1, 0, 5]
    (back,) = decode(FrameKind.REQUEST, encode([EngineRequest(request_id="r", prompt_ids=ids, sampling=SamplingParams())]))
    assert list(back.prompt_ids) == ids
    assert id_range(ids) == id_range(back.prompt_ids) == (0, 2**31 - 1)


@pytest.mark.parametrize("ids", [[2**31], [-(2**31) - 1], [1.5], ["a"], None])
def test_ids_that_no_frame_can_carry_are_refused_by_name(ids) -> None:
    with pytest.raises(errors.RequestError, match="token ids are integers of 4 bytes") as refused:
        encode([EngineRequest(request_id="r", prompt_ids=ids, sampling=SamplingParams())])
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompts", [[], [b"1234", b"1234"], [b"123"]], ids=["too few", "too many", "cut"])
def test_prompts_that_do_not_go_with_their_requests_are_refused(prompts) -> None:
    request = EngineRequest(request_id="r", prompt_ids=(), sampling=SamplingParams())
    with pytest.raises(FrameError, match="does not decode"):
        decode(FrameKind.REQUEST, msgspec.msgpack.encode(([request], prompts)))


def test_sampling_defaults_are_neutral_and_cost_nothing_on_the_wire() -> None:
    assert msgspec.msgpack.encode(SamplingParams()) == msgspec.msgpack.encode({})


@pytest.mark.parametrize(
    "error",
    [
        errors.RequestError("wrong", param="n", code="bad"),
        errors.ContextLengthError("too long", param="prompt"),
        errors.OverloadedError("full", retry_after_s=7.0),
        errors.EngineDeadError("gone"),
    ],
)
def test_a_refusal_carries_the_error_it_stands_for(error) -> None:
    back = Refusal.of(error, 3).error()
    assert type(back) is type(error)
    assert str(error) in str(back)
    for name in ("param", "code", "retry_after_s", "http_status"):
        assert getattr(back, name, None) == getattr(error, name, None)


def test_a_refusal_never_becomes_an_error_of_another_family() -> None:
    assert isinstance(Refusal(kind="SystemExit", message="x").error(), errors.EngineDeadError)
