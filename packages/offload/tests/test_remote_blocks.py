"""The books of a store: who has which bytes of its memory, and what members are told."""

import itertools
import random

from octavo_core.testing import tiers as suite
from octavo_offload.node import Blocks


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def kept(blocks, identity, number, size=4096):
    address = blocks.reserve(identity, suite.key_of(number), size)
    if address is not None:
        blocks.view(address, size)[:] = suite.block_of(number, size)
        blocks.publish(address, size, number)
    return address


def test_a_leased_block_stays_until_its_quarantine_is_over():
    clock = Clock()
    blocks = Blocks(8 * 4096, window_bytes=1 << 20, lease_s=1.0, quarantine_s=2.0, clock=clock)
    for n in range(8):
        assert kept(blocks, b"a", n) is not None
    leased = blocks.lease(1, b"a", [suite.key_of(n) for n in range(8)])
    assert None not in leased.entries
    assert kept(blocks, b"a", 99) is None
    blocks.release_member(1)
    clock.now = 1.5
    assert kept(blocks, b"a", 99) is None
    clock.now = 2.5
    assert blocks.num_leased == 0
    assert kept(blocks, b"a", 99) is not None
    assert blocks.num_expired == 1


def test_windows_bound_what_a_member_and_all_together_may_lease():
    blocks = Blocks(64 * 4096, window_bytes=6 * 4096, member_bytes=4 * 4096)
    for n in range(10):
        kept(blocks, b"a", n)
    keys = [suite.key_of(n) for n in range(10)]
    first, second = blocks.lease(1, b"a", keys), blocks.lease(2, b"a", keys)
    assert [sum(e is not None for e in leased.entries) for leased in (first, second)] == [4, 2]
    blocks.release(2, first.lease)
    assert blocks.num_leased == 6
    blocks.release(1, first.lease)
    assert blocks.num_leased == 2


def test_a_block_that_is_being_written_is_not_found_and_its_slot_not_given_twice():
    blocks = Blocks(8 * 4096)
    address = blocks.reserve(b"a", suite.key_of(1), 4096)
    assert blocks.reserve(b"a", suite.key_of(1), 4096) is None
    assert blocks.lease(1, b"a", [suite.key_of(1)]).entries == [None]
    others = {kept(blocks, b"a", n) for n in range(2, 30)}
    assert address not in others
    blocks.abandon(address, 4096)
    assert kept(blocks, b"a", 31) is not None


def test_any_history_of_a_store_keeps_its_books():
    rng, clock = random.Random(3), Clock()
    blocks = Blocks(64 * 4096, lease_s=1.0, quarantine_s=1.0, clock=clock)
    sizes = {b"a": 1000, b"b": 4096, b"c": 9000, b"d": 20000}
    cursors, mirrors, leases = dict.fromkeys(sizes, 0), {i: set() for i in sizes}, []
    for _ in range(2000):
        identity = rng.choice(list(sizes))
        number, action = rng.randrange(200), rng.random()
        if action < 0.5:
            kept(blocks, identity, number, sizes[identity])
        elif action < 0.8:
            leased = blocks.lease(1, identity, [suite.key_of(number + i) for i in range(3)])
            for i, entry in enumerate(leased.entries):
                if entry is not None:
                    assert entry.seal == number + i
                    assert bytes(blocks.view(entry.address, sizes[identity])) == suite.block_of(number + i, sizes[identity])
            leases.append(leased.lease)
        elif leases and action < 0.95:
            blocks.release(1, leases.pop(rng.randrange(len(leases))))
        else:
            clock.now += 0.3
            news = blocks.changes(identity, cursors[identity])
            cursors[identity] = news.cursor
            mirror = set() if news.reset else mirrors[identity]
            mirror |= {news.added[i : i + 8] for i in range(0, len(news.added), 8)}
            mirror -= {news.removed[i : i + 8] for i in range(0, len(news.removed), 8)}
            mirrors[identity] = mirror
            assert mirror == {key[:8] for key in blocks._directories[identity].blocks}
        check_books(blocks)
    assert blocks.count.evicted > 100


def check_books(blocks):
    """Every byte of a segment belongs to one slot, which is free, written or published."""
    taken = [(a, s) for s, free in blocks._free.items() for a in free]
    taken += [(b.address, s) for s, order in blocks._order.items() for b in order.values()]
    taken += [(a, None) for a in blocks._writing]
    assert len({a for a, _ in taken}) == len(taken)
    for (a, size), (b, _) in itertools.pairwise(sorted((a, s) for a, s in taken if s)):
        assert a + size <= b
    for segment, size in enumerate(blocks._sizes):
        inside = sum(a // blocks.segment_bytes == segment for a, _ in taken)
        assert inside == (blocks.segment_bytes // size if size else 0)
    assert sorted(blocks._spare) == [i for i, size in enumerate(blocks._sizes) if not size]


def test_a_directory_that_is_too_far_behind_is_told_everything(monkeypatch):
    from octavo_offload._src.remote import blocks as module

    monkeypatch.setattr(module, "_LOG_LENGTH", 4)
    monkeypatch.setattr(
        module._Directory,
        "__init__",
        lambda self: self.__dict__.update(blocks={}, log=module.deque(maxlen=4), cursor=1, forgotten=0),
    )
    blocks = Blocks(64 * 4096)
    for n in range(3):
        kept(blocks, b"a", n)
    cursor = blocks.changes(b"a", 0).cursor
    for n in range(3, 6):
        kept(blocks, b"a", n)
    assert not blocks.changes(b"a", cursor).reset
    for n in range(6, 9):
        kept(blocks, b"a", n)
    news = blocks.changes(b"a", cursor)
    assert news.reset
    assert len(news.added) == 9 * 8
    assert blocks.changes(b"a", 10_000).reset
