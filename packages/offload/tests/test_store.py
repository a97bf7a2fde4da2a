"""Host memory over a disk: down, up, and everything that may come between."""

import threading
import time

import numpy as np

from octavo_core.testing import tiers as suite
from octavo_core.testing.patience import PATIENCE_S
from octavo_offload import Chooser, Meter

SLOW_TO_COMPUTE_S = 10.0


def keys(numbers):
    return [suite.key_of(n) for n in numbers]


def save(store, numbers, pieces_of):
    store.save(keys(numbers), pieces_of(numbers))
    assert store.wait_idle(PATIENCE_S)


def fetched(store, numbers, pieces_of, recompute_s=SLOW_TO_COMPUTE_S):
    """How many leading blocks came, after comparing their bytes."""
    fetch = store.fetch(keys(numbers), recompute_s)
    if fetch is None:
        return 0
    end = time.monotonic() + PATIENCE_S
    while not fetch.is_done:
        fetch.wait(0.01)
        assert time.monotonic() < end
    count = fetch.num_blocks
    if count:
        for got, wanted in zip(fetch.take(), pieces_of(numbers[:count]), strict=True):
            assert np.array_equal(got, wanted)
    return count


def is_idle(store):
    store.wait_idle(PATIENCE_S)
    return store.host.num_leased == 0 and store.num_pending == 0


def test_what_was_saved_comes_back_in_pieces(make_store, pieces_of):
    store = make_store()
    save(store, [1, 2, 3], pieces_of)
    assert fetched(store, [1, 2, 3, 4], pieces_of) == 3
    assert fetched(store, [4, 1], pieces_of) == 0
    assert is_idle(store)


def test_what_host_memory_lost_comes_from_disk(make_store, pieces_of):
    store = make_store(4, 64)
    for start in range(0, 16, 4):
        save(store, list(range(start, start + 4)), pieces_of)
    assert store.host.count.evicted == 12
    assert fetched(store, [0, 1, 2, 3], pieces_of) == 4
    assert store.disk.count.verified == 4
    assert is_idle(store)


def test_a_restart_serves_from_disk(make_store, pieces_of):
    store = make_store(8, 64)
    save(store, [1, 2, 3], pieces_of)
    store.close()
    store = make_store(8, 64)
    assert fetched(store, [1, 2, 3], pieces_of) == 3
    assert is_idle(store)


def test_padding_rows_are_not_saved(make_store, pieces_of):
    store = make_store()
    store.save(keys([1, 2]), pieces_of([1, 2, 0, 0]))
    assert fetched(store, [1, 2], pieces_of) in (0, 2)
    store.wait_idle(PATIENCE_S)
    assert store.host.capacity().num_blocks == 2


def test_arrays_are_waited_for_in_another_thread(make_store, pieces_of):
    store, ready = make_store(), threading.Event()

    class Pending:
        def __init__(self, value):
            self.value = value

        def __array__(self, dtype=None, copy=None):
            assert ready.wait(PATIENCE_S)
            return self.value

    told = []
    store.save(keys([1]), [Pending(p) for p in pieces_of([1])], told.append)
    assert fetched(store, [1], pieces_of) == 0
    ready.set()
    store.wait_idle(PATIENCE_S)
    assert told == [[True]]
    assert fetched(store, [1], pieces_of) == 1


def test_what_was_fetched_does_not_change_when_its_slot_is_used_again(make_store, pieces_of):
    store = make_store(2)
    save(store, [1, 2], pieces_of)
    fetch = store.fetch(keys([1, 2]), SLOW_TO_COMPUTE_S)
    assert fetch.wait(PATIENCE_S)
    pieces = fetch.take()
    save(store, [3, 4], pieces_of)
    assert store.host.capacity().num_blocks == 2
    for got, wanted in zip(pieces, pieces_of([1, 2]), strict=True):
        assert np.array_equal(got, wanted)


def test_fetches_that_are_given_up_leave_no_lease_behind(make_store, pieces_of):
    """Looked up and never fetched, a hundred times, from both tiers; then new blocks still find room."""
    store = make_store(4, 64)
    for start in range(0, 16, 4):
        save(store, list(range(start, start + 4)), pieces_of)
    for i in range(100):
        fetch = store.fetch(keys([i % 12, i % 12 + 1, i % 12 + 2]), SLOW_TO_COMPUTE_S)
        if fetch is not None:
            fetch.cancel()
    assert is_idle(store)
    for start in range(100, 150, 2):
        save(store, [start, start + 1], pieces_of)
        assert fetched(store, [start, start + 1], pieces_of) == 2
    assert is_idle(store)


def test_a_damaged_block_ends_the_prefix_before_it(make_store, pieces_of):
    store = make_store()
    save(store, [1, 2, 3], pieces_of)
    lease = store.host.lease(suite.key_of(2))
    store.host.view(lease.slot)[9] ^= 1
    store.host.release(lease)
    assert fetched(store, [1, 2, 3], pieces_of) == 1
    assert store.stats()[0].corrupt == 1
    assert is_idle(store)


def test_a_disk_that_has_become_slow_is_not_waited_for_longer_than_computing_takes(make_store, pieces_of, faulty, tmp_path):
    files = faulty(tmp_path, lambda call, offset: "slow" if call == "read" else None)
    files.slow_s = 1.0
    store = make_store(4, 64, files=files)
    for start in range(0, 16, 4):
        save(store, list(range(start, start + 4)), pieces_of)
    start = time.monotonic()
    assert fetched(store, [0, 1, 2, 3], pieces_of, recompute_s=0.01) == 0
    assert time.monotonic() - start < 0.7
    assert is_idle(store)
    start = time.monotonic()
    assert store.fetch(keys([4, 5, 6, 7]), 0.01) is None  # it was measured, and is not asked again
    assert time.monotonic() - start < 0.7
    files.slow_s = 0.0
    for _ in range(60):  # but looked at now and then
        if store.fetch(keys([4, 5, 6, 7]), 0.01) is not None:
            break
        store.wait_idle(5.0)
        save(store, [90, 91, 92, 93], pieces_of)
    else:
        raise AssertionError("a disk that is fast again is used again")
    assert is_idle(store)


def test_the_choice_follows_what_was_measured():
    host, disk = Meter(0.001), Meter(0.001)
    chooser = Chooser(host, disk)
    assert chooser.choose([0] * 4, [0], 0.01)[0] == 4
    assert chooser.choose([1] * 4, [0], 0.01)[0] == 4
    assert chooser.choose([1] * 4, [1000], 0.01)[0] == 0
    assert chooser.choose([0] * 4, [1000], 0.01)[0] == 4
    for _ in range(20):
        disk.saw(1, 1.0)
    assert chooser.choose([0, 0, 1, 0], [0], 0.01)[0] == 2
    assert chooser.choose([1] * 4, [0], 0.01)[0] == 0
    for _ in range(20):
        host.saw(1, 1.0)
    assert chooser.choose([0] * 4, [0], 0.01)[0] == 0


def test_a_slow_tier_does_not_keep_from_using_the_one_above_it():
    host, disk, remote = Meter(0.0001), Meter(0.001), Meter(1.0)
    chooser = Chooser(host, disk, remote)
    assert chooser.choose([0, 1, 1, 2, 2], [0, 0], 0.01)[0] == 3
    assert chooser.choose([2, 0, 0], [0, 0], 0.01)[0] == 0
    assert chooser.choose([0, 1, 1, 2, 2], [0, 0], 10.0)[0] == 5


def test_more_batches_than_may_wait_are_dropped_and_said_to_be(make_store, pieces_of):
    store, ready, told = make_store(), threading.Event(), []

    class Pending:
        def __array__(self, dtype=None, copy=None):
            assert ready.wait(PATIENCE_S)
            return pieces_of([1])[0]

    for _ in range(80):
        store.save(keys([1]), [Pending(), pieces_of([1])[1]], told.append)
    assert store.is_busy
    assert told == [[False]] * 64
    ready.set()
    store.wait_idle(PATIENCE_S)
    assert len(told) == 80
