"""Tenants: what one caches is invisible to another, and what is within its quota is not taken from it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache

SPEC = CacheSpec((12, 14), 2, 4, 6)
SECRET, UNRELATED = [1, 2, 3, 4, 5, 6, 7], [9, 8, 9, 8, 9, 8, 9]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def life(cache, tokens) -> list[tuple]:
    """What a tenant sees of a few requests: tokens found, statuses, all counts of events, shapes of every answer."""
    seen = []
    for sequence, length in ((0, 5), (1, 7), (0, 7)):
        seen.append(cache.admit(sequence, tokens[:length], space=2, want=4))
        _, status = cache.grow({sequence: 4})
        seen += [status.tolist(), cache.tables.shape, cache.copies.shape, (cache.copies >= 0).sum()]
        cache.commit({sequence: tokens[:length]})
        seen.append(cache.tables.shape)
        events = cache.release(sequence)
        seen += [jax.tree.map(np.shape, events), [int((x[:, 0] >= 0).sum()) for x in (events.stored, events.removed)]]
        seen += [bool(events.overflow), events.num_free.tolist(), events.num_evictable.tolist()]
    seen.append([leaf.shape for leaf in jax.tree.leaves(cache.state)])
    return seen


@pytest.mark.parametrize("quotas", [(), (4, 4)])
@pytest.mark.parametrize("partial", [False, True])
def test_nothing_tells_whether_another_tenant_cached_the_same_prompt(drive, quotas, partial):
    """Found tokens, statuses, every number in the events, shapes: as beside a prompt of the same length that is another's."""
    cache = drive(quotas=quotas, partial=partial)
    seen = []
    for others in (SECRET, UNRELATED):
        cache.reset()
        cache.serve(3, others, space=1, tenant=1)
        cache.release(3)
        seen.append(life(cache, SECRET))
    assert seen[0] == seen[1]
    assert seen[0][0] == (0, OK), "nothing is found"
    assert {name: f._cache_size() for name, f in cache.jitted.items()} == dict.fromkeys(cache.jitted, 1), "and nothing is compiled"


def test_a_tail_is_not_taken_from_another_namespace(drive):
    cache = drive(block_size=4, max_blocks=4, partial=True)
    cache.serve(0, SECRET, space=1)
    cache.release(0)
    assert cache.admit(0, SECRET[:3], space=2)[0] == 0
    assert cache.admit(1, SECRET[:3], space=1)[0] == 2


def test_tenants_with_quotas_share_no_prefix_even_in_one_namespace(drive):
    """Else a quota could keep a block whose parent another tenant's need evicts."""
    cache = drive((12,), quotas=(0, 6))
    cache.serve(0, [1, 2, 3, 4], tenant=0)
    assert cache.serve(1, [1, 2, 3, 4, 5, 6], tenant=1) == 0
    cache.release(0, 1)
    cache.grow({2: 6, 3: 2})
    assert cache.admit(0, [1, 2, 3, 4, 5, 6, 7], tenant=1)[0] == 6, "the first tenant's blocks went, the second's are all there"
    assert cache.admit(1, [1, 2, 3, 4, 5], tenant=0)[0] == 0


def test_a_burst_takes_what_others_have_beyond_their_quotas_and_no_more(drive):
    cache = drive((12,), quotas=(5, 3))
    for sequence, tenant in ((0, 1), (1, 1)):
        cache.serve(sequence, prompt(sequence, 6), tenant=tenant)
    cache.release(0, 1)
    assert cache.admit(2, prompt(5, 12), want=6, tenant=0)[1] == OK
    assert cache.admit(3, prompt(6, 12), want=6, tenant=0, reserve=5)[1] == OUT_OF_BLOCKS
    assert cache.grow({2: 6})[1][2] == OK, "five free ones and one of the six"
    cache.admit(3, prompt(6, 12), want=2, tenant=0)
    assert cache.grow({3: 3})[1][3] == OUT_OF_BLOCKS
    assert cache.grow({3: 2})[1][3] == OK, "down to the quota"
    assert cache.grow({3: 3})[1][3] == OUT_OF_BLOCKS
    assert cache.host.radix.read().used.tolist() == [8, 3]


def test_a_tenant_may_evict_its_own_blocks_within_its_quota(drive):
    cache = drive((12,), quotas=(5, 3))
    cache.serve(0, prompt(0, 6), tenant=1)
    cache.release(0)
    cache.admit(1, prompt(1, 12), want=6, tenant=0)
    cache.grow({1: 6})
    cache.admit(2, prompt(2, 12), want=4, tenant=1)
    assert cache.grow({2: 5})[1][2] == OK, "two free ones and its own three"
    assert cache.host.radix.read().used.tolist() == [6, 5]
    assert cache.grow({2: 6})[1][2] == OUT_OF_BLOCKS


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_burst_takes_a_tenant_below_its_quota(drive, data):
    quotas = (2, 4, 3)
    cache = drive((12,), quotas=quotas)
    cache.reset()
    for turn in range(data.draw(st.integers(2, 6))):
        tenant, blocks = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 6))
        before = cache.host.radix.read().used.tolist()
        tokens = prompt(turn, 2 * blocks)
        if cache.admit(0, tokens, want=blocks, tenant=tenant)[1] == OK:
            assert cache.grow({0: blocks})[1][0] == OK, "what was admitted is served"
            cache.commit({0: tokens})
        cache.release(0)
        after = cache.host.radix.read().used.tolist()
        for other in {0, 1, 2} - {tenant}:
            assert after[other] >= min(before[other], quotas[other])


def test_tenants_beyond_the_last_count_as_the_last(drive):
    cache = drive((12,), quotas=(5, 3))
    for tenant in (7, 2**31 - 1):
        cache.serve(0, prompt(tenant % 97, 4), tenant=tenant)
        cache.release(0)
    cache.serve(0, prompt(3, 4), tenant=-5)
    assert cache.host.radix.read().used.tolist() == [2, 4]


@pytest.mark.parametrize("quotas", [(12,), (6, 6), (-1, 2), (2**31,)])
def test_quotas_beyond_the_pool_are_refused(quotas):
    with pytest.raises(ConfigError, match="quotas are at least 0 and together at most the 11 blocks"):
        RadixCache(SPEC, quotas=quotas)


def test_quotas_with_side_groups_are_refused():
    with pytest.raises(ConfigError, match="quotas are kept in groups that keep every block only"):
        RadixCache(CacheSpec((12, 12), 2, 4, 6, ("full", "window"), (0, 4)), quotas=(1, 1))
