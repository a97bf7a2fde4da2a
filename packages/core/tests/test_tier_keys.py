"""Keys of tiers: alike everywhere for equal facts, unlike for any other."""

import pytest

from octavo_core.keys import block_keys, namespace_of, tier_root
from octavo_core.testing import tiers
from octavo_core.testing.tiers import SmallTier, check_tier

FACTS = {"model": "m", "weights": "w", "layout": "l", "dtype": "bfloat16", "rank": 0, "ranks": 1, "block_size": 16}


def test_a_root_is_the_same_in_every_process_whatever_the_order_of_facts():
    namespace = namespace_of("tenant", "salt", "adapter")
    assert tier_root(namespace, **FACTS) == tier_root(namespace, **dict(reversed(FACTS.items())))
    assert tier_root(b"n" * 8, model="m").hex()[:16] == "8da1cdb878563f97"


def test_every_fact_and_every_namespace_makes_another_root():
    roots = {tier_root(namespace_of(), **FACTS)}
    roots |= {tier_root(namespace_of(), **{**FACTS, name: "other"}) for name in FACTS}
    roots |= {tier_root(namespace_of(*words), **FACTS) for words in (("t",), ("", "s"), ("", "", "a"))}
    roots |= {tier_root(namespace_of(), **{**FACTS, "rank": "0"})}
    assert len(roots) == 1 + len(FACTS) + 3 + 1


def test_a_chain_of_blocks_begins_at_the_root():
    ours, theirs = (tier_root(namespace_of(name), **FACTS) for name in "ab")
    mine = block_keys(range(48), b"", 16, parent=ours)
    assert len(set(mine) | set(block_keys(range(48), b"", 16, parent=theirs))) == 6
    assert block_keys(range(16, 48), b"", 16, parent=mine[0]) == mine[1:]


def test_the_smallest_tier_conforms_and_a_tier_that_lies_does_not():
    check_tier(SmallTier)

    class Lies(SmallTier):
        def get(self, keys, into):
            ticket = super().get(keys, into)
            for view in into:
                if len(view):
                    view[0] ^= 1
            return ticket

    with pytest.raises(AssertionError, match="gives the bytes that were put"):
        check_tier(Lies)
    assert tiers.BLOCK_BYTES == 4608
