"""Slots a live pool wastes under many streams, against the formula: counted from its books, not from lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache, memory

STREAMS, BLOCK_SIZE, LONGEST = 128, 32, 16_384


def log_uniform_lengths(seed=5):
    rng = np.random.default_rng(seed)
    return np.exp(rng.uniform(np.log(256), np.log(LONGEST), STREAMS)).astype(np.int64)


@pytest.fixture(scope="module")
def pool():
    """A cache just large enough for all streams at once, and its jitted methods."""
    lengths = log_uniform_lengths()
    blocks = sum(memory.blocks_for(int(n), BLOCK_SIZE) for n in lengths)
    spec = CacheSpec((blocks + 1,), BLOCK_SIZE, STREAMS, LONGEST // BLOCK_SIZE)
    cache = RadixCache(spec)
    names = ("admit", "grow", "commit", "release")
    return cache, {n: jax.jit(getattr(cache, n), donate_argnums=0) for n in names}, lengths


def admit_all(cache, admit, state, lengths, tokens):
    """Every stream in turn; each wants its whole length."""
    for sequence, length in enumerate(lengths.tolist()):
        state, answer = admit(
            state,
            jnp.array([sequence], jnp.int32),
            jnp.asarray(tokens[sequence : sequence + 1]),
            jnp.array([length], jnp.int32),
            jnp.zeros((1, 2), jnp.uint32),
            jnp.zeros(1, jnp.int32),
            jnp.array([[memory.blocks_for(length, BLOCK_SIZE)]], jnp.int32),
            jnp.zeros(1, jnp.int32),
        )
        assert (int(answer.status[0]), int(answer.cached_len[0])) == (0, 0)
    return state


def in_use(cache, events):
    """Slots that are neither free nor cached."""
    return (cache.spec.num_blocks[0] - 1 - int(events.num_free[0]) - int(events.num_evictable[0])) * BLOCK_SIZE


def test_128_streams_waste_on_the_live_pool_what_the_formula_says_and_less_than_2_4_percent(pool):
    cache, jitted, lengths = pool
    assert 3_500 <= lengths.mean() <= 4_700
    assert lengths.min() >= 256
    assert lengths.max() <= LONGEST
    tokens = np.random.default_rng(0).integers(0, 50_000, (STREAMS, LONGEST), dtype=np.int32)
    state = admit_all(cache, jitted["admit"], cache.init(), lengths, tokens)
    need = np.array([[memory.blocks_for(int(n), BLOCK_SIZE)] for n in lengths], np.int32)
    state, table, _, status = jitted["grow"](state, jnp.asarray(need), jnp.arange(STREAMS, dtype=jnp.int32))
    assert not np.any(np.asarray(status))
    assert np.array_equal(np.sum(np.asarray(table)[0] > 0, axis=1), need[:, 0])
    state, events = jitted["release"](state, jnp.zeros(STREAMS, bool))
    measured = in_use(cache, events) - int(lengths.sum())
    assert measured == memory.wasted_slots(lengths, BLOCK_SIZE)
    assert measured / in_use(cache, events) == memory.waste(lengths, BLOCK_SIZE) < 0.024
    assert int(events.num_free[0]) == 0

    # Filing the full blocks moves nobody's tail, and after the end of all no slot is in use.
    state, _ = jitted["commit"](state, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32))
    state, events = jitted["release"](state, jnp.zeros(STREAMS, bool))
    assert in_use(cache, events) - int(lengths.sum()) == measured
    state, events = jitted["release"](state, jnp.ones(STREAMS, bool))
    assert in_use(cache, events) == 0
