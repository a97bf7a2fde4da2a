"""The surge of an incident: 450 prompts of 32,000 tokens within two seconds, and a pool that holds a tenth of them.

What must not happen: preempting and computing again and again, so that much is computed and little ends.
"""

import numpy as np
import pytest

from octavo_scheduler import SchedulerConfig
from octavo_scheduler._src.sim_state import DONE, REFUSED
from octavo_scheduler.simulate import TICK_S, CostModel, Setup, make_trace, simulate, window_rates

pytestmark = pytest.mark.slow

REQUESTS, PROMPT, MOST = 450, 32_000, 900
COST = CostModel((0.008,), decode_s=3e-5, prefill_s=4e-5, context_s=2e-8, pairs_s=1e-9)
BLOCKS_OF_ALL = REQUESTS * -(-(PROMPT + MOST) // 32)


def surge(blocks, **options):
    answers = np.random.default_rng(0).integers(128, MOST + 1, REQUESTS)
    limits = np.full(REQUESTS, PROMPT + MOST)
    trace = make_trace("surge", np.linspace(0, 2, REQUESTS), np.full(REQUESTS, PROMPT), answers, limit_len=limits)
    config = SchedulerConfig(max_num_seqs=256, token_budget=2_048)
    setup = Setup(config=config, blocks=blocks).with_values(options)
    return simulate(trace, setup, COST)


def rate(outcome):
    return float((outcome.trace.prompt_len + outcome.trace.output_len)[outcome.served].sum() / outcome.makespan_s)


@pytest.fixture(scope="module")
def uncontended():
    """Tokens a second where the pool holds every request."""
    return rate(surge(BLOCKS_OF_ALL + 1_000))


@pytest.mark.parametrize(
    "options", [{}, {"reservation": "none"}, {"max_queued_requests": 300}], ids=["default", "no reservation", "bounded"]
)
def test_a_surge_is_served_at_nine_tenths_of_the_uncontended_rate_in_every_ten_seconds(uncontended, options):
    outcome = surge(BLOCKS_OF_ALL // 10, **options)
    status = np.asarray(outcome.books.status)
    assert ((status == DONE) | (status == REFUSED)).all()
    assert (np.asarray(outcome.books.made)[status == DONE] == outcome.trace.output_len[status == DONE]).all()
    assert (status == REFUSED).any() == ("max_queued_requests" in options)
    # While somebody waits for its first step; afterwards there is less to do than could be done.
    until_s = float(np.max(outcome.books.started)) * TICK_S
    rates = window_rates(outcome.steps, 10.0, until_s)
    assert len(rates) > 1_000
    assert rates.min() >= 0.9 * uncontended, f"{outcome.summary()}"
