"""Books on the device's blocks: what of a prompt is there, what is lacking, and that nothing missing is taken for there."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.keys import block_keys, partial_key
from octavo_core.specs import CacheSpec
from octavo_engine._src.device_blocks import DeviceBlocks, There, longest_end

MIXED = CacheSpec((20, 9, 9), 2, 2, 7, ("window", "full", "state"), (5, 0, 0))
WINDOW = CacheSpec((9,), 2, 2, 7, ("window",), (5,))
FULL = CacheSpec((9, 9), 2, 2, 7)
KEYS = block_keys(list(range(14)), b"", 2)

flags = st.lists(st.booleans(), min_size=7, max_size=7)


theres = st.tuples(flags, flags, flags)


def is_end(there, reaches, end):
    """Said in another way: all before it, and of each window the last ones."""
    windows = (side[i] for side, reach in zip(there.sides, reaches, strict=True) for i in range(max(end - reach, 0), end))
    return all(there.whole[:end]) and all(windows)


@given(theres, st.tuples(st.integers(0, 8), st.integers(0, 8)))
def test_a_prefix_ends_where_nothing_that_is_looked_back_to_is_missing(flags_of, reaches):
    there = There(flags_of[0], list(flags_of[1:]))
    end = longest_end(there, reaches)
    assert is_end(there, reaches, end)
    assert not any(is_end(there, reaches, longer) for longer in range(end + 1, 8))


@given(theres, st.dictionaries(st.integers(0, 6), st.booleans()))
def test_what_is_lacking_is_exactly_what_must_come(flags_of, kept):
    there = There(flags_of[0], list(flags_of[1:]))
    blocks = DeviceBlocks(MIXED)
    end = blocks.end(there.joined(kept))
    lacking = blocks.lacking(there, end)
    brought = {i: kept[i] for i in lacking}
    assert blocks.end(there.joined(brought)) == end, "with it the prefix is whole"
    for i in lacking:
        fewer = {j: complete for j, complete in brought.items() if j != i}
        assert blocks.end(there.joined(fewer)) < end, "and without any of it, not"


@given(theres, st.dictionaries(st.integers(0, 6), st.booleans()), st.integers(0, 7))
def test_a_fetch_that_ends_early_gives_a_prefix_of_what_came(flags_of, kept, count):
    there = There(flags_of[0], list(flags_of[1:]))
    blocks = DeviceBlocks(MIXED)
    end = blocks.end(there.joined(kept))
    came = {i: kept[i] for i in blocks.lacking(there, end)[:count]}
    assert blocks.end(there) <= blocks.end(there.joined(came)) <= end
    assert is_end(there.joined(came), MIXED.reaches, blocks.end(there.joined(came)))


def test_a_part_is_not_a_window():
    """A block kept without its window serves in front of a window and not in it."""
    blocks, nothing = DeviceBlocks(MIXED), There([False] * 7, [[False] * 7] * 2)
    for end in range(1, 8):
        reach = max(MIXED.reaches)
        parts = {i: i >= end - reach for i in range(end)}
        assert blocks.end(nothing.joined(parts)) == end
        assert blocks.end(nothing.joined({**parts, end - 1: False})) < end


@pytest.mark.parametrize("spec", [MIXED, WINDOW, FULL])
@given(st.integers(0, 2**32))
def test_books_say_what_was_entered_and_not_struck(spec, seed):
    rng, blocks, model = random.Random(seed), DeviceBlocks(spec), {}
    parts = range(len(blocks.groups))
    for _ in range(30):
        name = rng.choice(parts), rng.randint(1, 5), rng.randint(1, 3)
        if rng.random() < 0.5:
            key = rng.choice(KEYS)
            for other in [n for n, k in model.items() if n[:2] == name[:2] or (n[0], k) == (name[0], key)]:
                blocks.strike(other)
                del model[other]
            blocks.enter(name, key)
            model[name] = key
        else:
            blocks.strike(name)
            model.pop(name, None)
        assert dict(blocks.items()) == model
    for key, part in itertools.product(KEYS, parts):
        held = [block for (p, block, _), k in model.items() if (p, k) == (part, key)]
        assert blocks.ids(key)[part] == (held[0] if held else 0)
    there = blocks.of(KEYS)
    if spec.whole_groups:
        missing = next((i for i, key in enumerate(KEYS) if not blocks.ids(key)[0]), len(KEYS))
        assert there.whole == [i < missing for i in range(len(KEYS))]
    else:
        assert all(there.whole), "where no group keeps every block, blocks before a window cost nothing"


def test_events_of_a_group_speak_for_its_part_once():
    assert DeviceBlocks(FULL).named([[0, 3, 1], [1, 3, 1]]) == [(0, 3, 1)]
    assert DeviceBlocks(MIXED).named([[0, 3, 1, 9, 9], [1, 4, 1, 9, 9], [2, 5, 1, 9, 9]]) == [(1, 3, 1), (0, 4, 1), (2, 5, 1)]


def test_a_part_of_a_block_has_a_name_of_its_own():
    names = {*KEYS, *map(partial_key, KEYS)}
    assert len(names) == 2 * len(KEYS)
    assert {len(name) for name in names} == {32}
