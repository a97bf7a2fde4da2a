"""The live count of wasted slots, against the blocks the cache's own table shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.plan import StepPlan
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine._src.occupancy import Occupancy
from octavo_kvcache import memory

BLOCK = 16


def plan(rows, preempted=-1):
    """Of (sequence, context_len) rows, with two pads; nothing else is looked at."""
    nothing = StepPlan(*[np.zeros(0, np.int32)] * len(StepPlan._fields))
    padded = np.array([*rows, (-1, 0), (-1, 0)], np.int32)
    return nothing._replace(
        num_rows=np.int32(len(rows)), preempted=np.int32(preempted), sequence=padded[:, 0], context_len=padded[:, 1]
    )


def test_sequences_count_from_their_first_step_until_they_leave_or_give_way():
    occupancy = Occupancy(4, BLOCK)
    assert occupancy.read() == (0, 0.0)
    occupancy.follow(plan([(0, 17), (3, 16)]), [])
    assert occupancy.read() == (15, 15 / 48)
    occupancy.follow(plan([(3, 17)]), [])
    assert occupancy.read() == (30, 30 / 64)
    occupancy.follow(plan([(1, 1)], preempted=0), [3])
    assert occupancy.read() == (15, 15 / 16)
    occupancy.follow(plan([]), [1])
    assert occupancy.read() == (0, 0.0)


def make_blocks_held(core):
    """A function that counts the blocks of each sequence, by asking the cache to grow nobody."""
    planner, spec = core.planner, core.planner.spec
    grow = jax.jit(planner.scheduler.cache.grow)
    need, rank = jnp.zeros((spec.max_sequences, spec.groups), jnp.int32), jnp.arange(spec.max_sequences, dtype=jnp.int32)
    return lambda: np.sum(np.asarray(grow(planner.state[1], need, rank)[1])[0] > 0, axis=1)


@pytest.mark.slow
def test_wasted_slots_of_a_running_engine_are_those_of_its_pool_and_of_the_formula(make_llm):
    llm = make_llm(async_scheduling=False)
    core = llm.core
    sampling = {"temperature": 0.0, "ignore_eos": True}
    for i, (length, answer) in enumerate([(3, 40), (16, 25), (31, 9)]):
        limits = SamplingParams(max_tokens=answer, **sampling)
        core.add(EngineRequest(request_id=str(i), prompt_ids=[i + 1] * length, sampling=limits))
    seen, blocks_held = set(), make_blocks_held(core)
    while core.has_work:
        core.turn()
        # In the newest plan: those that had no answer or are not through with it; their last token is not stored yet.
        running = [s for s in core._slots if s is not None and s.output]
        lengths = [s.prompt_len + len(s.output) - 1 for s in running]
        stats, held = core.stats(), blocks_held()
        assert stats.kv_wasted_slots == int(held.sum()) * BLOCK - sum(lengths) == memory.wasted_slots(lengths, BLOCK)
        assert stats.kv_waste == memory.waste(lengths, BLOCK)
        seen.add(len(running))
    assert seen == {0, 1, 2, 3}
    assert core.stats().kv_wasted_slots == 0
