"""Names of blocks that outlive a use: the ABA race, replayed step by step, and leases and loans that end once and whole."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import octavo_kvcache
from octavo_core.plan import OK
from octavo_kvcache import NOT_A_PATH, STALE, Loan, Match, audit

WIDTH = 6


def names(ids, generations) -> tuple[np.ndarray, np.ndarray]:
    pad = [0] * (WIDTH - len(ids))
    return np.array([*ids, *pad], np.int32), np.array([*generations, *pad], np.int32)


def refused(cache, name, *arguments) -> int:
    """Status of a call that must leave the whole cache as it was."""
    before = jax.device_get(cache.state)
    answer = cache.tree(name, *arguments)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache.host), strict=True))
    return int(answer[-1] if isinstance(answer, tuple | list) else answer)


# The race: A reads the head P of the free list, B pops P, frees it, and a third P goes out under the same address; A's exchange succeeds
# because the address is the same, and two tenants hold one block.


def test_aba_the_block_freed_and_handed_out_again_is_refused_to_whoever_read_it_before(drive):
    cache = drive((3,), sequences=2, max_blocks=2)
    ids, generations, status = cache.tree("allocate", np.int32(1), np.int32(0))  # A reads P and the name it has
    assert status == OK
    p, first = int(ids[0]), int(generations[0])
    assert cache.tree("release", *names([p], [first])) == OK  # B frees it
    ids, generations, status = cache.tree("allocate", np.int32(1), np.int32(0))  # and gets it back, for another tenant's session
    assert (status, int(ids[0])) == (OK, p), "the same block: the address proves nothing"
    second = int(generations[0])
    assert second > first
    assert cache.current([p, p], [first, second]) == [False, True]

    stale = names([p], [first])
    tokens, space = np.array([5, 6, 0, 0], np.int32), np.zeros(2, np.uint32)
    assert refused(cache, "release", *stale) == STALE, "A cannot free what is B's"
    assert refused(cache, "lease", *stale) == STALE, "nor join it"
    nothing = cache.find([])
    one = Match(*(x[:2] for x in names([p], [first])), np.int32(1), nothing.chain)
    assert refused(cache, "insert", nothing, tokens, stale[0][:2], stale[1][:2], space) == STALE, "nor file its KV there"
    other, generation = (x[0] for x in cache.tree("allocate", np.int32(1), np.int32(0))[:2])
    mine = (x[:2] for x in names([other], [generation]))
    assert refused(cache, "insert", one, tokens, *mine, space) == STALE, "nor go on from it"
    pads = np.zeros(3, np.int32)
    for lent in (0, 1):
        loan = Loan(np.array([p, *pads]), np.array([first, *pads]), np.array([lent, *pads], np.int32), np.int32(1))
        assert refused(cache, "settle", loan, np.ones(4, bool)) == STALE, "nor give it back as a loan"
    assert cache.tree("release", *names([p], [second])) == OK, "B's own name still works"


def test_aba_two_sessions_never_hold_one_block_however_allocation_churns(drive):
    """Speculation allocates and prunes; names from every earlier round are tried in every later one."""
    cache, past = drive((5,), sequences=2, max_blocks=4), []
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids, generations, status = cache.tree("allocate", np.int32(rng.integers(1, 4)), np.int32(0))
        assert status == OK
        live = [(int(i), int(g)) for i, g in zip(ids, generations, strict=True) if i]
        assert len({i for i, _ in live}) == len(live)
        assert not set(live) & set(past), "a name is issued once"
        assert cache.current(*zip(*past, strict=True)) == [False] * len(past) if past else True
        for name in past[-6:]:
            assert refused(cache, "release", *names(*zip(name, strict=True))) == STALE
        for name in rng.permutation(live).tolist():
            assert cache.tree("release", *names(*zip(name, strict=True))) == OK
        past += live


@pytest.mark.parametrize("operation", ["lease", "release"])
def test_a_path_with_one_stale_name_is_refused_whole(drive, operation):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4, 5, 6])
    cache.release(0)
    found = cache.find([1, 2, 3, 4, 5, 6])
    path = found.block_ids[:3].tolist()
    generations = found.generations[:3].tolist()
    assert cache.tree("lease", *names(path, generations)) == OK
    for at in range(3):
        wrong = [g - (n == at) for n, g in enumerate(generations)]
        assert refused(cache, operation, *names(path, wrong)) == STALE
    assert refused(cache, operation, *names(path[::-1], generations[::-1])) in (STALE, NOT_A_PATH)
    assert cache.tree("release", *names(path, generations)) == OK


# A lease by hand is on a whole path and ends whole; what ends is not somebody else's.


def test_a_pin_is_not_released_in_part_which_would_leave_a_leased_block_without_its_parent(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    found = cache.find([1, 2, 3, 4])
    path, generations = found.block_ids[:2].tolist(), found.generations[:2].tolist()
    assert cache.tree("lease", *names(path, generations)) == OK
    assert refused(cache, "release", *names(path[:1], generations[:1])) == STALE
    cache.grow({0: 6, 1: 3})
    assert audit(cache.state, cache.spec) == []
    assert cache.find([1, 2, 3, 4]).num_blocks == 2, "pinned: not evicted"
    assert cache.tree("release", *names(path, generations)) == OK
    cache.grow({2: 2})
    assert cache.find([1, 2, 3, 4]).num_blocks == 0


def test_a_pin_is_not_ended_by_who_never_took_it(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    found = cache.find([1, 2, 3, 4])
    name = names(found.block_ids[:2].tolist(), found.generations[:2].tolist())
    assert refused(cache, "release", *name) == STALE, "a sequence holds it, nobody by hand"
    assert cache.tree("lease", *name) == OK
    assert cache.tree("release", *name) == OK
    assert refused(cache, "release", *name) == STALE


def lent(cache, count=2) -> Loan:
    return cache.tree("lend", np.int32(count))


def test_a_loan_is_settled_once_also_when_its_blocks_are_pinned_or_lent_again(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    first = lent(cache)
    assert int(first.num_blocks) == 2
    assert cache.tree("settle", first, np.zeros(4, bool)) == OK
    found = cache.find([1, 2, 3, 4])
    pin = names(found.block_ids[:2].tolist(), found.generations[:2].tolist())
    assert cache.tree("lease", *pin) == OK
    assert refused(cache, "settle", first, np.ones(4, bool)) == STALE, "the pin is no loan"
    assert cache.tree("release", *pin) == OK
    second = lent(cache)
    assert refused(cache, "settle", first, np.ones(4, bool)) == STALE, "the second loan is not the first"
    assert refused(cache, "release", *pin) == STALE, "a loan is no pin"
    assert cache.tree("settle", second, np.ones(4, bool)) == OK
    assert cache.find([1, 2, 3, 4]).num_blocks == 0, "stored elsewhere, so freed"


# Two phases: what is lent may be found, leased and extended meanwhile, and is freed only if nobody wants it any more.


def test_a_block_lent_for_copying_is_never_evicted(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    loan = lent(cache)
    assert cache.grow({1: 6, 2: 4})[1].tolist() == [0, 0, 1, 0], "nine blocks are left, and the copy is not done"
    assert cache.find([1, 2, 3, 4]).num_blocks == 2
    assert cache.tree("settle", loan, np.ones(4, bool)) == OK
    assert cache.grow({2: 4})[1][2] == OK


def test_a_sequence_that_arrives_during_a_demotion_keeps_the_blocks(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    loan = lent(cache)
    assert cache.admit(1, [1, 2, 3, 4, 5], want=3) == (4, OK)
    assert cache.tree("settle", loan, np.ones(4, bool)) == OK
    assert cache.find([1, 2, 3, 4]).num_blocks == 2
    cache.release(1)


def test_a_block_extended_during_a_demotion_stays_with_what_it_follows(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    loan = lent(cache)
    cache.serve(1, [1, 2, 3, 4, 5, 6])
    cache.release(1)
    assert cache.tree("settle", loan, np.ones(4, bool)) == OK
    assert cache.find([1, 2, 3, 4, 5, 6]).num_blocks == 3


def test_an_aborted_demotion_changes_nothing_but_the_count_of_loans(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    before = cache.host.radix
    assert cache.tree("settle", lent(cache), np.zeros(4, bool)) == OK
    after = cache.host.radix._replace(lent=before.lent)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True) if not isinstance(a, tuple))


def test_what_was_stored_goes_only_together_with_what_follows_it(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    cache.release(0)
    loan = lent(cache)
    leaf = int(cache.find([1, 2, 3, 4]).block_ids[1])
    assert cache.tree("settle", loan, loan.block_ids != leaf) == OK
    assert cache.find([1, 2, 3, 4]).num_blocks == 2, "the leaf's copy failed, so its parent stays"


@pytest.mark.parametrize(("used", "expected"), [(8, 0), (9, 0), (10, 2), (11, 3)])
def test_surplus_is_nothing_up_to_the_high_mark_and_then_down_to_the_low_one(drive, used, expected):
    cache = drive()
    cache.grow({0: 6, 1: used - 6})
    assert int(octavo_kvcache.surplus(cache.state.radix, high=0.88, low=0.8)) == expected
