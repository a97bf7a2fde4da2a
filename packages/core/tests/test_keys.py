import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.keys import NAMESPACE_BYTES, block_keys, namespace_of

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=70)
SIZES = st.sampled_from([1, 4, 16, 32])


def test_keys_are_the_documented_sha256_chain() -> None:
    first = hashlib.sha256(hashlib.sha256(b"namespac").digest() + struct.pack("<2i", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 3, 4)).digest()
    assert block_keys([1, 2, 3, 4, 5], b"namespac", 2) == [first, second]


def test_known_keys_do_not_change_between_versions() -> None:
    """Caches on disk and routers outlive a process: a change here is a change of format."""
    assert namespace_of().hex() == "5ca2d5936cf590ab"
    assert namespace_of("tenant", "salt", "adapter").hex() == "8f9e9a8328f79fc2"
    assert block_keys(range(4), namespace_of(), 4)[0].hex() == "647afacb3d46e8b46ba320cb1678fbc419da3bd51abc01d34caa1b1159c69231"


@given(TOKENS, SIZES)
def test_there_is_one_key_per_full_block(tokens: list[int], size: int) -> None:
    assert len(block_keys(tokens, bytes(8), size)) == len(tokens) // size


@given(TOKENS, TOKENS, SIZES)
def test_a_common_prefix_has_common_keys_and_nothing_else_has(left: list[int], right: list[int], size: int) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    pairs = list(zip(block_keys(left, bytes(8), size), block_keys(right, bytes(8), size), strict=False))
    assert [a == b for a, b in pairs] == [i < common // size for i in range(len(pairs))]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=8, max_size=40), st.integers(0, 7))
def test_a_key_depends_on_every_token_before_it(tokens: list[int], index: int) -> None:
    changed = [*tokens]
    changed[index] ^= 1
    assert not set(block_keys(tokens, bytes(8), 4)[index // 4 :]) & set(block_keys(changed, bytes(8), 4))


@given(TOKENS, SIZES, st.data())
def test_a_chain_goes_on_from_any_of_its_keys(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole = block_keys(tokens, bytes(8), size)
    known = data.draw(st.integers(0, len(whole)))
    parent = whole[known - 1] if known else None
    assert whole[:known] + block_keys(tokens[known * size :], bytes(8), size, parent=parent) == whole


PARTS = st.tuples(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))


@given(PARTS, PARTS)
def test_namespaces_are_equal_only_for_equal_parts(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    assert len(namespace_of(*left)) == NAMESPACE_BYTES
    assert (namespace_of(*left) == namespace_of(*right)) == (left == right)


def test_moving_a_character_between_parts_changes_the_namespace() -> None:
    assert len({namespace_of("ab", "c"), namespace_of("a", "bc"), namespace_of("abc"), namespace_of("", "abc")}) == 4


@given(st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=20))
def test_equal_tokens_in_two_namespaces_share_no_key(tokens: list[int]) -> None:
    assert not set(block_keys(tokens, namespace_of("a"), 4)) & set(block_keys(tokens, namespace_of("b"), 4))


def test_a_token_that_is_no_int32_has_no_key() -> None:
    with pytest.raises(struct.error):
        block_keys([2**31], bytes(8), 1)
