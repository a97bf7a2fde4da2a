"""What went wrong in other engines, and the corners: each a short history through the public operations.

Size: a history for each, with nothing shared to move elsewhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec
from octavo_kvcache import CacheState, RadixCache, audit
from octavo_kvcache._src import keys
from octavo_kvcache._src.evict import NEVER, smallest
from octavo_kvcache._src.policy import LATEST
from octavo_kvcache._src.scan import prefix_sum, some_set
from octavo_kvcache._src.state import WAYS


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def look(cache, tokens: list[int], space: int = 0) -> list[int]:
    found = cache.find(tokens, space)
    ids = found.block_ids
    assert (ids[int(found.num_blocks) :] == 0).all()
    return ids[: int(found.num_blocks)].tolist()


# A8: two equal prompts race; the loser's table must point at the winner's blocks before its own are reused.


def test_the_loser_of_an_insert_race_points_at_the_winners_blocks(drive):
    cache, tokens = drive(), prompt(1, 8)
    for sequence in (0, 1):
        assert cache.admit(sequence, tokens, want=4) == (0, OK)
    before, _ = cache.grow({0: 5, 1: 5})
    after = cache.commit({0: tokens, 1: tokens})
    assert after[1, :4].tolist() == after[0, :4].tolist() == before[0, :4].tolist()
    assert after[1, 4] == before[1, 4], "the private tail stays its own"
    assert cache.current(before[1, :4].tolist(), [1, 1, 1, 1]) == [False] * 4, "the duplicates were given back"
    cache.release(0)
    table, status = cache.grow({2: 5})
    assert status[2] == OK
    assert not set(table[2, :5].tolist()) & set(after[1, :5].tolist()), "nobody is handed a block the loser reads"


def test_a_race_with_an_idle_cached_prefix_leases_it_once_per_sequence(drive):
    cache, tokens = drive(), prompt(2, 4)
    cache.serve(0, tokens)
    winner = look(cache, tokens)
    cache.release(0)
    for sequence in (1, 2):
        cache.admit(sequence, tokens, want=2, length=0)
    cache.grow({1: 2, 2: 2})
    table = cache.commit({1: tokens, 2: tokens})
    assert table[1, :2].tolist() == table[2, :2].tolist() == winner
    assert cache.release(1, 2).num_evictable.tolist() == [2, 2]


# A9: every way a sequence can end is the same release, and the books close at every idle point.


@pytest.mark.parametrize("block_size", [1, 16])
def test_every_block_is_accounted_for_at_every_idle_point(drive, block_size):
    cache = drive((40,), block_size=block_size, sequences=30, max_blocks=8, max_commits=30)
    tokens = prompt(3, 6 * block_size)
    for prompt_len, chunk in ((3, 2), (6, 4), (5, 1)):
        sequence, head = prompt_len % 2, tokens[: prompt_len * block_size - (block_size > 1)]
        found, _ = cache.admit(sequence, head, want=prompt_len)
        for upto in range(found + chunk, len(tokens) + 1, max(chunk * block_size // 2, 1)):
            cache.grow({sequence: -(-(upto + 1) // block_size)})
            cache.commit({sequence: tokens[:upto]})
        events = cache.release(sequence)
        assert int(events.num_free[0]) + int(events.num_evictable[0]) == 39
        again = cache.release(sequence)
        assert again.num_free.tolist() == events.num_free.tolist(), "a second release frees nothing"


# A10: no index outside the pool is clipped onto a real block.


def test_the_highest_block_is_used_and_nothing_beyond_it(drive):
    cache = drive()
    table, status = cache.grow({0: 6, 1: 5, 2: 1})
    assert status.tolist() == [OK, OK, OUT_OF_BLOCKS, OK]
    assert sorted(table[table > 0].tolist()) == list(range(1, 12))
    assert cache.release().num_free.tolist() == [0, 2]


def test_indices_outside_every_range_touch_nothing(drive):
    cache, tokens = drive(), prompt(4, 6)
    cache.serve(3, tokens)
    before = jax.device_get(cache.state)
    for sequence in (-1, -2, 4, 2**31 - 1, -(2**31)):
        assert cache.admit(sequence, tokens, want=3) == (0, OK)
    assert cache.grow({0: 7})[1].tolist() == [OUT_OF_BLOCKS, OK, OK, OK]
    assert cache.grow({0: 2**31 - 1, 1: -5})[1].tolist() == [OUT_OF_BLOCKS, OK, OK, OK]
    assert equal(before, cache.state)
    assert cache.handles([-1, 0, 12, 2**31 - 1, -12]) == [-1] * 5
    assert cache.current([-1, 0, 12, -11], [0, 0, 1, 1]) == [False] * 4


def test_lengths_and_marks_beyond_the_sequence_are_no_excuse_to_commit_more(drive):
    cache, tokens = drive(), prompt(5, 12)
    cache.admit(0, tokens, want=6)
    cache.grow({0: 2})
    cache.commit({0: tokens})
    assert int(cache.state.sequences.committed[0]) == 2
    assert cache.admit(1, tokens, length=2**31 - 1, want=2) == (4, OK)
    assert cache.admit(2, tokens, length=-5, want=0) == (0, OK)


# ABA: a name issued for one use of a block is refused in the next.


def test_a_stale_handle_is_refused_after_the_block_was_reused(drive):
    cache, tokens = drive(), prompt(6, 12)
    cache.grow({3: 5})
    cache.serve(0, tokens)
    ids = look(cache, tokens)
    names = cache.handles(ids)
    cache.release(0)
    assert cache.current(ids, names) == [True] * 6, "cached: still named"
    cache.serve(1, prompt(7, 12))
    assert look(cache, tokens) == []
    assert cache.current(ids, names) == [False] * 6, "evicted and handed to another"
    cache.release(1)
    cache.serve(0, tokens)
    assert sorted(look(cache, tokens)) == sorted(ids)
    assert cache.current(ids, names) == [False] * 6, "the same prefix in the same blocks is another use"
    assert all(now > then for now, then in zip(cache.handles(ids), names, strict=True))


def test_a_freed_block_is_not_current_even_before_it_is_reused(drive):
    cache = drive()
    table, _ = cache.grow({0: 1})
    name = cache.handles([table[0, 0]])
    assert cache.current([table[0, 0]], name) == [True]
    cache.release(0)
    assert cache.current([table[0, 0]], name) == [False]


# Tenancy.


def test_namespaces_never_share_a_block(drive):
    cache, tokens = drive(), prompt(8, 6)
    assert cache.serve(0, tokens, space=1) == 0
    assert cache.serve(1, tokens, space=2) == 0
    assert cache.serve(2, tokens, space=2) == 4
    one, two = look(cache, tokens, 1), look(cache, tokens, 2)
    assert len(one) == len(two) == 3
    assert not set(one) & set(two)
    assert look(cache, tokens, 3) == []


# Prefixes.


def test_a_prompt_is_never_cached_to_its_last_token(drive):
    cache, tokens = drive(), prompt(9, 8)
    cache.serve(0, tokens)
    assert [cache.admit(1, tokens[:n], want=0)[0] for n in (8, 7) if not cache.release(1).overflow] == [6, 6]
    cache.release(1)
    assert cache.admit(1, [*tokens, 5], want=0)[0] == 8
    assert cache.admit(2, tokens[:1], want=0)[0] == 0


def test_a_block_is_found_only_below_its_own_prefix(drive):
    cache, tokens = drive(), prompt(10, 8)
    cache.serve(0, tokens)
    assert look(cache, tokens[2:]) == []
    assert len(look(cache, [*tokens[:2], 1, *tokens[3:]])) == 1
    assert len(look(cache, [*tokens[:6], 1, 2])) == 3


def test_matching_leases_nothing_and_changes_nothing(drive):
    cache, tokens = drive(), prompt(11, 8)
    cache.serve(0, tokens)
    before = jax.device_get(cache.state)
    look(cache, tokens)
    assert equal(before, cache.state)


# Pressure.


def test_a_pool_of_two_blocks_serves_one_block_at_a_time(drive):
    cache = drive((2,), sequences=2, max_blocks=2)
    for tokens in ([1, 2], [3, 4], [1, 2]):
        assert cache.admit(0, tokens, want=1) == (0, OK)
        assert cache.admit(1, tokens, want=2)[1] == OUT_OF_BLOCKS
        table, status = cache.grow({0: 1, 1: 1})
        assert (table[0].tolist(), status.tolist()) == ([1, 0], [OK, OUT_OF_BLOCKS])
        cache.commit({0: tokens})
        assert cache.release(0).num_evictable.tolist() == [1]
    assert look(cache, [1, 2]) == [1]


def test_the_longest_unused_leaf_goes_first_and_leased_blocks_stay(drive):
    cache = drive()
    old, new = prompt(12, 4), prompt(13, 4)
    cache.grow({3: 5})
    for tokens in (old, new):
        cache.serve(0, tokens)
        cache.release(0)
    cache.admit(1, [*old, 1], want=2)
    cache.grow({2: 3})
    assert (len(look(cache, old)), len(look(cache, new))) == (2, 1), "old is leased; of new the leaf went"
    assert cache.grow({0: 2})[1][0] == OUT_OF_BLOCKS
    assert cache.grow({0: 1})[1][0] == OK
    assert (len(look(cache, old)), len(look(cache, new))) == (2, 0)


def test_entries_of_one_call_are_not_promised_the_same_blocks(drive):
    cache = drive()
    tokens = jnp.asarray(np.stack([cache.pad([1]), cache.pad([2]), cache.pad([3])]))
    _, got = cache.object.admit(
        cache.state,
        jnp.arange(3),
        tokens,
        jnp.ones(3, jnp.int32),
        jnp.zeros((3, 2), jnp.uint32),
        jnp.zeros(3, jnp.int32),
        jnp.array([[6, 6], [6, 6], [4, 4]]),
        jnp.array([1, 1]),
    )
    assert got.status.tolist() == [OK, OUT_OF_BLOCKS, OK]


def test_a_sequence_that_holds_blocks_is_not_admitted_over_them(drive):
    cache = drive()
    cache.grow({0: 2})
    assert cache.admit(0, [1, 2, 3], want=2) == (0, OUT_OF_BLOCKS)


def test_a_full_bucket_leaves_blocks_private_and_loses_nothing(fresh_driver, monkeypatch):
    good = keys.address
    monkeypatch.setattr(keys, "address", lambda key, buckets: (good(key, buckets)[0] * 0, good(key, buckets)[1]))
    cache = fresh_driver(CacheSpec((40,), block_size=1, max_sequences=30, max_blocks=8), max_commits=60)
    rows = {s: [s, 7] for s in range(15)}
    cache.grow(dict.fromkeys(rows, 2))
    cache.commit(rows)
    assert int(cache.state.sequences.committed.sum()) == WAYS, "a bucket holds so many"
    assert cache.state.sequences.sealed.tolist() == [False] * 8 + [True] * 7 + [False] * 15
    assert cache.release(*rows).num_evictable.tolist() == [WAYS]
    assert not cache.state.sequences.sealed.any()
    assert [len(look(cache, tokens)) for tokens in rows.values()] == [2] * 8 + [0] * 7


def test_more_work_than_one_call_takes_is_done_by_later_calls(drive):
    cache, tokens = drive(max_commits=2, max_events=2), prompt(14, 10)
    cache.admit(0, tokens, want=5)
    cache.grow({0: 5})
    reached = []
    for _ in range(4):
        cache.commit({0: tokens})
        reached.append(int(cache.state.sequences.committed[0]))
    assert reached == [2, 4, 5, 5]


def test_events_beyond_the_ring_are_flagged_once(drive):
    cache, tokens = drive(max_commits=2, max_events=1), prompt(15, 10)
    cache.serve(0, tokens)
    assert cache.release(0).overflow
    assert not cache.release().overflow


def test_old_stamps_are_moved_back_together_before_the_clock_overflows(drive):
    cache, first, second = drive(), prompt(16, 4), prompt(17, 4)
    cache.serve(0, first)
    cache.release(0)
    late = LATEST - LATEST // 8 - 2
    cache.state = cache.state._replace(radix=cache.state.radix.write(clock=jnp.int32(late)))
    cache.serve(0, second)
    cache.release(0)
    assert int(cache.state.radix.read().clock) == late + 1
    cache.serve(1, second[:2])
    cache.release(1)
    assert int(cache.state.radix.read().clock) == late + 2 - LATEST // 2
    cache.grow({0: 6, 1: 2})
    assert (len(look(cache, first)), len(look(cache, second))) == (1, 2)


# What the audit is for.


@pytest.mark.parametrize(
    ("field", "change", "complaint"),
    [
        ("radix.leases", lambda r, q: r.leases.at[1].add(1), "reference counts differ"),
        ("radix.leases", lambda r, q: r.leases.at[1].add(1 << 16), "reference counts differ"),
        ("radix.free", lambda r, q: r.free.at[0].set(r.free[1]), "repeats a block"),
        ("radix.free", lambda r, q: r.free.at[0].set(q.block_table[0, 0, 0]), "stand on the free list"),
        ("radix.slot", lambda r, q: r.slot.at[q.block_table[0, 0, 0]].set(-1), "disagree"),
        ("radix.tokens", lambda r, q: r.tokens.at[q.block_table[0, 0, 0]].add(1), "under another key"),
        ("radix.first", lambda r, q: r.first.at[q.block_table[0, 0, 0]].add(1), "begin with another token"),
        ("radix.parent", lambda r, q: r.parent.at[q.block_table[0, 0, 1]].set(0), "has no parent"),
        ("sequences.chain", lambda r, q: q.chain.at[0].add(1), "another key than its last"),
        ("sequences.tail", lambda r, q: q.tail.at[0].set(q.block_table[0, 0, 1]), "does not go on from its prefix"),
        ("sequences.block_table", lambda r, q: q.block_table.at[1, 0, 0].set(9), "differ between whole groups"),
        ("radix.counters", lambda r, q: r.counters.at[-1].add(1), "evictable by tenants"),
        ("radix.counters", lambda r, q: r.counters.at[-2].add(1), "used by tenants"),
        ("radix.stamp", lambda r, q: r.stamp.at[:].set(jnp.arange(12) == 2), "used after its parent"),
    ],
)
def test_the_audit_notices_cooked_books(drive, field, change, complaint):
    cache = drive()
    cache.serve(1, [7, 7, 8, 8])
    cache.release(1)
    cache.serve(0, prompt(18, 4))
    part, name = field.split(".")
    broken = cache.state._replace(**{part: getattr(cache.state, part)._replace(**{name: change(*cache.state)})})
    assert any(complaint in line for line in audit(broken, cache.spec)), audit(broken, cache.spec)


# Shapes and compilation.


def test_it_is_a_prefix_cache(drive):
    cache: PrefixCache[CacheState] = drive().object
    assert isinstance(cache.spec, CacheSpec)


def test_each_method_is_compiled_once(drive):
    cache = drive()
    for seed in range(3):
        cache.serve(seed, prompt(seed, 7), space=seed)
        cache.release(seed)
    assert {name: f._cache_size() for name, f in cache.jitted.items()} == dict.fromkeys(cache.jitted, 1)


def test_a_step_updates_the_pool_in_place():
    spec = CacheSpec((4096,), 16, 8, 32)
    cache = RadixCache(spec)

    def step(state, need, rank, tokens, upto, done):
        state, _, _, _ = cache.grow(state, need, rank)
        state, table = cache.commit(state, tokens, upto)
        state, _ = cache.release(state, done)
        return state, table

    ints = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    state = cache.init()
    lowered = jax.jit(step, donate_argnums=0).lower(state, ints(8, 1), ints(8), ints(8, 512), ints(8), jnp.zeros(8, bool))
    options = {"xla_cpu_copy_insertion_use_region_analysis": True, "xla_backend_optimization_level": 0}
    text = lowered.compile(compiler_options=options).as_text()
    copies = [line for line in text.splitlines() if " copy(" in line and "4096" in line.split(" copy(")[0]]
    assert copies == [], "XLA copies an array as long as the pool"


def test_wrong_shapes_and_sizes_are_refused_before_tracing(drive):
    cache = drive()
    with pytest.raises(ConfigError, match=r"need is int32\[4, 1\]; wanted int32\[4, 2\]"):
        cache.object.grow(cache.state, jnp.zeros((4, 1), jnp.int32), jnp.zeros(4, jnp.int32))
    with pytest.raises(ConfigError, match="max_commits"):
        RadixCache(cache.spec, max_commits=0)
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        CacheSpec((1,), 2, 2, 2)


# Building blocks against NumPy.


@pytest.mark.parametrize("n", [1, 31, 64, 129, 1024, 5000])
def test_prefix_sums_equal_numpys(n):
    x = np.random.default_rng(n).integers(0, 2**31, n).astype(np.uint32)
    assert np.array_equal(prefix_sum(jnp.asarray(x)), np.cumsum(x, dtype=np.uint32))


@pytest.mark.parametrize("n", [1, 33, 1024, 3000])
def test_some_set_finds_distinct_set_entries(n):
    for density in (0.0, 0.02, 0.9):
        mask = np.random.default_rng(n).random(n) < density
        got, count = some_set(jnp.asarray(mask), 50)
        assert int(count) == mask.sum()
        found = np.asarray(got)[: mask.sum()]
        assert mask[found].all()
        assert len(set(found.tolist())) == len(found) == min(mask.sum(), 50)
        assert not np.asarray(got)[mask.sum() :].any()


@pytest.mark.parametrize("n", [700, 9000])
@pytest.mark.parametrize("spread", [1, 3, 5000, 1 << 30])
def test_smallest_equals_a_stable_sort(spread, n):
    """Few keys and many, all different and many alike: by bisection of all, among few, and where the few are too many."""
    rng = np.random.default_rng(spread)
    mixed = np.where(rng.random(n) < 0.3, NEVER, rng.integers(0, spread, n)).astype(np.int32)
    for given in (mixed, np.sort(mixed), np.where(mixed == mixed.min(), mixed, NEVER)):
        for count in (0, 1, 17, 64):
            got, num = np.asarray(smallest(jnp.asarray(given), jnp.int32(count), 64)), min(count, int((given != NEVER).sum()))
            assert len(set(got[:num].tolist())) == num
            assert np.sort(given[got[:num]]).tolist() == np.sort(given)[:num].tolist()
            assert (got[num:] == 0).all()
