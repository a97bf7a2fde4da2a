import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import FrameError
from octavo_core.frames import pack_outputs, unpack_outputs
from octavo_core.wire import EngineOutput, FinishReason, TokenLogprobs

INT31 = st.integers(0, 2**31 - 1)
TOKENS = st.lists(INT31, max_size=8)
SCORES = st.floats(-1e6, 0.0, width=32)
tops = st.lists(st.tuples(INT31, SCORES), max_size=4)
entries = st.builds(
    lambda token, logprob, rank, top: TokenLogprobs(token, logprob, rank, [t for t, _ in top], [p for _, p in top]),
    INT31, SCORES, st.integers(1, 2**31 - 1), tops,
)  # fmt: skip
outputs = st.builds(
    EngineOutput,
    request_id=st.just("r"),
    token_ids=TOKENS,
    logprobs=st.none() | st.lists(entries, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | entries, max_size=3),
    num_cached_tokens=INT31,
    queue_s=st.none() | st.floats(0, 1e6),
)
ended = st.builds(
    EngineOutput,
    request_id=st.just("r"),
    token_ids=TOKENS,
    finish_reason=st.sampled_from(FinishReason),
    stop_token_id=st.none() | INT31,
    error=st.none() | st.text(max_size=30),
)
steps = st.lists(st.tuples(st.integers(0, 2**64 - 1), outputs | ended), max_size=6)


def name_of(handle: int) -> str:
    return "r"


@given(steps)
def test_the_outputs_of_a_step_come_back_as_they_were_sent(step) -> None:
    assert unpack_outputs(pack_outputs(step), name_of) == step


@given(steps, st.data())
def test_a_damaged_payload_is_refused_or_decodes_never_anything_else(step, data) -> None:
    payload = bytearray(pack_outputs(step))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(FrameError):
        unpack_outputs(bytes(payload), name_of)


@given(steps, st.data())
def test_a_cut_payload_is_refused(step, data) -> None:
    payload = pack_outputs(step)
    with pytest.raises(FrameError, match="does not decode"):
        unpack_outputs(payload[: data.draw(st.integers(0, len(payload) - 1))], name_of)


def test_counts_that_promise_gigabytes_are_refused_before_anything_is_read() -> None:
    with pytest.raises(FrameError, match="are promised"):
        unpack_outputs(struct.pack("<5I", 2**32 - 1, 0, 0, 0, 0), name_of)


def test_a_decode_step_of_64_rows_takes_24_bytes_a_row() -> None:
    step = [(i, EngineOutput(request_id="r", token_ids=[i])) for i in range(64)]
    assert len(pack_outputs(step)) == 20 + 64 * 24
