"""Bad input: a clear error before anything is traced, or a documented status; and good input of every kind is the same input."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo_kvcache as kv
from octavo_core.errors import ConfigError
from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec

SPEC = CacheSpec((12, 14), 2, 4, 6)
CACHE = kv.RadixCache(SPEC)
SPACE = np.zeros(2, np.uint32)


@functools.cache
def empty():
    return CACHE.init()


def arguments(name: str) -> dict:
    """Good arguments of each method."""
    ints = functools.partial(np.zeros, dtype=np.int32)
    return {
        "admit": {
            "sequence": ints(2),
            "tokens": ints((2, 12)),
            "lengths": ints(2),
            "namespace": np.zeros((2, 2), np.uint32),
            "tenant": ints(2),
            "want": ints((2, 2)),
            "reserve": ints(2),
        },
        "grow": {"need": ints((4, 2)), "rank": ints(4)},
        "commit": {"tokens": ints((4, 12)), "upto": ints(4)},
        "release": {"done": np.zeros(4, bool)},
    }[name]


EVERY = [(method, name) for method in ("admit", "grow", "commit", "release") for name in arguments(method)]


@pytest.mark.parametrize(("method", "name"), EVERY)
def test_a_method_refuses_every_argument_of_another_type_or_shape_and_names_it(unchecked, method, name):
    given = arguments(method)
    good = given[name]
    for wrong in (good.astype(np.float32), good.astype(np.int8), good[..., None], good[:-1] if name != "sequence" else good[None]):
        with pytest.raises(ConfigError, match=rf"{name} is .*; wanted (int32|uint32|bool)\["):
            getattr(CACHE, method)(empty(), **(given | {name: jnp.asarray(wrong)}))
    for wrong in (good.tolist(), None, "text"):
        with pytest.raises(ConfigError, match=f"{name} is .*; wanted"):
            getattr(CACHE, method)(empty(), **(given | {name: wrong}))


def test_inside_a_jit_the_error_is_the_same(unchecked):
    grow = jax.jit(lambda state, need, rank: CACHE.grow(state, need, rank))
    with pytest.raises(ConfigError, match=r"need is int32\[4, 3\]; wanted int32\[4, 2\] for this cache"):
        grow(empty(), np.zeros((4, 3), np.int32), np.zeros(4, np.int32))


# A10 again: who made the pool and who counts its blocks must be the same.


@pytest.mark.parametrize(
    "other",
    [
        kv.RadixCache(CacheSpec((11, 14), 2, 4, 6)),
        kv.RadixCache(CacheSpec((12, 14), 2, 4, 5)),
        kv.RadixCache(CacheSpec((12, 14), 2, 3, 6)),
        kv.RadixCache(CacheSpec((12, 14), 2, 4, 6), quotas=(1, 1)),
        kv.RadixCache(CacheSpec((12, 14), 2, 4, 6), max_events=7),
    ],
)
def test_a_state_made_for_other_sizes_is_refused(unchecked, other):
    for method in ("admit", "grow", "commit", "release"):
        with pytest.raises(ConfigError, match=r"cache\.\S+ is .*; wanted .* a state from `init` of this cache"):
            getattr(CACHE, method)(other.init(), **arguments(method))


def test_a_state_with_other_groups_is_refused(unchecked):
    other = kv.RadixCache(CacheSpec((12, 14), 2, 4, 6, ("full", "window"), (0, 3)))
    with pytest.raises(ConfigError, match="other parts than wanted"):
        CACHE.release(other.init(), np.zeros(4, bool))
    with pytest.raises(ConfigError, match="other parts than wanted"):
        CACHE.release(CACHE.init().radix, np.zeros(4, bool))


# The functions of the tree.


def tree_calls() -> dict:
    """Calls with one wrong argument each, by what the error names."""
    radix, ids = empty().radix, np.zeros(3, np.int32)
    found = kv.Match(np.zeros(6, np.int32), np.zeros(6, np.int32), np.int32(0), SPACE)
    loan = kv.Loan(ids, ids, ids, np.int32(0))
    prompt = np.zeros(12, np.int32)
    return {
        "tokens is float32": lambda: kv.match(radix, prompt.astype(np.float32), 3, SPACE),
        r"tokens is int32\[11\]; wanted int32\[12\] for a tree with blocks of 2": lambda: kv.match(radix, prompt[:11], 3, SPACE),
        r"tokens is int32\[0\]": lambda: kv.match(radix, prompt[:0], 0, SPACE),
        r"tokens is list\[\]": lambda: kv.match(radix, [1, 2], 2, SPACE),
        r"length is float32\[\]": lambda: kv.match(radix, prompt, 3.5, SPACE),
        r"length is int32\[1\]": lambda: kv.match_tail(radix, found, prompt, np.zeros(1, np.int32), SPACE),
        r"namespace is int32\[2\]": lambda: kv.match(radix, prompt, 3, SPACE.astype(np.int32)),
        r"namespace is uint32\[3\]": lambda: kv.match_tail(radix, found, prompt, 3, np.zeros(3, np.uint32)),
        r"block_ids is float32\[3\]": lambda: kv.lease(radix, ids.astype(np.float32), ids),
        r"block_ids is int32\[\]": lambda: kv.lease(radix, np.int32(1), np.int32(1)),
        r"generations is int32\[2\]; wanted int32\[3\]": lambda: kv.release(radix, ids, ids[:2]),
        r"tokens is int32\[12\]; wanted int32\[6\] for 3 blocks": lambda: kv.insert(radix, found, prompt, ids, ids, SPACE),
        r"count is float32\[\]": lambda: kv.allocate(radix, 1.0, size=2),
        r"count is int32\[3\]": lambda: kv.lend(radix, ids, size=2, max_depth=5),
        r"count is bool\[\]": lambda: kv.evict(radix, True, CACHE.policy, max_depth=5),
        r"stored is bool\[2\]; wanted bool\[3\]": lambda: kv.settle(radix, loan, np.zeros(2, bool)),
        r"stored is int32\[3\]": lambda: kv.settle(radix, loan, ids),
    }


@pytest.mark.parametrize("complaint", list(tree_calls()))
def test_a_function_of_the_tree_refuses_a_wrong_argument_and_names_it(unchecked, complaint):
    with pytest.raises(ConfigError, match=complaint):
        tree_calls()[complaint]()


# Values.


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 1])
def test_negative_lengths_and_empty_prompts_find_nothing_and_are_admitted(drive, length):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    assert cache.admit(1, [1, 2, 3, 4], length=length, want=0) == (0, OK)
    assert cache.grow({1: 1})[1][1] == OK
    cache.release(1)


def test_a_commit_of_negative_lengths_files_nothing(drive):
    cache = drive()
    cache.grow({0: 2})
    cache.state, _ = cache.jitted["commit"](cache.state, np.zeros((4, 12), np.int32), np.full(4, -(2**31), np.int32))
    cache.audited()
    assert cache.host.sequences.committed.tolist() == [0] * 4


def test_any_token_id_is_a_token_id(drive):
    """The cache compares ids and knows no vocabulary; padding is not mistaken for a token."""
    cache = drive(block_size=4, max_blocks=4, partial=True)
    ids = [-1, -(2**31), 2**31 - 1, 50_000, -1, -1, -1, -1]
    cache.serve(0, ids)
    cache.release(0)
    assert cache.admit(0, [*ids, 1], want=0)[0] == 8
    assert cache.admit(1, ids[:3], want=0)[0] == 2
    assert cache.admit(2, ids[:4], want=0)[0] == 3
    assert cache.admit(3, [1, *ids[1:]], want=0)[0] == 0


def test_a_pool_of_one_usable_block_keeps_every_promise(drive):
    cache = drive((2,), sequences=2, max_blocks=2, partial=True)
    assert cache.serve(0, [1, 2]) == 0
    assert cache.admit(1, [1, 2, 3], want=2)[1] == OUT_OF_BLOCKS
    cache.release(0)
    assert cache.admit(1, [1, 9], want=1) == (0, OK), "the block to copy would take the only one there is"
    assert cache.grow({1: 1})[1][1] == OK
    cache.release(1)
    assert cache.admit(0, [1, 2, 3], want=1) == (0, OK), "evicted"


def test_an_index_outside_the_pool_is_answered_and_never_clipped(drive):
    cache = drive()
    cache.serve(0, [1, 2, 3, 4])
    before = jax.device_get(cache.state)
    for block in (12, 13, 2**31 - 1, -1, -11, -(2**31)):
        for operation in ("lease", "release"):
            assert cache.tree(operation, np.array([block, 0], np.int32), np.array([1, 0], np.int32)) == kv.STALE
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(cache.state), strict=True))


# Every kind of argument is the same argument, and compiled once.


def test_numpy_and_jax_arguments_share_one_compilation():
    for name in ("admit", "grow", "commit", "release"):
        traces = []

        def counted(*given, name=name, traces=traces):
            traces.append(name)
            return getattr(CACHE, name)(*given)

        method, given = jax.jit(counted), tuple(arguments(name).values())
        answers = [method(empty(), *given), method(empty(), *map(jnp.asarray, given))]
        assert traces == [name], f"{name} was traced again"
        wide = (x.astype(np.int64) if x.dtype == np.int32 else x for x in given)
        answers.append(method(empty(), *wide))
        for other in answers[1:]:
            assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(answers[0]), jax.tree.leaves(other), strict=True))


def test_python_and_numpy_numbers_are_counts_and_lengths(unchecked):
    radix = empty().radix
    for three in (3, np.int32(3), jnp.int32(3)):
        taken, ids, _, status = kv.allocate(radix, three, size=4)
        assert (int(status), np.count_nonzero(ids)) == (OK, 3)
        assert int(kv.match(taken, np.zeros(12, np.int32), three, SPACE).num_blocks) == 0
        assert int(kv.lend(taken, three, size=2, max_depth=5)[1].num_blocks) == 0
        assert np.array_equal(kv.evict(taken, three, CACHE.policy, max_depth=5).free, taken.free)
