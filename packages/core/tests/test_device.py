"""The simulated device and the plan checks notice what they are there to notice."""

from __future__ import annotations

import numpy as np
import pytest

from octavo_core.plan import CacheEvents, StepPlan
from octavo_core.specs import CacheSpec
from octavo_core.testing.device import SimulatedDevice, Stream, check_plan, expected_tokens

SPEC = CacheSpec((5,), 2, 4, 3)


def plan(**changes: object) -> StepPlan:
    """Sequence 3 computes its prompt 11, 12, 13 in blocks 2 and 4 and samples; a second row and a token are pads."""
    events = CacheEvents(np.full((1, 3), -1), np.full((1, 3), -1), np.bool_(False), np.array([2]), np.array([0]))
    fields = {
        "token_ids": np.array([11, 12, 13, 0]),
        "positions": np.array([0, 1, 2, 0]),
        "row": np.array([0, 0, 0, 2]),
        "query_start": np.array([0, 3, 3]),
        "context_len": np.array([3, 0]),
        "block_table": np.array([[[2, 4, 0], [0, 0, 0]]]),
        "slot_mapping": np.array([[4, 5, 8, -1]]),
        "sample_rows": np.array([2, -1]),
        "copies": np.full((1, 1, 2), -1),
        "sequence": np.array([3, -1]),
        "cached_len": np.array([0, 0]),
        "num_tokens": np.int32(3),
        "num_rows": np.int32(1),
        "num_single": np.int32(0),
        "preempted": np.int32(-1),
        "lost_len": np.int32(0),
        "num_running": np.int32(1),
        "num_waiting": np.int32(0),
        "events": events,
    }
    return StepPlan(**fields | changes)


def decode_plan(block_table: list[int]) -> StepPlan:
    """The step after: one token, whose id is on the device."""
    return plan(
        token_ids=np.array([-1, 0, 0, 0]),
        positions=np.array([3, 0, 0, 0]),
        row=np.array([0, 2, 2, 2]),
        query_start=np.array([0, 1, 1]),
        context_len=np.array([4, 0]),
        block_table=np.array([[block_table, [0, 0, 0]]]),
        slot_mapping=np.array([[2 * block_table[1] + 1, -1, -1, -1]]),
        sample_rows=np.array([0, -1]),
        num_tokens=np.int32(1),
        num_single=np.int32(1),
    )


def test_a_valid_plan_passes_and_gives_the_tokens_of_a_stream_computed_alone():
    device = SimulatedDevice(SPEC, 97)
    check_plan(plan(), SPEC)
    first = device.run(plan())[3]
    check_plan(decode_plan([2, 4, 0]), SPEC)
    second = device.run(decode_plan([2, 4, 0]))[3]
    assert [11, 12, 13, first, second] == expected_tokens(Stream((11, 12, 13), 5), 97)


def test_a_table_that_points_at_an_unwritten_block_is_noticed():
    device = SimulatedDevice(SPEC, 97)
    device.run(plan())
    with pytest.raises(AssertionError, match="foreign or unwritten"):
        device.run(decode_plan([2, 1, 0]))


def test_a_sampled_id_that_nobody_sampled_is_noticed():
    with pytest.raises(AssertionError, match="that have none"):
        SimulatedDevice(SPEC, 97).run(decode_plan([2, 4, 0]))


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"num_single": np.int32(1)}, "rows with one token come first"),
        ({"sequence": np.array([3, 3])}, "sequence of pads"),
        ({"context_len": np.array([4, 0])}, "positions end at its context_len"),
        ({"slot_mapping": np.array([[4, 5, 9, -1]])}, "slots follow from block tables"),
        ({"slot_mapping": np.array([[4, 5, 8, 0]])}, "slot of pads"),
        ({"sample_rows": np.array([1, -1])}, "sample their last token"),
        ({"row": np.array([0, 0, 0, 0])}, "row of pads"),
        ({"block_table": np.array([[[2, 4, 1], [0, 0, 0]]])}, "then the reserved block 0"),
        ({"token_ids": np.array([11, -1, 13, 0])}, "may be in flight"),
        ({"query_start": np.array([0, 3, 4])}, "query_start runs"),
    ],
)
def test_a_broken_promise_of_a_plan_is_named(changes, promise):
    with pytest.raises(AssertionError, match=promise):
        check_plan(plan(**changes), SPEC)
