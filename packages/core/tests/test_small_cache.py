"""The smallest cache keeps every promise of its seam."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec
from octavo_core.testing.cache import check_prefix_cache
from octavo_core.testing.small_cache import SmallCache


def test_the_small_cache_conforms_to_the_prefix_cache_seam():
    check_prefix_cache(SmallCache)


def test_groups_are_served_together_and_nobody_takes_a_block_after_the_first_refusal():
    cache = SmallCache(CacheSpec((6, 3), 4, 3, 4))
    need = jnp.array([[1, 1], [1, 2], [1, 0]], jnp.int32)
    state, table, _, status = cache.grow(cache.init(), need, jnp.arange(3, dtype=jnp.int32))
    assert status.tolist() == [OK, OUT_OF_BLOCKS, OUT_OF_BLOCKS]
    assert np.asarray(table[:, :, 0]).tolist() == [[1, 0, 0], [1, 0, 0]]
    _, events = cache.release(state, jnp.array([True, False, False]))
    assert events.num_free.tolist() == [5, 2]
