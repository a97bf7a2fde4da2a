"""Which block goes first: ARC against the paper's figure, written plainly; and what it is for."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload._src.order import Arc, Lru, order_of


class PlainArc:
    """Figure 4 of Megiddo and Modha (FAST 2003), line by line, over lists: left is the least recently used end."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = deque(), deque(), deque(), deque()

    def replace(self, x):
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.popleft())
        else:
            self.b2.append(self.t2.popleft())

    def request(self, x):
        """Whether it was a hit."""
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return False
        if x in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return False
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popleft()
                self.replace(x)
            else:
                self.t1.popleft()
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.b2.popleft()
                self.replace(x)
        self.t1.append(x)
        return False


def request(order, capacity, key, slot=0, may_go=lambda slot: True):
    """As a tier does: a hit, or a victim where there is no room, then the block."""
    if order.get(key) is not None:
        order.touch(key)
        return True
    if len(order) >= capacity:
        assert order.evict(key, may_go) is not None
    order.add(key, slot)
    return False


@given(capacity=st.integers(1, 6), trace=st.lists(st.integers(0, 14), max_size=300))
def test_arc_does_what_the_paper_says(capacity, trace):
    plain, arc = PlainArc(capacity), Arc(capacity)
    for number in trace:
        assert request(arc, capacity, suite.key_of(number)) == plain.request(number)
        for mine, theirs in (
            (arc._once, plain.t1),
            (arc._again, plain.t2),
            (arc._gone_once, plain.b1),
            (arc._gone_again, plain.b2),
        ):
            assert list(mine) == [suite.key_of(n) for n in theirs]
        assert arc.target == plain.p


@pytest.mark.parametrize("policy", ["lru", "arc"])
@given(data=st.data())
def test_what_may_not_go_never_goes_and_no_slot_is_lost_or_given_twice(policy, data):
    capacity = data.draw(st.integers(1, 6))
    order, free, held, here = order_of(policy, capacity), list(range(capacity)), set(), {}
    for _ in range(data.draw(st.integers(0, 60))):
        key = suite.key_of(data.draw(st.integers(0, 12)))
        what = data.draw(st.sampled_from(["want", "want", "want", "hold", "let", "remove", "nameless"]))
        if what == "hold" and key in here:
            held.add(here[key])
        elif what == "let":
            held.clear()
        elif what == "remove" and order.get(key) not in held:
            slot = order.remove(key)
            assert slot == here.pop(key, None)
            free += [] if slot is None else [slot]
        elif what in ("want", "nameless"):
            if what == "want" and order.get(key) is not None:
                order.touch(key)
                continue
            if not free:
                victim = order.evict(key if what == "want" else None, lambda slot: slot not in held)
                assert (victim is None) == (set(here.values()) <= held)
                if victim is None:
                    continue
                assert victim[1] not in held
                assert here.pop(victim[0]) == victim[1]
                free.append(victim[1])
            if what == "want":
                here[key] = free.pop()
                order.add(key, here[key])
        assert len(order) == len(here)
        assert all(order.get(k) == s for k, s in here.items())
        assert sorted([*free, *here.values()]) == list(range(capacity))


def _hit_rate(order, capacity):
    """Of a working set that is asked for again and again, while prompts nobody repeats go by: three scanned blocks for each that is reused."""
    rng, hits, asked, scanned = random.Random(0), 0, 0, 1_000
    for _ in range(4_000):
        asked += 1
        hits += request(order, capacity, suite.key_of(int(rng.paretovariate(0.8)) % 120))
        for _ in range(3):
            scanned += 1
            request(order, capacity, suite.key_of(scanned))
    return hits / asked


def test_a_scan_costs_arc_less_than_the_least_recently_used(capsys):
    arc, lru = _hit_rate(Arc(64), 64), _hit_rate(Lru(), 64)
    print(f"hit rate of reused blocks amid a scan: arc {arc:.2f}, lru {lru:.2f}")
    assert arc > lru + 0.05


def test_a_tier_with_arc_keeps_the_promises_and_its_reused_blocks(make_host):
    suite.check_tier(lambda: make_host(8, policy="arc"))
    for policy, answers in (("arc", (Answer.HIT_VERIFIED,) * 2), ("lru", (Answer.MISS,) * 2)):
        tier = make_host(4, policy=policy)
        suite.put(tier, [1, 2])
        assert suite.get(tier, [1, 2]) == (Answer.HIT_VERIFIED,) * 2
        suite.put(tier, [10, 11, 12, 13, 14])
        assert suite.get(tier, [1, 2]) == answers
