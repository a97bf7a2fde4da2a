"""Memory arithmetic against live pools: slots wasted under many streams, blocks held in groups that look back a limited way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.specs import CacheSpec, KVGroupSpec
from octavo_kvcache import RadixCache, memory

STREAMS, BLOCK_SIZE, LONGEST = 128, 32, 16_384


def compiled(method):
    """Quickly: compiling takes longer than these tests run."""
    return jax.jit(method, donate_argnums=0, compiler_options={"xla_backend_optimization_level": 0})


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
    return cache, {n: compiled(getattr(cache, n)) for n in ("admit", "grow", "commit", "release")}, lengths


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


@pytest.mark.parametrize(
    ("window", "chunk"), [(6, 1), pytest.param(9, 7, marks=pytest.mark.slow), pytest.param(1, 3, marks=pytest.mark.slow)]
)
def test_limited_groups_hold_as_many_blocks_as_the_formula_says_and_no_more(window, chunk):
    """One sequence grows chunk by chunk beside full attention; its tables are looked at in every step."""
    block_size, length = 4, 100
    spec = CacheSpec((40, 40, 40), block_size, 1, 30, kinds=("full", "window", "state"), windows=(0, window, 0))
    cache = RadixCache(spec)
    grow, commit = compiled(cache.grow), compiled(cache.commit)
    tokens = np.arange(spec.max_len, dtype=np.int32)[None]
    state, _ = compiled(cache.admit)(
        cache.init(),
        jnp.zeros(1, jnp.int32),
        jnp.asarray(tokens),
        jnp.array([length], jnp.int32),
        jnp.zeros((1, 2), jnp.uint32),
        jnp.zeros(1, jnp.int32),
        jnp.zeros((1, 3), jnp.int32),
        jnp.zeros(3, jnp.int32),
    )
    seen = np.zeros(3, np.int64)
    for upto in range(chunk, length + 1, chunk):
        need = jnp.full((1, 3), memory.blocks_for(upto, block_size), jnp.int32)
        state, table, _, status = grow(state, need, jnp.zeros(1, jnp.int32))
        assert int(status[0]) == 0
        seen = np.maximum(seen, np.sum(np.asarray(table)[:, 0] > 0, axis=1))
        state, _ = commit(state, jnp.asarray(tokens), jnp.array([upto], jnp.int32))
    groups = [
        KVGroupSpec(kind, (0,), 1, 8, "float32", block_size, window=w or None)
        for kind, w in zip(spec.kinds, spec.windows, strict=True)
    ]
    steps = length // chunk * chunk
    assert seen.tolist() == [memory.sequence_blocks(group, steps, chunk_tokens=chunk) for group in groups]
