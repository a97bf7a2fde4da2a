"""The functions of the tree alone under random histories with bogus arguments mixed in.

Handles are current, stale, of blocks there are not, repeated, or out of order. A refused call says why and changes nothing at all; a
call that is served agrees with a dict of prefixes.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import octavo_kvcache
from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec
from octavo_kvcache import NOT_A_PATH, STALE, Match

pytestmark = pytest.mark.slow

SPEC = CacheSpec(num_blocks=(9,), block_size=2, max_sequences=1, max_blocks=4)
SIZE, WIDTH, USABLE = 2, 4, 8
SPACES = np.array([[5, 0], [5, 1]], np.uint32)
EMPTY = octavo_kvcache.init(SPEC, max_events=32)

Names = list[tuple[int, int]]
"""Handles: ids and generations."""
Prefix = tuple[int, ...]
"""Namespace, then tokens."""

TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=SPEC.max_len)
BOGUS = st.tuples(st.sampled_from([-(2**31), -1, 1, 2, 5, 8, 9, 2**31 - 1]), st.integers(-1, 4))


class Machine(RuleBasedStateMachine):
    """See the module. `functions` are the jitted functions of the tree."""

    functions: dict

    @initialize()
    def begin(self) -> None:
        self.radix = EMPTY
        self.cached: dict[Prefix, tuple[int, int]] = {}
        self.private: Names = []
        self.leases: list[Prefix] = []
        self.loans: list[tuple[octavo_kvcache.Loan, list[Prefix]]] = []
        self.old: list[tuple[str, tuple]] = []
        self.seen: set[tuple[int, int]] = set()

    # -- the model

    def held(self, prefix: Prefix) -> bool:
        ends = [*self.leases, *(p for _, lent in self.loans for p in lent)]
        return any(end[: len(prefix)] == prefix for end in ends)

    def idle(self) -> list[Prefix]:
        return [p for p in self.cached if not self.held(p)]

    def path(self, prefix: Prefix) -> list[Prefix]:
        return [prefix[:n] for n in range(1 + SIZE, len(prefix) + 1, SIZE)]

    def names(self, prefix: Prefix) -> Names:
        return [self.cached[p] for p in self.path(prefix)]

    def is_current(self, name: tuple[int, int]) -> bool:
        return name in self.private or name in self.cached.values()

    # -- calls

    def call(self, name: str, *arguments):
        """Run a function; what it answers besides the tree, in NumPy."""
        self.before = self.radix
        self.radix, *answer = self.functions[name](self.radix, *arguments)
        return jax.device_get(answer)

    def refused(self, name: str, *arguments) -> int:
        """Status of a call that must change nothing."""
        status = int(self.call(name, *arguments)[-1])
        assert status != OK
        same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(self.before), jax.tree.leaves(self.radix), strict=True)]
        assert all(same), f"a refused {name} changed the tree"
        return status

    def check(self) -> None:
        radix = jax.device_get(self.radix)
        self.functions["audited"](radix, SPEC)
        counters = radix.read()
        assert int(counters.num_free) == USABLE - len(self.cached) - len(self.private)
        assert int(counters.num_evictable) == len(self.idle())
        self.seen |= {*self.private, *self.cached.values()}
        names = sorted(self.seen)
        pads = [(0, 0)] * (-len(names) % 32)
        ids, generations = np.array([*names, *pads], np.int32).reshape(-1, 2).T
        current = self.functions["is_current"](self.radix, ids, generations)
        assert np.asarray(current)[: len(names)].tolist() == [self.is_current(n) for n in names], (
            "exactly the uses there are, are current"
        )

    def find(self, space: int, tokens: list[int]) -> Match:
        return self.functions["match"](self.radix, padded_tokens(tokens), np.int32(len(tokens)), SPACES[space])

    # -- what is served

    @rule(space=st.integers(0, 1), tokens=TOKENS, length=st.integers(-3, 40))
    def match(self, space, tokens, length) -> None:
        """Matching finds what is there, and the best block to go on from."""
        answer = self.functions["match"](self.radix, padded_tokens(tokens), np.int32(min(length, len(tokens))), SPACES[space])
        size = max(0, min(length, len(tokens)))
        longest: Prefix = (space,)
        while len(longest) - 1 + SIZE <= size and (space, *tokens[: len(longest) - 1 + SIZE]) in self.cached:
            longest = (space, *tokens[: len(longest) - 1 + SIZE])
        assert as_names(answer) == self.names(longest)
        tail = self.functions["match_tail"](self.radix, answer, padded_tokens(tokens), np.int32(size), SPACES[space])
        there = [p for p in self.cached if len(p) == len(longest) + SIZE and p[:-SIZE] == longest]
        wanted = tokens[len(longest) - 1 : size]
        best = max((common(p[-SIZE:], wanted) for p in there), default=0)
        assert int(tail.length) == best
        chosen = [p for p in there if self.cached[p][0] == int(tail.block_id)]
        assert [common(p[-SIZE:], wanted) for p in chosen] == ([best] if best else [])

    @rule(count=st.integers(-2, 6))
    def allocate(self, count) -> None:
        free = USABLE - len(self.cached) - len(self.private)
        if not 0 <= count <= min(free, WIDTH):
            assert self.refused("allocate", np.int32(count), np.int32(0)) == OUT_OF_BLOCKS
            return
        ids, generations, status = self.call("allocate", np.int32(count), np.int32(0))
        assert status == OK
        names = list(zip(ids[:count].tolist(), generations[:count].tolist(), strict=True))
        assert not any(ids[count:])
        assert all(g > max((old for b, old in self.seen if b == i), default=0) for i, g in names), "a new use has a new name"
        self.private += names
        self.check()

    @rule(space=st.integers(0, 1), tokens=TOKENS)
    def insert(self, space, tokens) -> None:
        """File as many blocks of a prompt as are allocated, after what is found of it."""
        found = jax.device_get(self.find(space, tokens))
        start, blocks = int(found.num_blocks), len(tokens) // SIZE
        names = self.private[: blocks - start]
        if start:
            if self.call("lease", found.block_ids, found.generations) != [OK]:
                raise AssertionError("what was found cannot be leased")
            self.leases.append((space, *tokens[: start * SIZE]))
        work = padded_tokens(tokens[start * SIZE : (start + len(names)) * SIZE])
        ids, generations, status = self.call("insert", found, work, *split(names), SPACES[space])
        assert status == OK
        assert list(zip(ids.tolist(), generations.tolist(), strict=True))[: len(names)] == names
        del self.private[: len(names)]
        for n, name in enumerate(names):
            self.cached[(space, *tokens[: (start + n + 1) * SIZE])] = name
        if names:
            if start:
                self.leases.pop()
            self.leases.append((space, *tokens[: (start + len(names)) * SIZE]))
        self.check()

    @precondition(lambda self: self.cached and len(self.private) >= 1)
    @rule(data=st.data())
    def insert_what_is_there(self, data) -> None:
        """A prefix computed twice: the lease goes to the canonical blocks, the other copies are freed."""
        prefix = data.draw(st.sampled_from(sorted(self.cached)))
        names = self.private[: len(self.path(prefix))]
        there, tokens = self.names(prefix)[: len(names)], list(prefix[1:])
        empty = jax.device_get(self.find(prefix[0], []))
        ids, generations, status = self.call(
            "insert", empty, padded_tokens(tokens[: len(names) * SIZE]), *split(names), SPACES[prefix[0]]
        )
        assert status == OK
        assert list(zip(ids.tolist(), generations.tolist(), strict=True))[: len(there)] == there
        del self.private[: len(names)]
        self.leases.append(prefix[: 1 + len(names) * SIZE])
        self.check()

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def lease(self, data) -> None:
        prefix = data.draw(st.sampled_from(sorted(self.cached)))
        assert self.call("lease", *split(self.names(prefix))) == [OK]
        self.leases.append(prefix)
        self.check()

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 7))
    def release(self, which) -> None:
        prefix = self.leases.pop(which % len(self.leases))
        names = self.names(prefix)
        assert self.call("release", *split(names)) == [OK]
        if prefix not in self.leases:
            assert self.refused("release", *split(names)) == STALE, "a lease ends once"
        self.old.append(("release", split(names)))
        self.check()

    @precondition(lambda self: self.private)
    @rule(count=st.integers(1, 4))
    def give_back(self, count) -> None:
        names = self.private[:count]
        assert self.call("release", *split(names)) == [OK]
        del self.private[:count]
        self.old.append(("release", split(names)))
        self.check()

    @rule(count=st.integers(-2, 12))
    def evict(self, count) -> None:
        idle = self.idle()
        self.call("evict", np.int32(count))
        self.forget(idle, min(max(count, 0), len(idle)))
        self.check()

    def forget(self, may_go: list[Prefix], count: int) -> None:
        filed = set(np.flatnonzero(np.asarray(self.radix.slot) >= 0).tolist())
        gone = {p for p, (block, _) in self.cached.items() if block not in filed}
        assert len(gone) == count
        assert gone <= set(may_go)
        assert not any(p[: len(q)] == q for q in gone for p in self.cached if p not in gone), "a parent went before its child"
        for p in gone:
            self.old.append(("lease", split(self.names(p))))
        for p in gone:
            del self.cached[p]

    @rule(count=st.integers(-2, 6))
    def lend(self, count) -> None:
        idle = self.idle()
        (loan,) = self.call("lend", np.int32(count))
        names = {name: p for p, name in self.cached.items()}
        lent = [names[n] for n in zip(loan.block_ids.tolist(), loan.generations.tolist(), strict=True) if n[0]]
        assert len(lent) == int(loan.num_blocks) == max(0, min(count, WIDTH, len(idle)))
        assert set(lent) <= set(idle)
        if lent:
            self.loans.append((loan, lent))
        self.check()

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 3), stored=st.lists(st.booleans(), min_size=WIDTH, max_size=WIDTH))
    def settle(self, which, stored) -> None:
        loan, lent = self.loans.pop(which % len(self.loans))
        assert self.call("settle", loan, np.array(stored)) == [OK]
        may_go = {p for p, there in zip(lent, stored, strict=False) if there and not self.held(p)}
        while bad := {p for p in may_go if any(q[:-SIZE] == p for q in self.cached if q not in may_go)}:
            may_go -= bad
        self.forget(list(may_go), len(may_go))
        assert self.refused("settle", loan, np.array(stored)) == STALE, "a loan is settled once"
        self.old.append(("settle", (loan, np.array(stored))))
        self.check()

    # -- what is refused

    @precondition(lambda self: self.old)
    @rule(which=st.integers(0, 63))
    def replay(self, which) -> None:
        """A call from the past, with the names of the past."""
        name, arguments = self.old[which % len(self.old)]
        past = list(zip(*(a.tolist() for a in arguments), strict=True)) if name != "settle" else []
        past = [n for n in past if n[0]]
        if name != "release" or not any(self.names(p) == past for p in self.leases):
            assert self.refused(name, *arguments) == STALE

    @rule(name=st.sampled_from(["lease", "release"]), bogus=st.lists(BOGUS, min_size=1, max_size=WIDTH))
    def invent(self, name, bogus) -> None:
        """Names out of the air. What is current by chance must still be a path that is held."""
        if self.answer(name, bogus) == OK:
            return
        assert self.refused(name, *split(bogus)) == self.answer(name, bogus)

    def answer(self, name: str, names: Names) -> int:
        """Status that the docstrings promise."""
        prefixes = {n: p for p, n in self.cached.items()}
        if name == "lease":
            if any(n not in prefixes for n in names):
                return STALE
            return OK if [self.names(p) for p in [prefixes[names[-1]]]] == [names] else NOT_A_PATH
        if not all(map(self.is_current, names)):
            return STALE
        path = [n for n in names if n in prefixes]
        follow = [n for n, after in zip(names, [*names[1:], (0, 0)], strict=True) if n in prefixes and after not in prefixes]
        if any(prefixes[n] not in self.leases for n in follow):
            return STALE
        right = path == names[: len(path)] and (not path or self.names(prefixes[path[-1]]) == path)
        return OK if right and len(set(names)) == len(names) else NOT_A_PATH

    @precondition(lambda self: any(len(p) > 1 + SIZE for p in self.cached))
    @rule(data=st.data(), name=st.sampled_from(["lease", "release"]))
    def shuffle(self, data, name) -> None:
        """The blocks of a path in another order, with a gap, or one named twice."""
        prefix = data.draw(st.sampled_from(sorted(p for p in self.cached if len(p) > 1 + SIZE)))
        path = self.names(prefix)
        wrong = [path[::-1], path[1:], [*path[:-1], path[0]], [path[0], *path][:WIDTH]]
        names = data.draw(st.sampled_from([w for w in wrong if w != path]))
        assert self.refused(name, *split(names)) in ({NOT_A_PATH} if name == "lease" else {NOT_A_PATH, STALE})

    @precondition(lambda self: self.cached and self.private)
    @rule(data=st.data(), space=st.integers(0, 1), tokens=TOKENS)
    def insert_wrongly(self, data, space, tokens) -> None:
        """After a prefix that is stale, not held, or not what it says; blocks that are not private, or twice the same."""
        found = jax.device_get(self.find(space, tokens))
        mine, cached = self.private[0], data.draw(st.sampled_from(sorted(self.cached.values())))
        work = padded_tokens(tokens[:SIZE])
        for names in ([cached], [mine, mine], [mine, cached], [(mine[0], mine[1] - 1)], [(99, 1)], [(-3, 1)]):
            assert self.refused("insert", found, work, *split(names), SPACES[space]) in (NOT_A_PATH, STALE)
        if not found.num_blocks:
            return
        last = int(found.num_blocks) - 1
        held = (space, *tokens[: (last + 1) * SIZE]) in self.leases
        stale, outside = found.generations.copy(), found.block_ids.copy()
        stale[last] -= 1
        outside[last] = 99
        assert self.refused("insert", found._replace(generations=stale), work, *split([mine]), SPACES[space]) == STALE
        assert self.refused("insert", found._replace(block_ids=outside), work, *split([mine]), SPACES[space]) == STALE
        wrong = NOT_A_PATH if held else STALE
        assert self.refused("insert", found, work, *split([mine]), SPACES[1 - space]) == wrong
        assert (
            self.refused("insert", found._replace(chain=found.chain + np.uint32(1)), work, *split([mine]), SPACES[space]) == wrong
        )
        if not held:
            assert self.refused("insert", found, work, *split([mine]), SPACES[space]) == STALE

    @precondition(lambda self: self.loans)
    @rule(which=st.integers(0, 3), change=st.integers(0, 4))
    def settle_wrongly(self, which, change) -> None:
        """Loans that nobody was given: of another use, of blocks there are not, of one block twice."""
        loan, _ = self.loans[which % len(self.loans)]
        ids, generations, lent = (x.copy() for x in loan[:3])
        if change == 0:
            generations[0] += 1
        elif change == 1:
            ids[0] = 9
        elif change == 2:
            lent[0] += 2
        elif change == 3:
            ids[1], generations[1], lent[1] = ids[0], generations[0], lent[0]
        else:
            lent[0] += 1
        bogus = loan._replace(block_ids=ids, generations=generations, lent=lent)
        assert self.refused("settle", bogus, np.ones(WIDTH, bool)) == STALE


def common(block, wanted) -> int:
    """Tokens at the start that agree; one block's fewer than all, since all of a block is no tail."""
    same = [a == b for a, b in zip(block, wanted, strict=False)]
    return min(same.index(False) if False in same else len(same), SIZE - 1)


def padded_tokens(tokens) -> np.ndarray:
    return np.array([*tokens, *[-7] * (SPEC.max_len - len(tokens))], np.int32)


def split(names: Names) -> tuple[np.ndarray, np.ndarray]:
    rows = [*names, *[(0, 0)] * (WIDTH - len(names))]
    return np.array([n[0] for n in rows], np.int32), np.array([n[1] for n in rows], np.int32)


def as_names(found: Match) -> Names:
    return [n for n in zip(np.asarray(found.block_ids).tolist(), np.asarray(found.generations).tolist(), strict=True) if n[0]]


def test_refused_calls_change_nothing_and_served_ones_agree_with_a_dict_of_prefixes(by_hand, audited, search):
    looking = {"audited": audited} | {
        name: jax.jit(getattr(octavo_kvcache, name)) for name in ("match", "match_tail", "is_current")
    }
    policy = octavo_kvcache.RadixCache(SPEC).policy
    search(type("Histories", (Machine,), {"functions": by_hand(SPEC, policy) | looking}), examples=300, steps=12)
