"""Blocks from outside where groups look back a limited way: the window at the end comes along, or nothing does."""

import functools

import jax
import numpy as np
import pytest

BS = 2
A = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
SPECS = {
    "all kinds": {"num_blocks": (20, 9, 8), "kinds": ("full", "window", "state"), "windows": (0, 5, 0)},
    "window": {"num_blocks": (9,), "kinds": ("window",), "windows": (5,)},
}


@functools.cache
def programs(cache):
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(cache.load, compiler_options=quick), jax.jit(cache.unload, compiler_options=quick)


class Loader:
    """A driver that loads."""

    def __init__(self, driver):
        self.driver, self.spec = driver, driver.spec
        self.load_program, self.unload_program = programs(driver.object)

    def load(self, tokens, first, upto, complete, space=0):
        """Keep the lease; answers in NumPy."""
        brought = np.isin(np.arange(self.spec.max_blocks), list(complete))
        words = np.int32(first), np.int32(upto), np.array([space, 0], np.uint32), np.int32(0), brought
        self.driver.state, loaded = self.load_program(self.driver.state, self.driver.pad(tokens), *words)
        self.driver.audited()
        return jax.device_get(loaded)

    def unload(self, loaded):
        self.driver.state = self.unload_program(self.driver.state, loaded)
        self.driver.audited()
        return loaded

    def hit(self, tokens, space=0):
        """Tokens that a prompt with one more would find."""
        found, status = self.driver.admit(0, [*tokens, 0], space=space)
        self.driver.release(0)
        assert status == 0
        return found

    def serve(self, tokens):
        self.driver.serve(0, tokens)
        return self.driver.release(0)

    def free(self):
        events = self.driver.release()
        return (np.asarray(events.num_free) + np.asarray(events.num_evictable)).tolist()


@pytest.fixture(params=["all kinds", pytest.param("window", marks=pytest.mark.slow)])
def loader(drive, request):
    return Loader(drive(block_size=BS, sequences=2, max_blocks=7, **SPECS[request.param]))


def test_a_prefix_comes_with_the_blocks_its_end_looks_back_to_and_no_more(loader):
    empty = loader.free()
    loaded = loader.load(A, 0, 5, range(5))
    assert (loaded.num_found, loaded.num_new) == (0, 5)
    for new, ids, reach in zip(loaded.side_new, loaded.side_ids, loader.spec.reaches, strict=True):
        assert np.flatnonzero(new).tolist() == np.flatnonzero(ids).tolist() == list(range(5 - reach, 5))
    assert loader.hit(A[:10]) == 10
    loader.unload(loaded)
    assert loader.hit(A[:10]) == 10
    assert loader.hit(A[:4]) == 0, "windows before the end did not come"
    assert loader.free() == empty


def test_without_one_of_them_nothing_comes(loader):
    reach = max(loader.spec.reaches)
    for gone in range(5 - reach, 5):
        loaded = loader.load(A, 0, 5, set(range(5)) - {gone})
        assert (loaded.num_new, loaded.side_ids.any()) == (0, False)
        loader.unload(loaded)
    assert loader.hit(A[:10]) == 0


def test_what_is_cached_need_not_come_and_is_leased_meanwhile(loader):
    loader.serve(A[:6])
    loaded = loader.load(A, 3, 4, [3])
    assert (loaded.num_found, loaded.num_new) == (3, 1)
    for new, ids, reach in zip(loaded.side_new, loaded.side_ids, loader.spec.reaches, strict=True):
        assert np.flatnonzero(new).tolist() == [3]
        assert np.flatnonzero(ids).tolist() == list(range(4 - reach, 4))
    loader.unload(loaded)
    assert loader.hit(A[:8]) == 8


def test_a_shorter_prefix_of_a_loaded_one_takes_the_windows_alone(loader):
    loader.unload(loader.load(A, 0, 5, range(5)))
    assert loader.hit(A[:6]) == 0 if max(loader.spec.reaches) < 3 else True
    loaded = loader.unload(loader.load(A, 3, 3, range(3)))
    assert (loaded.num_found, loaded.num_new) == (3, 0)
    assert loaded.side_new.any()
    assert loader.hit(A[:6]) == 6
    assert loader.hit(A[:10]) == 10


def test_a_gap_before_what_comes_takes_no_window_either(loader):
    loader.serve(A[:4])
    loaded = loader.load(A, 3, 5, range(5))
    assert (loaded.num_new, loaded.side_ids.any()) == (0, False)
    loader.unload(loaded)


def test_a_window_pool_that_is_leased_gives_nothing(loader):
    held = [loader.load([n + t for t in A], 0, 6, range(6)) for n in (100, 200, 300)]
    last = loader.load(A, 0, 6, range(6))
    while last.num_new:
        held.append(last)
        last = loader.load([400 + 20 * len(held) + t for t in A], 0, 6, range(6))
        assert len(held) < 12
    assert not last.side_ids.any()
    for loaded in (*held, last):
        loader.unload(loaded)
    other = A[::-1]
    assert loader.unload(loader.load(other, 0, 6, range(6))).num_new == 6, "idle ones are taken"
    assert loader.hit(other) == 12


def test_what_one_load_has_taken_the_next_does_not_take(loader):
    first = loader.load(A, 0, 4, range(4))
    second = loader.load(A[::-1], 0, 4, range(4))
    for one, other in zip(first.side_ids, second.side_ids, strict=True):
        assert not set(one[one > 0].tolist()) & set(other.tolist())
    loader.unload(second)
    loader.unload(first)
    assert loader.hit(A[:8]) == 8


def test_unloading_twice_changes_nothing(loader):
    loaded = loader.unload(loader.load(A, 0, 4, range(4)))
    before = jax.device_get(loader.driver.state.radix.sides)
    loader.unload(loaded)
    same = jax.tree.map(np.array_equal, before, jax.device_get(loader.driver.state.radix.sides))
    assert all(jax.tree.leaves(same))


def test_histories_of_loads_keep_the_books(loader):
    """Windows come only from blocks that are complete, a load is whole or nothing, and every lease ends."""
    rng, leased, empty = np.random.default_rng(3), [], loader.free()
    prompts = [rng.integers(0, 2, 14).tolist() for _ in range(4)]
    num_loads = 0
    for _ in range(60):
        tokens, upto = prompts[rng.integers(4)], int(rng.integers(1, 7))
        complete = {i for i in range(7) if rng.random() < 0.8}
        before = loader.hit(tokens[: upto * BS])
        leased.append(loader.load(tokens, int(rng.integers(0, 3)), upto, complete))
        loaded, after = leased[-1], loader.hit(tokens[: upto * BS])
        came = loaded.num_new > 0 or loaded.side_new.any()
        assert set(np.flatnonzero(loaded.side_new.any(0)).tolist()) <= complete
        assert after == (upto * BS if came else before)
        num_loads += int(came)
        while len(leased) > rng.integers(3):
            loader.unload(leased.pop(int(rng.integers(len(leased)))))
    for loaded in leased:
        loader.unload(loaded)
    assert num_loads > 10
    assert loader.free() == empty
