"""What a disk can do to a block: flip, tear, lose, refuse, stall. Each time the answer is the right bytes or a miss."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload import ThreadFiles

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS
SLOT = 3 * 4096


def segments(path):
    return sorted(path.rglob("seg-*.kv"))


def reopened(make_disk, tier, **options):
    make_disk.close(tier)
    return make_disk(**options)


def test_a_restart_finds_what_was_stored_in_the_order_of_its_writing(make_disk):
    tier = make_disk(4)
    suite.put(tier, [1, 2, 3, 4])
    tier = reopened(make_disk, tier, blocks=4)
    assert "4 blocks found" in tier.told
    assert suite.get(tier, [1, 2, 3, 4]) == (HIT,) * 4
    tier = reopened(make_disk, tier, blocks=4)
    suite.put(tier, [5])
    assert suite.get(tier, [1, 2, 3, 4, 5]).count(HIT) == 4


@pytest.mark.parametrize("where", [5, 40, 90, 4096, 4096 + 4607], ids=["magic", "key", "length", "first byte", "last byte"])
def test_a_flipped_bit_is_a_miss_wherever_it_is(make_disk, tmp_path, where):
    tier = make_disk()
    suite.put(tier, [1, 2])
    make_disk.close(tier)
    (file,) = segments(tmp_path)
    data = bytearray(file.read_bytes())
    data[where] ^= 8
    file.write_bytes(data)
    tier = make_disk()
    assert suite.get(tier, [1, 2]) == (MISS, HIT)
    assert suite.put(tier, [1]) == (HIT,)
    assert suite.get(tier, [1, 2]) == (HIT, HIT)


def test_a_flipped_bit_under_a_running_tier_is_counted_and_forgotten(make_disk, tmp_path):
    tier = make_disk()
    suite.put(tier, [1])
    (file,) = segments(tmp_path)
    with open(file, "r+b") as out:
        out.seek(4096 + 7)
        out.write(bytes([block_byte(1, 7) ^ 1]))
    assert suite.get(tier, [1]) == (MISS,)
    assert (tier.count.corrupt, tier.capacity().num_blocks, tier.state) == (1, 0, "on")


def block_byte(number, at):
    return suite.block_of(number)[at]


def test_two_blocks_that_changed_places_are_both_misses(make_disk, tmp_path):
    """Right bytes under a wrong name: only the payloads are exchanged."""
    tier = make_disk()
    suite.put(tier, [1])
    suite.put(tier, [2])
    (file,) = segments(tmp_path)
    data = bytearray(file.read_bytes())
    first, second = slice(4096, SLOT), slice(SLOT + 4096, 2 * SLOT)
    data[first], data[second] = data[second], data[first]
    file.write_bytes(data)
    assert suite.get(tier, [1, 2]) == (MISS, MISS)


def test_a_truncated_file_is_dropped_and_the_rest_is_served(make_disk, tmp_path):
    tier = make_disk(8)
    suite.put(tier, range(4))
    suite.put(tier, range(4, 8))
    make_disk.close(tier)
    os.truncate(segments(tmp_path)[0], SLOT + 5000)
    tier = make_disk(8)
    assert suite.get(tier, range(8)).count(HIT) == 4


def test_a_file_truncated_under_a_running_tier_is_a_miss(make_disk, tmp_path):
    tier = make_disk(8)
    suite.put(tier, range(4))
    os.truncate(segments(tmp_path)[0], SLOT + 5000)
    answers = suite.get(tier, range(4))
    assert answers.count(HIT) == 1
    assert tier.count.errors >= 1


def test_a_half_written_slot_is_a_miss(make_disk, faulty, tmp_path):
    """The header is written over an older block, the block is not: as after a loss of power."""
    tier = make_disk(files=faulty(tmp_path, lambda call, offset: "half" if call == "write" else None))
    suite.put(tier, [1])
    assert suite.get(tier, [1]) == (MISS,)
    tier = reopened(make_disk, tier)
    assert suite.get(tier, [1]) == (MISS,)


def test_a_block_that_is_being_written_slowly_is_missed_until_it_is_whole(make_disk, tmp_path):
    """As in LMCache#207, where the second request read what the first was still writing."""
    go, begun = threading.Event(), threading.Event()

    class Slow(ThreadFiles):
        def write(self, fd, data, offset):
            super().write(fd, [data[0]], offset)  # the header is there, the block is not
            begun.set()
            assert go.wait(600.0)
            super().write(fd, data, offset)

    tier = make_disk(files=Slow(tmp_path))
    ticket = tier.put([suite.key_of(1)], [memoryview(suite.block_of(1))])
    assert begun.wait(600.0)
    assert suite.get(tier, [1]) == (MISS,)
    assert tier.find([suite.key_of(1)]) == 0
    go.set()
    assert suite.wait_for(tier, [ticket])[ticket] == (HIT,)
    assert suite.get(tier, [1]) == (HIT,)


@pytest.mark.parametrize("fault", ["ENOSPC", "EIO", "EROFS", "short"])
def test_a_write_that_fails_makes_the_tier_read_only(make_disk, faulty, tmp_path, fault):
    trouble = []
    tier = make_disk(files=faulty(tmp_path, lambda call, offset: fault if call == "write" and trouble else None))
    suite.put(tier, [1, 2])
    trouble.append(1)
    assert suite.put(tier, [3]) == (MISS,)
    assert (tier.state, tier.count.errors) == ("read-only", 1)
    trouble.clear()
    assert suite.put(tier, [4]) == (MISS,)
    assert suite.get(tier, [1, 2, 3, 4]) == (HIT, HIT, MISS, MISS)


def test_reads_that_fail_turn_the_tier_off(make_disk, faulty, tmp_path):
    trouble = []
    tier = make_disk(files=faulty(tmp_path, lambda call, offset: "EIO" if call == "read" and trouble else None))
    suite.put(tier, [1, 2, 3, 4])
    trouble.append(1)
    assert suite.get(tier, [1, 2, 3]) == (MISS,) * 3
    assert (tier.state, tier.count.errors) == ("off", 3)
    assert tier.find([suite.key_of(4)]) == 0
    trouble.clear()
    assert suite.get(tier, [4]) == (MISS,)
    assert suite.put(tier, [5]) == (MISS,)


def test_a_full_disk_keeps_the_tier_at_its_size(make_disk, faulty, tmp_path):
    opened = []

    def fault(call, offset):
        if call == "open":
            opened.append(1)
            return "ENOSPC" if len(opened) > 1 else None
        return None

    tier = make_disk(8, files=faulty(tmp_path, fault))
    assert suite.put(tier, [1, 2, 3, 4]) == (HIT,) * 4
    assert suite.put(tier, [5, 6]) == (HIT, HIT)
    assert suite.get(tier, [1, 2, 3, 4, 5, 6]).count(HIT) == 4
    assert tier.state == "on"


def test_a_disk_without_any_room_is_read_only_and_says_so(make_disk, faulty, tmp_path):
    tier = make_disk(files=faulty(tmp_path, lambda call, offset: "ENOSPC" if call == "open" else None))
    assert suite.put(tier, [1]) == (MISS,)
    assert tier.state == "read-only"
    assert tier.count.errors == 1


def test_blocks_of_another_identity_in_the_same_path_are_not_found(make_disk):
    ours, theirs = make_disk(identity=b"a" * 32), make_disk(identity=b"b" * 32)
    suite.put(ours, [1])
    assert suite.get(theirs, [1]) == (MISS,)
    suite.put(theirs, [1])
    assert suite.get(ours, [1]) == (HIT,)


def test_two_tiers_of_one_identity_do_not_share_files(make_disk):
    first, second = make_disk(), make_disk()
    suite.put(first, range(8))
    suite.put(second, range(8, 16))
    assert suite.get(first, range(8)) == (HIT,) * 8


def test_the_budget_of_a_path_holds_over_all_identities_and_old_ones_go(make_disk, tmp_path):
    old = make_disk(4, identity=b"a" * 32)
    suite.put(old, range(4))
    new = make_disk(4, identity=b"b" * 32)
    assert suite.put(new, [1]) == (MISS,)  # the other has it all, and is in use
    make_disk.close(old)
    make_disk.close(new)
    new = make_disk(4, identity=b"b" * 32)
    assert suite.put(new, [1]) == (HIT,)
    assert sum(file.stat().st_size for file in segments(tmp_path)) <= 4 * SLOT


WRITER = """
import sys, pathlib, itertools
from octavo_core.testing import tiers as suite
from octavo_offload import DiskTier, Jobs
tier = DiskTier(pathlib.Path(sys.argv[1]), 16 * 12288, suite.BLOCK_BYTES, b"i" * 32, Jobs(3, "t"), segment_bytes=4 * 12288)
for n in itertools.count(int(sys.argv[2]), 4):
    answers = suite.put(tier, range(n, n + 4))
    print(*(k for k, a in zip(range(n, n + 4), answers) if a), flush=True)
"""


def test_a_writer_that_is_killed_loses_nothing_it_was_told_is_stored(make_disk, tmp_path):
    rng, start = random.Random(1), 0
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(start)], stdout=subprocess.PIPE, text=True)
        told = [int(n) for n in child.stdout.readline().split()]
        time.sleep(0.02 + 0.05 * rng.random())
        os.kill(child.pid, signal.SIGKILL)
        told += [int(n) for line in child.stdout.read().splitlines(keepends=True) if line.endswith("\n") for n in line.split()]
        child.wait()
        child.stdout.close()
        tier = make_disk(16)
        assert all(suite.get(tier, told[-12:])), f"of {told[-12:]} some are gone"
        suite.get(tier, range(start, start + len(told) + 8))
        make_disk.close(tier)
        start += 1000
