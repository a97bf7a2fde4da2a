"""Seeded faults in the middle of everything: whatever happens, a block is right or missed, and nothing stays leased.

300 faults in every run, 10,000 where `OCTAVO_HYPOTHESIS=nightly`.
"""

import os
import random
import time

import numpy as np

from octavo_core.testing import tiers as suite
from octavo_core.testing.patience import PATIENCE_S

FAULTS = 10_000 if os.environ.get("OCTAVO_HYPOTHESIS") == "nightly" else 300
KINDS = {"read": ("EIO", "short", "flip", "slow"), "write": ("EIO", "ENOSPC", "short", "flip", "half", "slow"), "open": ("ENOSPC",)}


class Injector:
    """Faults with a probability that changes from phase to phase; counts them."""

    def __init__(self, seed):
        self.rng, self.count, self.chance = random.Random(seed), 0, 0.0

    def __call__(self, call, offset):
        if call not in KINDS or self.rng.random() >= self.chance:
            return None
        self.count += 1
        return self.rng.choice(KINDS[call])


def damage(rng, folder):
    """Flip, cut or wipe somewhere in a file; answers whether there was one."""
    files = sorted(folder.rglob("seg-*.kv"))
    if not files:
        return 0
    file = rng.choice(files)
    size = file.stat().st_size
    how = rng.choice(["flip", "flip", "wipe", "swap", "cut"])
    with open(file, "r+b") as out:
        at = rng.randrange(max(size - 4096, 1))
        out.seek(at)
        if how == "flip":
            byte = out.read(1) or b"\0"
            out.seek(at)
            out.write(bytes([byte[0] ^ 1 << rng.randrange(8)]))
        elif how == "wipe":
            out.write(bytes(rng.randrange(1, 4096)))
        elif how == "swap":
            page = out.read(4096)
            out.seek(rng.randrange(max(size - 4096, 1)))
            out.write(page)
        else:
            out.truncate(at)
    return 1


def fetch_and_compare(store, numbers, pieces_of, rng):
    fetch = store.fetch([suite.key_of(n) for n in numbers], 1.0)
    if fetch is None:
        return
    if rng.random() < 0.2:
        fetch.cancel()
        return
    end = time.monotonic() + PATIENCE_S
    while not fetch.is_done:
        fetch.wait(0.005)
        assert time.monotonic() < end, "a fetch ends"
    count = fetch.num_blocks
    assert count <= len(numbers)
    if count:
        for got, wanted in zip(fetch.take(), pieces_of(numbers[:count]), strict=True):
            assert np.array_equal(got, wanted), f"blocks {numbers[:count]} are what was saved"


def life(seed, folder, make_store, pieces_of, faulty):
    """One start of the tiers: saves and fetches while faults happen, then an end with nothing leased. Answers how many happened."""
    inject = Injector(seed)
    rng = random.Random(seed + 1)
    files = faulty(folder, inject)
    files.slow_s = 0.002
    store = make_store(rng.choice([4, 16]), 32, path=folder, files=files)
    injected = 0
    inject.chance = rng.choice([0.02, 0.1, 0.5])
    for _ in range(12):
        first = rng.randrange(40)
        numbers = list(range(first, first + rng.randint(1, 6)))
        if rng.random() < 0.5:
            store.save([suite.key_of(n) for n in numbers], pieces_of(numbers))
        else:
            fetch_and_compare(store, numbers, pieces_of, rng)
        if rng.random() < 0.25:
            injected += damage(rng, folder)
    assert store.wait_idle(20.0)
    assert store.host.num_leased == 0
    assert store.num_pending == 0
    assert store.jobs.num_failed == store.lower_jobs[0].num_failed == 0, "no job raises"
    store.close()
    return injected + inject.count


def test_no_injected_fault_gives_a_wrong_byte_or_keeps_a_lease(tmp_path, make_store, pieces_of, faulty):
    count = seed = 0
    while count < FAULTS:
        count += life(seed, tmp_path / str(seed // 8), make_store, pieces_of, faulty)
        seed += 1
