"""The baselines of the prefix cache find what a dict of prefixes finds, so that timing them against it is fair."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_tools.prefix_baselines import (
    HashChain,
    RadixTree,
    baselines,
    fill,
    hash_blocks_sha256,
    random_prompts,
    shared_by_loop,
    shared_by_slice,
    time_all,
    time_match,
)

BLOCK = 3
NAMES = sorted(baselines(BLOCK))
SMALL = st.lists(st.integers(0, 2), max_size=15)
"""Few tokens and short prompts, so that prefixes are shared, split and equal."""
OPERATIONS = st.lists(st.one_of(st.tuples(st.just("insert"), SMALL), st.tuples(st.just("evict"), st.integers(0, 6))), max_size=25)


class Model:
    """Every held prefix by its tokens."""

    def __init__(self, size):
        self.size, self.ids = size, {}

    def prefixes(self, tokens):
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def match(self, tokens):
        found = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.ids:
                break
            found.append(self.ids[prefix])
        return found

    def insert(self, tokens, ids):
        held = len(self.match(tokens))
        for prefix, block in zip(self.prefixes(tokens), ids, strict=True):
            self.ids.setdefault(prefix, block)
        return held

    def drop(self, ids):
        """Forget blocks; none may leave a longer prefix without its parent."""
        gone = set(ids)
        assert len(gone) == len(ids)
        assert gone <= set(self.ids.values())
        self.ids = {prefix: block for prefix, block in self.ids.items() if block not in gone}
        assert all(prefix[: -self.size] in self.ids for prefix in self.ids if len(prefix) > self.size)


@pytest.mark.parametrize("name", NAMES)
@given(operations=OPERATIONS, probes=st.lists(SMALL, min_size=1, max_size=5))
def test_a_baseline_finds_what_a_dict_of_prefixes_finds(name, operations, probes):
    cache = baselines(BLOCK)[name]()
    model, fresh = Model(cache.block_size), iter(range(10**6))
    for what, argument in operations:
        if what == "insert":
            ids = [next(fresh) for _ in model.prefixes(argument)]
            assert cache.insert(argument, ids) == model.insert(argument, ids)
        else:
            before = len(model.ids)
            gone = cache.evict(argument)
            model.drop(gone)
            assert len(gone) >= min(argument, before)
        assert len(cache) == len(model.ids)
        for probe in probes:
            assert list(cache.match(probe)) == model.match(probe)


@given(prompts=st.lists(SMALL, max_size=8), count=st.integers(0, 10))
def test_a_chain_evicts_the_least_recently_used_path_deepest_block_first(prompts, count):
    cache, stamps, fresh = HashChain(BLOCK, hash_blocks_sha256), {}, iter(range(10**6))
    for now, tokens in enumerate(prompts):
        prefixes = Model(BLOCK).prefixes(tokens)
        cache.insert(tokens, [next(fresh) for _ in prefixes])
        for depth, block in enumerate(cache.match(tokens)):
            stamps[block] = (now, -depth)
    assert cache.evict(count) == sorted(stamps, key=stamps.get)[:count]


@given(
    prompts=st.lists(SMALL, min_size=1, max_size=8),
    locked=st.lists(st.integers(0, 7), max_size=3),
    size=st.sampled_from([1, BLOCK]),
)
def test_a_locked_path_outlives_eviction_and_the_splits_above_it(prompts, locked, size):
    tree, model, fresh = RadixTree(size), Model(size), iter(range(10**6))
    locks = []
    for at, tokens in enumerate(prompts):
        ids = [next(fresh) for _ in model.prefixes(tokens)]
        tree.insert(tokens, ids)
        model.insert(tokens, ids)
        if at in locked:
            found, node = tree.match_node(tokens)
            locks.append((found.tolist(), node))
            tree.lock(node)
    model.drop(tree.evict(10**6))
    assert set(model.ids.values()) == {block for found, _ in locks for block in found}
    for _, node in locks:
        tree.unlock(node)
    model.drop(tree.evict(10**6))
    assert not model.ids
    assert len(tree) == 0


@given(tokens=SMALL, edge=SMALL, at=st.integers(0, 15))
def test_both_comparisons_of_an_edge_agree(tokens, edge, at):
    at = min(at, len(tokens))
    assert shared_by_slice(tokens, at, edge) == shared_by_loop(tokens, at, edge)


def test_a_tree_evicts_the_least_recently_used_leaf_first():
    tree = RadixTree(1)
    tree.insert([1, 2], [10, 11])
    tree.insert([3, 4], [12, 13])
    assert list(tree.match([1, 2])) == [10, 11]
    assert tree.evict(1) == [12, 13]


@pytest.mark.parametrize("name", NAMES)
def test_tuples_are_taken_like_lists(name):
    cache = baselines(BLOCK)[name]()
    tokens = [5, 6, 7, 5, 6, 7, 8]
    cache.insert(tuple(tokens), range(len(tokens) // cache.block_size))
    assert list(cache.match(tuple(tokens))) == list(cache.match(tokens)) == list(range(len(tokens) // cache.block_size))


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_number_of_ids_is_refused(name):
    with pytest.raises(ValueError, match="one for each full"):
        baselines(BLOCK)[name]().insert([1] * (2 * BLOCK), [0])


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("radix")])
def test_extra_keys_part_equal_prompts(name):
    hasher = baselines(BLOCK)[name]()._hasher
    tokens = [1, 2, 3, 1, 2, 3]
    plain, adapter = hasher(tokens, BLOCK, None), hasher(tokens, BLOCK, ("adapter", 7))
    assert len({*plain, *adapter}) == 4
    assert plain == hasher(tokens, BLOCK, None)


def test_only_full_hits_are_timed():
    prompts = random_prompts(8, 4, BLOCK)
    for make in baselines(BLOCK).values():
        cache = make()
        fill(cache, prompts)
        assert time_match(cache, prompts[0].tolist(), repeats=3) > 0
        with pytest.raises(ValueError, match="full hit of"):
            time_match(cache, [*prompts[0].tolist()[:-1], -1], repeats=3)


def test_every_baseline_is_timed_in_a_full_pool():
    assert sorted(time_all(num_blocks=64, prompt_blocks=8, block_size=4, repeats=3, match_blocks=4)) == NAMES
