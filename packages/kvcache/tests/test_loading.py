"""Blocks from outside: findable like computed ones, bounded by the pool, leased until they are let go."""

import jax
import numpy as np
import pytest

from octavo_core.seams import LoadingCache
from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache

SPEC = CacheSpec((12,), 2, 3, 6)


def quick(function):
    """Jitted; compiling takes longer than these tests run."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def words(driver, first, upto, space=0, tenant=0, complete=()):
    """What `load` is told besides tokens."""
    brought = np.isin(np.arange(driver.spec.max_blocks), complete)
    return np.int32(first), np.int32(upto), np.array([space, 0], np.uint32), np.int32(tenant), brought


@pytest.fixture
def loader(drive):
    """A driver, and `load` of a prompt: answers (ids, generations, found, new) and keeps the lease."""
    driver = drive(num_blocks=(12,), sequences=3)
    cache = driver.object
    load, unload = quick(cache.load), quick(cache.unload)
    lend = quick(lambda state: cache.lend(state, high=0.5, low=0.3, size=4))
    settle = quick(cache.settle)

    def run(tokens, first, upto, space=0, tenant=0):
        driver.state, loaded = load(driver.state, driver.pad(tokens), *words(driver, first, upto, space, tenant))
        driver.audited()
        return jax.device_get(loaded)

    def let_go(loaded):
        driver.state = unload(driver.state, loaded)
        driver.audited()

    def lent():
        driver.state, loan = lend(driver.state)
        driver.audited()
        return jax.device_get(loan)

    def settled(loan, stored):
        driver.state = settle(driver.state, loan, np.array(stored))
        driver.audited()

    driver.load, driver.unload, driver.lend, driver.settle = run, let_go, lent, settled
    return driver


def test_the_cache_has_what_tiers_want():
    assert isinstance(RadixCache(SPEC), LoadingCache)


def test_a_loaded_prefix_is_found_by_those_who_come(loader):
    tokens = list(range(9))
    loaded = loader.load(tokens, 0, 4)
    assert (loaded.num_found, loaded.num_new) == (0, 4)
    assert len(set(loaded.block_ids[:4].tolist())) == 4
    loader.unload(loaded)
    assert loader.admit(0, tokens, want=5) == (8, 0)
    assert loader.grow({0: 5})[0][0, :4].tolist() == loaded.block_ids[:4].tolist()


def test_only_what_is_missing_is_taken(loader):
    tokens = list(range(10))
    loader.serve(0, tokens[:4])
    loaded = loader.load(tokens, 1, 5)
    assert (loaded.num_found, loaded.num_new) == (2, 3)
    loader.unload(loaded)
    loader.release(0)
    assert loader.admit(1, [*tokens, 99], want=6)[0] == 10


def test_a_gap_between_what_is_cached_and_what_comes_takes_nothing(loader):
    tokens = list(range(10))
    loader.serve(0, tokens[:4])
    loaded = loader.load(tokens, 3, 5)
    assert (loaded.num_found, loaded.num_new) == (2, 0)
    loader.unload(loaded)


def test_loaded_blocks_take_the_place_of_idle_ones_and_never_of_leased_ones(loader):
    for i in range(2):
        loader.serve(i, [50 + 20 * i + t for t in range(8)])
    loader.release(0)
    loaded = loader.load(list(range(12)), 0, 6)
    assert loaded.num_new == 6
    loader.unload(loaded)
    assert loader.admit(2, list(range(12)), want=6)[0] == 10
    loader.release(2)
    assert loader.find([70 + t for t in range(8)]).num_blocks == 4
    more = loader.load([200 + t for t in range(12)], 0, 6)
    assert more.num_new == 6
    loader.unload(more)


def test_a_pool_that_is_leased_whole_gives_as_many_as_there_are(loader):
    for i in range(2):
        loader.serve(i, [50 + 20 * i + t for t in range(8)])
    loaded = loader.load(list(range(12)), 0, 6)
    assert loaded.num_new == 3
    again = loader.load([200 + t for t in range(4)], 0, 2)
    assert again.num_new == 0
    loader.unload(again)
    loader.unload(loaded)
    loader.release(0, 1)


def test_namespaces_are_kept(loader):
    loaded = loader.load(list(range(8)), 0, 4, space=7)
    loader.unload(loaded)
    assert loader.admit(0, list(range(9)), space=8, want=5)[0] == 0
    assert loader.admit(1, list(range(9)), space=7, want=5)[0] == 8


def test_what_is_lent_stays_and_what_was_stored_goes(loader):
    loader.serve(0, list(range(12)))
    loader.release(0)
    loan = loader.lend()
    lent = loan.block_ids[: loan.num_blocks].tolist()
    assert len(lent) == 3
    loaded = loader.load([100 + t for t in range(12)], 0, 6)
    assert not set(loaded.block_ids[: loaded.num_new].tolist()) & set(lent)
    loader.unload(loaded)
    loader.settle(loan, [True, True, False, False])
    assert loader.find(list(range(12))).num_blocks <= 4
    loader.settle(loan, [True] * 4)  # a second time changes nothing


def test_tenants_with_quotas_load_into_trees_of_their_own(drive):
    driver = drive(num_blocks=(12,), sequences=3, quotas=(4, 4))
    load, unload = quick(driver.object.load), quick(driver.object.unload)
    tokens = list(range(8))
    driver.state, loaded = load(driver.state, driver.pad(tokens), *words(driver, 0, 4, 5, 1))
    driver.state = unload(driver.state, loaded)
    driver.audited()
    assert driver.admit(0, [*tokens, 9], space=5, tenant=0, want=5)[0] == 0
    assert driver.admit(1, [*tokens, 9], space=5, tenant=1, want=5)[0] == 8
