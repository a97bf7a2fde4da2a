"""The two tiers against the seam, and what is their own."""

import threading
import time

from octavo_core.testing import tiers as suite
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.tiers import Answer

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS


def test_host_memory_keeps_the_promises_of_a_tier(make_host):
    suite.check_tier(make_host)


def test_a_disk_keeps_the_promises_of_a_tier(make_disk, tmp_path):
    folders = iter(range(100))
    suite.check_tier(lambda: make_disk(path=tmp_path / str(next(folders))))


def test_the_smallest_tier_keeps_the_promises_of_a_tier():
    suite.check_tier(suite.SmallTier)


def test_the_least_recently_used_block_makes_room(make_host, make_disk):
    for tier in (make_host(4), make_disk(4)):
        assert suite.put(tier, [1, 2, 3, 4]) == (HIT,) * 4
        assert suite.get(tier, [1]) == (HIT,)
        assert suite.put(tier, [5]) == (HIT,)
        assert tier.count.evicted == 1
        assert suite.get(tier, [1, 5]) == (HIT, HIT)
        assert suite.get(tier, [2, 3, 4]).count(MISS) == 1


def test_a_leased_block_is_never_evicted_and_the_lease_goes_back(make_host):
    tier = make_host(2)
    suite.put(tier, [1, 2])
    lease = tier.lease(suite.key_of(1))
    assert suite.put(tier, [3]) == (HIT,)
    assert suite.put(tier, [4]) == (HIT,)
    assert bytes(tier.view(lease.slot)) == suite.block_of(1)
    assert tier.num_leased == 1
    tier.release(lease)
    assert tier.num_leased == 0
    assert suite.put(tier, [5, 6]) == (HIT, HIT)
    assert suite.get(tier, [1]) == (MISS,)


def test_when_everything_is_leased_a_put_misses_and_nothing_breaks(make_host):
    tier = make_host(2)
    suite.put(tier, [1, 2])
    leases = [tier.lease(suite.key_of(n)) for n in (1, 2)]
    assert suite.put(tier, [3]) == (MISS,)
    for lease in leases:
        tier.release(lease)
    assert suite.get(tier, [1, 2]) == (HIT, HIT)


def test_a_bit_that_flips_in_host_memory_is_a_miss_and_the_block_is_forgotten(make_host):
    tier = make_host()
    suite.put(tier, [1, 2])
    lease = tier.lease(suite.key_of(1))
    tier.view(lease.slot)[100] ^= 1
    tier.release(lease)
    assert suite.get(tier, [1, 2]) == (MISS, HIT)
    assert tier.count.corrupt == 1
    assert suite.put(tier, [1]) == (HIT,)
    assert suite.get(tier, [1]) == (HIT,)
    assert tier.num_leased == 0


def test_a_block_damaged_while_two_read_it_is_freed_once(make_host):
    tier = make_host(2)
    suite.put(tier, [1])
    first, second = tier.lease(suite.key_of(1)), tier.lease(suite.key_of(1))
    tier.view(first.slot)[0] ^= 1
    assert tier.read(first, lambda view: [(bytearray(len(view)), view)]) is MISS
    assert tier.read(second, lambda view: [(bytearray(len(view)), view)]) is MISS
    tier.release(first)
    tier.release(second)
    assert suite.put(tier, [2, 3]) == (HIT, HIT)
    assert suite.get(tier, [2, 3]) == (HIT, HIT)


def test_a_block_that_is_being_written_is_missed_until_it_is_whole(make_host):
    tier = make_host()
    slot = tier.reserve(suite.key_of(1))
    begun, go = threading.Event(), threading.Event()

    def fill(view):
        yield view[:100], suite.block_of(1)[:100]
        begun.set()
        assert go.wait(PATIENCE_S)
        yield view[100:], suite.block_of(1)[100:]

    writer = threading.Thread(target=tier.write, args=(suite.key_of(1), slot, fill))
    writer.start()
    assert begun.wait(PATIENCE_S)
    assert suite.get(tier, [1]) == (MISS,)
    assert tier.find([suite.key_of(1)]) == 0
    go.set()
    writer.join()
    assert suite.get(tier, [1]) == (HIT,)


def test_a_slow_disk_does_not_hold_up_who_asks(make_disk, faulty, tmp_path):
    tier = make_disk(files=faulty(tmp_path, lambda call, offset: "slow"))
    tier._files.slow_s = 0.2
    start = time.monotonic()
    ticket = tier.put([suite.key_of(1)], [memoryview(suite.block_of(1))])
    assert tier.find([suite.key_of(1)]) == 0
    assert tier.capacity().num_blocks == 0
    assert tier.poll() == []
    assert time.monotonic() - start < 0.15
    assert suite.wait_for(tier, [ticket])[ticket] == (HIT,)
