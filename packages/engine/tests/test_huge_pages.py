"""Huge pages change where bytes lie, never what they are."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from octavo_engine._src.huge_pages import PAGE, begin, collapse, pages_of, ranges


def test_only_pages_that_are_nearly_filled_are_asked_for():
    first = 8 * PAGE
    assert pages_of([(first, 2 * PAGE)]) == [first, first + PAGE]
    assert pages_of([(first + PAGE // 2, PAGE)]) == []
    assert pages_of([(first, PAGE // 2), (first + PAGE // 2, PAGE // 2)]) == [first]
    assert pages_of([(first, PAGE // 2), (first, PAGE // 2)]) == [], "one range told twice"
    assert pages_of([]) == []


def test_contents_and_addresses_stay():
    array = jnp.arange(2**21, dtype=jnp.int32)
    before = ranges({"a": array, "b": 3})
    pages = pages_of(before)
    assert len(pages) >= 3
    assert 0 <= collapse(pages) <= len(pages)
    assert ranges(array) == before
    np.testing.assert_array_equal(array, np.arange(2**21))


def test_what_is_no_longer_there_is_left_out():
    assert collapse([0, PAGE]) == 0


def test_the_table_says_what_was_asked_for():
    what, why = begin(jnp.zeros(2**20))
    assert what == "4 KiB" or what.endswith("of 2 MiB")
    assert "huge pages" in why or "background" in why
