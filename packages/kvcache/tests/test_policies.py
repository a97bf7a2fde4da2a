"""Eviction policies: each keeps the contract, each keeps its own order, and one that does not is found out."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_kvcache import RadixCache, audit
from octavo_kvcache.policy import (
    LATEST,
    CostAware,
    EvictionPolicy,
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    PriorityThenRecency,
    TwoLifetimes,
    Use,
    check_policy,
    named_policy,
)

A, B, C = [1, 1, 1, 2], [3, 3, 3, 4], [5, 5, 5, 6]
NAMES = ("two-lifetimes", "lru", "lfu", "fifo", "priority", "cost")
BUILT_IN = [*map(named_policy, NAMES), LeastFrequentlyUsed(lifetime=3), PriorityThenRecency(priorities=(0, 3, 15), lifetime=50)]


@pytest.mark.parametrize("policy", BUILT_IN, ids=repr)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_policy_keeps_a_block_no_longer_than_the_one_it_follows(policy, seed):
    assert isinstance(policy, EvictionPolicy)
    check_policy(policy, uses=150, seed=seed)


@dataclasses.dataclass(frozen=True)
class DeepestLast(LeastRecentlyUsed):
    """Wrong: stamps grow along a path."""

    def touch(self, stamp, use):
        return jnp.maximum(stamp, use.clock + jnp.arange(stamp.shape[0], dtype=jnp.int32))


@dataclasses.dataclass(frozen=True)
class MostRecentlyUsed(LeastRecentlyUsed):
    """Wrong: what was used last goes first, and so do parents that are used with other children."""

    def rank(self, stamp, now, bits):
        return (1 << bits) - 1 - super().rank(stamp, now, bits)


@dataclasses.dataclass(frozen=True)
class Forgetful(LeastRecentlyUsed):
    """Wrong: a use may lower a stamp."""

    def touch(self, stamp, use):
        return jnp.where(use.path_len > 2, jnp.int32(1), use.clock) + jnp.zeros_like(stamp)


@dataclasses.dataclass(frozen=True)
class Overflowing(LeastRecentlyUsed):
    """Wrong: ranks leave their bits."""

    def rank(self, stamp, now, bits):
        return stamp


@dataclasses.dataclass(frozen=True)
class Timeless(LeastRecentlyUsed):
    """Wrong: stamps overtake the clock they are set back with."""

    def rewind(self, stamp, by):
        return stamp + 1


@pytest.mark.parametrize(
    ("policy", "broken"),
    [
        (DeepestLast(), "the stamp of a block is above"),
        (MostRecentlyUsed(), "the rank of a block is above"),
        (Forgetful(), "`touch` lowers"),
        (Overflowing(), "is outside"),
        (Timeless(), "`rewind` raises"),
    ],
    ids=repr,
)
def test_a_policy_that_breaks_a_promise_is_named(policy, broken):
    with pytest.raises(AssertionError, match=broken):
        check_policy(policy)


def test_the_audit_notices_a_policy_that_would_evict_a_parent_before_its_child(drive):
    cache = drive((12,), policy=DeepestLast())
    cache.serve(0, A)
    with pytest.raises(AssertionError, match="was used after its parent"):
        cache.release(0)
    assert audit(cache.state, cache.spec) != []


# Who goes first: twelve blocks, three of them beside the prompts below, and one sequence that needs some of theirs.


def served(cache, tokens, **options) -> None:
    cache.serve(0, tokens, **options)
    cache.release(0)


def left(cache, *prompts, short: int) -> list[int]:
    """Blocks of each prompt that are found after a sequence took all free ones and `short` more."""
    free = int(cache.host.radix.read().num_free) + short
    cache.grow({2: min(free, 6), 3: max(free - 6, 0)})
    found = [int(cache.find(tokens).num_blocks) for tokens in prompts]
    cache.release(2, 3)
    return found


def test_lru_evicts_what_was_used_longest_ago(drive):
    cache = drive((12,), policy="lru")
    for tokens in (A, B, A):
        served(cache, tokens)
    assert left(cache, A, B, short=1) == [2, 1]
    assert left(cache, A, B, short=1) == [2, 0]


def test_lru_does_not_depend_on_when_a_lease_began(drive):
    cache = drive((12,), policy="lru")
    cache.serve(0, A)
    served_b = cache.serve(1, B)
    cache.release(1)
    cache.release(0)
    assert (served_b, left(cache, A, B, short=2)) == (0, [2, 0])


def test_fifo_evicts_what_was_computed_longest_ago_however_often_it_was_used(drive):
    cache = drive((12,), policy="fifo")
    for tokens in (A, B, A, A):
        served(cache, tokens)
    assert left(cache, A, B, short=2) == [0, 2]


def test_lfu_keeps_what_was_used_most_often(drive):
    cache = drive((12,), policy="lfu")
    for tokens in (A, A, A, B, C):
        served(cache, tokens)
    assert left(cache, A, B, C, short=2) == [2, 0, 2], "among equals the one used longest ago"
    assert left(cache, A, B, C, short=2) == [2, 0, 0]


def test_lfu_forgets_uses_after_their_lifetime(drive):
    cache = drive((12,), policy=LeastFrequentlyUsed(lifetime=2))
    for tokens in (A, A, A, B, C, C, C):
        served(cache, tokens)
    assert left(cache, A, B, C, short=2) == [0, 2, 2]


def test_priority_keeps_what_matters_until_its_lifetime_is_over(drive):
    cache = drive((12,), policy=PriorityThenRecency(priorities=(0, 9), lifetime=3), quotas=(0, 0))
    served(cache, A, tenant=1)
    served(cache, B)
    served(cache, C)
    cache.grow({2: 6, 3: 1})
    assert cache.admit(0, [*A, 1], tenant=1) == (4, 0), "older, but of a higher priority"
    assert cache.admit(1, [*B, 1]) == (0, 0)
    cache.release(0, 1, 2, 3)
    served(cache, B)
    for _ in range(4):
        served(cache, C)
    cache.grow({2: 6, 3: 1})
    assert cache.admit(1, [*B, 1]) == (4, 0)
    assert cache.admit(0, [*A, 1], tenant=1) == (0, 0), "its time was up, and it was older"


def test_a_path_keeps_the_highest_priority_it_was_used_with():
    policy = PriorityThenRecency(priorities=(0, 9, 2))
    use = [
        Use(jnp.int32(t), jnp.int32(0), jnp.int32(tenant), jnp.bool_(False), jnp.int32(1), jnp.int32(0))
        for t, tenant in enumerate((1, 2, 77))
    ]
    stamp = jnp.zeros(1, jnp.int32)
    for one in use:
        stamp = policy.touch(stamp, one)
        assert int(stamp[0]) >> 26 == 9


def test_cost_aware_eviction_keeps_what_was_used_again_over_what_came_at_the_same_time(drive):
    cache = drive((12,), policy="cost")
    for tokens in (A, B, A):
        served(cache, tokens)
    assert left(cache, A, B, short=2) == [2, 0]
    assert isinstance(cache.object.policy, CostAware)


def test_a_path_that_was_there_before_stays_a_lifetime_longer(drive):
    """B is used last of all and goes first: A, used before it, had been used before that too."""
    cache = drive((12,), policy=TwoLifetimes(short_answer=-1))
    for tokens in (A, C, A, B):
        served(cache, tokens)
    assert left(cache, A, B, C, short=3) == [2, 1, 0]
    assert left(cache, A, B, short=1) == [2, 0]


def test_a_path_of_a_short_answer_stays_a_lifetime_longer():
    use = Use(jnp.int32(10), jnp.int32(4), jnp.int32(0), jnp.bool_(True), jnp.int32(3), jnp.int32(64))
    policy = TwoLifetimes()
    assert policy.touch(jnp.array([0]), use).tolist() == [16]
    assert policy.touch(jnp.array([0]), use._replace(answer_len=jnp.int32(65))).tolist() == [10]
    assert policy.touch(jnp.array([3, 20, 0]), use._replace(answer_len=jnp.int32(65))).tolist() == [16, 20, 10]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_evicts_of_one_path_the_deepest_first(drive, name):
    cache = drive((12,), policy=name)
    served(cache, [*A, *B, *C])
    assert [left(cache, [*A, *B, *C], short=1) for _ in range(3)] == [[5], [4], [3]]


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_outlives_its_clock(drive, name):
    """Shortly before the clock would overflow all times are set back together, and the order of use stays."""
    cache = drive((12,), policy=name)
    served(cache, A)
    late = LATEST - LATEST // 8 - 1
    cache.state = cache.state._replace(radix=cache.state.radix.write(clock=jnp.int32(late)))
    served(cache, B)
    assert int(cache.host.radix.read().clock) == late + 1 - LATEST // 2
    served(cache, C)
    assert left(cache, A, B, C, short=2) == [0, 2, 2]


def test_a_new_block_is_not_taken_for_an_old_one_after_the_clock_was_set_back():
    for policy in BUILT_IN:
        stamps = policy.rewind(jnp.array([0, 1, 5, LATEST // 2 + 7], jnp.int32), LATEST // 2)
        assert (np.asarray(stamps) == 0).tolist() == [True, False, False, False], policy


def test_an_unknown_policy_is_refused_with_the_known_names(drive):
    with pytest.raises(ConfigError, match="lru, lfu, fifo, priority, cost, or an object of your own; got 'mru'"):
        RadixCache(drive().spec, policy="mru")
    assert RadixCache(drive().spec, policy=FirstInFirstOut()).policy == named_policy("fifo")
