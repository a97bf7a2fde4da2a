import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import CacheSpec, KVGroupSpec


def spec(**changes) -> CacheSpec:
    return CacheSpec(**{"num_blocks": (9, 5), "block_size": 16, "max_sequences": 4, "max_blocks": 8, **changes})


def test_sizes_follow_from_the_fields() -> None:
    assert (spec().groups, spec().max_len, spec().usable_blocks) == (2, 128, 4)


@pytest.mark.parametrize("num_blocks", [(), (1,), (9, 1), (-3,)])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        spec(num_blocks=num_blocks)


@pytest.mark.parametrize("field", ["block_size", "max_sequences", "max_blocks"])
def test_a_size_below_one_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"at least 1, got .*{field}=0"):
        spec(**{field: 0})


def test_specs_are_hashable_so_that_jit_may_close_over_them() -> None:
    group = KVGroupSpec("full", (0, 1), 2, 64, "bfloat16", 32)
    assert len({spec(), spec(), group, group}) == 2
