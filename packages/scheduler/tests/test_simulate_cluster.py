"""Clusters whose answers can be worked out, and the same engine alone."""

import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_scheduler import SchedulerConfig
from octavo_scheduler._src.sim_cluster import PartsHeld
from octavo_scheduler.simulate import TICK_S, Cluster, ClusterSpec, CostModel, Setup, TierSpec, make_trace, simulate

COST = CostModel((0.004,), decode_s=1e-4, prefill_s=2e-4, host_s=3e-4)
SETUP = Setup(config=SchedulerConfig(max_num_seqs=3, token_budget=8), blocks=128, block_size=4)
RNG = np.random.default_rng(0)


def conversations(users=6, turns=4, span=8):
    """Users take turns; each prompt is the one before it and two parts more."""
    arrival, parts = [], []
    for turn in range(turns):
        for user in RNG.permutation(users).tolist():
            arrival.append(turn * 2.0 + 0.3 * len(parts) % 2.0)
            parts.append([100 * user + i for i in range(2 + 2 * turn)])
    lengths = [len(row) * span + 3 for row in parts]
    return make_trace(
        "talk", arrival, lengths, [4] * len(parts), parts=[[*row, 9_000 + i] for i, row in enumerate(parts)], span=span
    )


TALK = conversations()


def test_a_cluster_of_one_is_the_engine_alone():
    trace = make_trace("alone", RNG.uniform(0, 1, 20), RNG.integers(1, 40, 20), RNG.integers(1, 12, 20))
    alone = simulate(trace, SETUP, COST)
    for route in ("round-robin", "least-loaded", "prefix-hash", "kv-aware"):
        found = Cluster(ClusterSpec(replicas=1, route=route), SETUP, COST).run(trace)
        assert found.ttft_s == pytest.approx(alone.ttft_s, abs=2 * TICK_S)
        assert found.tpot_s[trace.output_len > 1] == pytest.approx(alone.tpot_s, abs=2 * TICK_S)


def test_routes_that_look_at_prefixes_find_more_and_two_replicas_wait_less_than_one():
    found = {
        route: Cluster(ClusterSpec(replicas=3, route=route), SETUP, COST).run(TALK)
        for route in ("round-robin", "prefix-hash", "kv-aware")
    }
    share = {route: outcome.summary()["cached_share"] for route, outcome in found.items()}
    assert share["kv-aware"] > share["round-robin"] + 0.1
    assert share["prefix-hash"] > share["round-robin"]
    for outcome in found.values():
        assert set(outcome.replica.tolist()) == {0, 1, 2}
    burst = make_trace("burst", np.arange(24) / 40, [40] * 24, [8] * 24)
    one, two = (Cluster(ClusterSpec(replicas=n, route="least-loaded"), SETUP, COST).run(burst) for n in (1, 2))
    assert two.summary()["ttft_s_p90"] < one.summary()["ttft_s_p90"]


def test_a_hash_of_the_beginning_keeps_a_user_where_it_is_unless_the_load_is_beyond_the_bound():
    calm = Cluster(ClusterSpec(replicas=3, route="prefix-hash", hash_parts=2, bound=100.0), SETUP, COST).run(TALK)
    users = TALK.parts[:, 0] // 100
    assert all(len(set(calm.replica[users == user].tolist())) == 1 for user in set(users.tolist()))
    burst = make_trace("burst", np.zeros(9), np.full(9, 19), np.full(9, 4), parts=[[1, 2, 3 + i] for i in range(9)], span=8)
    pushed = Cluster(ClusterSpec(replicas=3, route="prefix-hash", hash_parts=2, bound=1.0), SETUP, COST).run(burst)
    assert sorted(np.bincount(pushed.replica).tolist()) == [3, 3, 3]


def test_a_prompt_is_handed_over_and_its_answer_goes_on_elsewhere():
    trace = make_trace("split", [0.0], [16], [5])
    spec = ClusterSpec(replicas=1, decoders=1, kv_bytes=1e6, link_bytes_per_s=1e8, link_latency_s=0.05)
    found = Cluster(spec, SETUP, COST).run(trace)
    prefill = 2 * (0.004 + 8 * 2e-4 + 3e-4)
    decode = 0.004 + 1e-4 + 3e-4
    assert found.ttft_s == pytest.approx([prefill], abs=2 * TICK_S)
    assert found.tpot_s == pytest.approx([(0.05 + 0.16 + 4 * decode) / 4], abs=2 * TICK_S)


def test_a_split_keeps_prompts_away_from_answers_if_the_link_is_fast():
    trace = make_trace("mixed", np.arange(24) / 20, [64] * 24, [32] * 24)
    joint = Cluster(ClusterSpec(replicas=2, route="least-loaded"), SETUP, COST).run(trace).summary()
    fast, slow = (
        Cluster(ClusterSpec(replicas=1, decoders=1, kv_bytes=1.0, link_bytes_per_s=rate), SETUP, COST).run(trace).summary()
        for rate in (1e9, 100.0)
    )
    assert fast["tpot_s_p50"] < joint["tpot_s_p50"] < slow["tpot_s_p50"]


def test_what_leaves_the_pool_is_loaded_from_a_tier_that_is_fast_enough():
    small = SETUP.with_values({"blocks": 32})

    def served(*tiers):
        return Cluster(ClusterSpec(replicas=1, kv_bytes=1e3, tiers=tiers), small, COST).run(TALK).summary()

    none, fast, slow = served(), served(TierSpec(10_000, 1e9, 1e-3)), served(TierSpec(10_000, 1e5))
    assert none["loaded_share"] == slow["loaded_share"] == 0
    assert fast["loaded_share"] > 0.2
    assert fast["cached_share"] == pytest.approx(none["cached_share"] + fast["loaded_share"], abs=0.1)
    assert fast["ttft_s_p50"] < none["ttft_s_p50"]


def test_a_shared_tier_serves_what_another_replica_computed():
    small = SETUP.with_values({"blocks": 32})

    def served(is_shared):
        tier = TierSpec(10_000, 1e9, 1e-3, is_shared=is_shared)
        return Cluster(ClusterSpec(replicas=3, kv_bytes=1e3, tiers=(tier,)), small, COST).run(TALK).summary()["cached_share"]

    assert served(True) > served(False)


def test_parts_leave_in_the_order_of_their_last_use_the_deepest_first():
    held = PartsHeld(3)
    assert held.put([(1,), (2,)]) == []
    assert held.put([(3,), (4,)]) == [(2,)]
    assert (held.match([(1,), (2,)]), held.match([(3,), (4,)]), held.match([(5,)])) == (1, 2, 0)
    assert held.put([(1,)]) == []
    assert held.put([(6,)]) == [(4,)]


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({"route": "best"}, "route is one of round-robin, least-loaded, prefix-hash, kv-aware, got 'best'"),
        ({"replicas": 0}, "a cluster has a replica"),
        ({"bound": 0.5}, "bounds of at least 1"),
        ({"link_bytes_per_s": 0.0}, "rates are above 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(options, finding):
    with pytest.raises(ConfigError, match=finding):
        ClusterSpec(**options)
