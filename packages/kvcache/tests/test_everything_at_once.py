"""Random histories with everything on: partial tails, tenants with quotas, every policy, pins, loans, sequences that load.

After each rule the books are audited, and compared with a plain model that also has KV memory: whatever a sequence, a
pin or a loan relies on must contain what it should.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from octavo_core.plan import OK, OUT_OF_BLOCKS
from octavo_core.specs import CacheSpec
from octavo_kvcache import STALE
from octavo_kvcache._src.evict import time_of

pytestmark = pytest.mark.slow

SPEC = CacheSpec(num_blocks=(10, 12), block_size=3, max_sequences=4, max_blocks=4, kinds=("full", "latent"))
SIZE, LONGEST, MAX_COMMITS, ROWS = 3, 12, 3, 4
TOKENS = st.lists(st.integers(0, 1), max_size=LONGEST)
MASK = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
RANKS = st.lists(st.integers(0, 3), min_size=ROWS, max_size=ROWS)


def machine_for(driver, model_module, quotas):
    tenants = st.integers(0, max(len(quotas) - 1, 0))
    rank_of = jax.jit(lambda stamp, now: driver.object.policy.rank(stamp, now, 28))

    class Histories(RuleBasedStateMachine):
        @initialize()
        def begin(self) -> None:
            driver.reset()
            self.model = model_module.Model(SPEC, quotas, MAX_COMMITS)
            self.issued: dict[int, int] = {}
            self.settled: list[tuple[object, np.ndarray]] = []
            self.unpinned: list[tuple[list[int], list[int]]] = []

        # -- what must hold after each rule

        def check(self) -> None:
            model, radix = self.model, driver.host.radix
            blocks = model_module.blocks_of(radix)
            assert set(blocks) == model.cached
            counters, leases, refcount = radix.read(), model.leases(), radix.refcount
            assert int(counters.num_free) == model.num_free()
            assert counters.used.tolist() == model.used()
            assert counters.evictable.tolist() == model.by_tenant(model.idle())
            assert all(refcount[block] == leases[prefix] for prefix, block in blocks.items())
            for index, row in model.rows.items():
                self.check_row(index, row, blocks)
            for prefix in {p for end, _, _ in model.pins for p in model.path(end)} | {p for lent, _ in model.loans for p in lent}:
                assert all(model.contains(g, blocks[prefix], prefix, SIZE) for g in range(SPEC.groups))

        def check_row(self, index, row, blocks) -> None:
            """What a row may read is there, in every group."""
            table = driver.host.sequences.block_table[:, index]
            assert (table[0, : row.held] > 0).all()
            assert not table[0, row.held :].any()
            for column in range(min(-(-row.computed // SIZE), row.held)):
                prefix, length = row.prefix(column + 1, SIZE), min(row.computed - column * SIZE, SIZE)
                for group in range(SPEC.groups):
                    known = prefix[: 2 + column * SIZE + length]
                    assert self.model.contains(group, int(table[group, column]), known, length), "a block holds other KV"
                if column < row.committed:
                    assert table[0, column] == blocks[prefix]
            if row.tail:
                assert driver.host.sequences.tail[index] == blocks[row.tail]

        def check_victims(self, before, gone, count, given) -> None:
            """What went was idle, is as many as was missing, came first in its tenant's order, and was not under a quota."""
            radix, model = before, self.model
            idle, used = set(model.idle()), model.used()
            assert len(gone) == max(count, 0)
            assert gone <= idle, "a leased block went"
            assert not any(q[: len(p)] == p for p in gone for q in model.cached - gone), "a block went before its descendant"
            lost = model.by_tenant(gone)
            assert all(n <= max(u - q, 0) + g for n, u, q, g in zip(lost, used, model.quotas, given, strict=True))
            order = self.order(radix)
            for tenant in range(len(model.quotas)):
                mine = sorted(order[p] for p in idle if p[0] == tenant)
                assert sorted(order[p] for p in gone if p[0] == tenant) == mine[: lost[tenant]], "not in the policy's order"

        def order(self, radix):
            """Place of each prefix in the policy's order."""
            rank = rank_of(jnp.asarray(radix.stamp), jax.tree.map(jnp.asarray, time_of(radix)))
            blocks = model_module.blocks_of(radix)
            return {p: (int(rank[b]), -int(radix.depth[b])) for p, b in blocks.items()}

        def take(self, before, count, given) -> None:
            gone = self.model.cached - set(model_module.blocks_of(driver.host.radix))
            self.check_victims(before, gone, count, given)
            self.model.cached -= gone

        # -- sequences

        @rule(
            index=st.integers(0, ROWS - 1),
            tenant=tenants,
            space=st.integers(0, 1),
            tokens=TOKENS,
            want=st.integers(0, 5),
            reserve=st.integers(0, 3),
            loading=st.booleans(),
        )
        def admit(self, index, tenant, space, tokens, want, reserve, loading) -> None:
            model = self.model
            blocks, tail, candidates = model.matched(tenant, space, tokens)
            idle, path = set(model.idle()), model.path((tenant, space, *tokens[: blocks * SIZE]))
            lack = max(want - blocks, 0)
            room = model.spare(tenant) - sum(p in idle for p in path) - reserve - lack
            found, status = driver.admit(index, tokens, tenant=tenant, space=space, want=want, reserve=reserve)
            old = model.rows.get(index)
            if want > SPEC.max_blocks or room < 0 or (old and (old.held or old.tail)):
                assert (found, status) == (0, OUT_OF_BLOCKS)
                return self.check()
            row = model_module.Row(tenant, space, tokens, blocks, blocks, found, is_loading=loading)
            model.rows[index] = row
            names = {block: prefix for prefix, block in model_module.blocks_of(driver.host.radix).items()}
            row.tail = names.get(int(driver.host.sequences.tail[index]))
            fits = {room - (p in idle) >= 0 for p in candidates}
            assert (row.tail in candidates and True in fits) if row.tail else fits != {True}
            assert (found, status) == (blocks * SIZE + (tail if row.tail else 0), OK)
            assert found < max(len(tokens), 1), "a token is left to compute"
            self.check()

        @rule(need=st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS), rank=RANKS)
        def grow(self, need, rank) -> None:
            model, before = self.model, driver.host
            expected = model.growth(need, rank)
            given = [sum(n for i, (n, _) in expected.items() if model.rows[i].tenant == t) for t in range(len(model.quotas))]
            missing = sum(given) - model.num_free()
            sources = {
                i: blocks[row.tail]
                for blocks in [model_module.blocks_of(before.radix)]
                for i, row in model.rows.items()
                if row.tail
            }
            table, status = driver.grow({i: need[i] for i in model.rows}, dict(enumerate(rank)))
            assert {i: status[i] for i in model.rows} == {i: s for i, (_, s) in expected.items()}
            self.take(before.radix, missing, given)
            copies = {i for i in model.rows if model.rows[i].tail and expected[i][0]}
            assert {i for _, i in np.argwhere(driver.copies[..., 0] >= 0).tolist()} == copies
            for index, (more, _) in expected.items():
                row = model.rows[index]
                assert (table[index, : row.held] == before.sequences.block_table[0, index, : row.held]).all(), "what was held stays"
                self.hand_out(table[index, row.held : row.held + more].tolist())
                if index in copies:
                    assert (driver.copies[:, index] == [sources[index], table[index, row.held]]).all()
                    row.tail = None
                row.held += more
            model.copy(driver.copies)
            self.check()

        def hand_out(self, blocks) -> None:
            generations = driver.host.radix.generation[blocks].tolist()
            assert all(g > self.issued.get(b, 0) for b, g in zip(blocks, generations, strict=True)), "a new use has a new name"
            self.issued.update(zip(blocks, generations, strict=True))

        @rule(mask=MASK)
        def compute(self, mask) -> None:
            """What a step does: store the KV of tokens there is room for."""
            for index, row in self.model.rows.items():
                if mask[index] and not row.is_loading and not row.tail:
                    self.model.write(row, driver.host.sequences.block_table[:, index], min(len(row.tokens), row.held * SIZE))
            self.check()

        @rule(index=st.integers(0, ROWS - 1), valid=st.integers(0, 4))
        def loaded(self, index, valid) -> None:
            """The blocks a row waited for have come, all of them or the first few."""
            row = self.model.rows.get(index)
            if row and row.is_loading and not row.tail:
                row.is_loading = False
                upto = min(len(row.tokens) // SIZE, row.held, row.computed // SIZE + valid) * SIZE
                self.model.write(row, driver.host.sequences.block_table[:, index], upto)
            self.check()

        @rule(mask=MASK)
        def commit(self, mask) -> None:
            model, expected = self.model, self.model.commits(mask)
            driver.commit({i: model.rows[i].tokens[: model.rows[i].computed] for i in expected})
            for index, blocks in expected.items():
                row = model.rows[index]
                assert driver.host.sequences.committed[index] == blocks
                row.committed = blocks
                model.cached |= set(model.path(row.prefix(blocks, SIZE)))
            self.check()

        @rule(index=st.integers(0, ROWS - 1), more=st.lists(st.integers(0, 1), min_size=1, max_size=4))
        def decode(self, index, more) -> None:
            if row := self.model.rows.get(index):
                row.tokens = [*row.tokens, *more][:LONGEST]

        @rule(mask=MASK)
        def release(self, mask) -> None:
            """Ends, aborts and loads that missed are the same."""
            before = driver.host.radix.stamp
            for index in [i for i in self.model.rows if mask[i]]:
                del self.model.rows[index]
            events = driver.release(*np.flatnonzero(mask))
            assert (driver.host.radix.stamp >= before).all(), "a stamp was lowered"
            assert events.num_free.tolist() == [self.model.num_free(), self.model.num_free() + 2]
            assert events.num_evictable.tolist() == [len(self.model.idle())] * 2
            self.check()

        @rule(index=st.integers(0, ROWS - 1), tenant=tenants, tokens=TOKENS, leave=st.booleans())
        def live(self, index, tenant, tokens, leave) -> None:
            """A whole life, so that histories fill the pool and reach deep prefixes."""
            only = [i == index for i in range(ROWS)]
            blocks = -(-len(tokens) // SIZE)
            self.release(only)
            self.admit(index, tenant, 0, tokens, blocks, 0, False)
            self.grow([blocks * now for now in only], [0] * ROWS)
            for _ in range(2):
                self.compute(only)
                self.commit(only)
            if leave:
                self.release(only)

        @rule(tenant=tenants, tokens=st.lists(st.integers(0, 2), min_size=3, max_size=LONGEST), fork=st.integers(0, LONGEST))
        def race(self, tenant, tokens, fork) -> None:
            """Two sequences that are equal up to a fork, computed side by side and committed in one call."""
            both, blocks = [True, True, False, False], -(-len(tokens) // SIZE)
            self.release(both)
            for index, prompt in enumerate((tokens, [*tokens[:fork], *(2 - t for t in tokens[fork:])])):
                self.admit(index, tenant, 0, prompt, 0, 0, False)
            self.grow([blocks, blocks, 0, 0], [0] * ROWS)
            self.compute(both)
            self.commit(both)

        # -- leases without a sequence

        @precondition(lambda self: self.model.cached)
        @rule(data=st.data())
        def pin(self, data) -> None:
            prefix = data.draw(st.sampled_from(sorted(self.model.cached)))
            blocks = model_module.blocks_of(driver.host.radix)
            ids = [blocks[p] for p in self.model.path(prefix)]
            names = driver.host.radix.generation[ids].tolist()
            assert driver.tree("lease", padded(ids), padded(names)) == OK
            self.model.pins.append((prefix, ids, names))
            self.check()

        @precondition(lambda self: self.model.pins)
        @rule(which=st.integers(0, 7))
        def unpin(self, which) -> None:
            _, ids, names = self.model.pins.pop(which % len(self.model.pins))
            assert driver.tree("release", padded(ids), padded(names)) == OK
            self.unpinned.append((ids, names))
            self.check()

        @precondition(lambda self: self.unpinned)
        @rule(which=st.integers(0, 7))
        def unpin_again(self, which) -> None:
            """A lease that has ended cannot be ended again, unless another one of the same blocks is taken for it."""
            ids, names = self.unpinned[which % len(self.unpinned)]
            if any((ids, names) == (i, n) for _, i, n in self.model.pins):
                return
            assert driver.tree("release", padded(ids), padded(names)) == STALE
            self.check()

        @rule(count=st.integers(0, 5))
        def lend(self, count) -> None:
            model, before = self.model, driver.host.radix
            idle = set(model.idle())
            loan = driver.tree("lend", np.int32(count))
            names = {block: prefix for prefix, block in model_module.blocks_of(before).items()}
            lent = [names[b] for b in loan.block_ids.tolist() if b]
            order = self.order(before)
            assert int(loan.num_blocks) == len(lent) == min(count, 4, len(idle))
            assert sorted(order[p] for p in lent) == sorted(order[p] for p in idle)[: len(lent)]
            model.loans.append((lent, loan))
            self.check()

        @precondition(lambda self: self.model.loans)
        @rule(which=st.integers(0, 7), stored=MASK)
        def settle(self, which, stored) -> None:
            model = self.model
            lent, loan = model.loans.pop(which % len(model.loans))
            assert driver.tree("settle", loan, np.array(stored)) == OK
            model.cached -= model.settled(lent, stored[: len(lent)])
            if lent:
                self.settled.append((loan, np.array(stored)))
            self.check()

        @precondition(lambda self: self.settled)
        @rule(which=st.integers(0, 7))
        def settle_again(self, which) -> None:
            assert driver.tree("settle", *self.settled[which % len(self.settled)]) == STALE
            self.check()

    return Histories


def padded(values) -> np.ndarray:
    return np.array([*values, *[0] * (SPEC.max_blocks - len(values))], np.int32)


@pytest.mark.parametrize("policy", ["two-lifetimes", "lru", "lfu", "fifo", "priority", "cost"])
def test_a_random_history_agrees_with_the_model_under_each_policy(fresh_driver, model, search, policy):
    driver = fresh_driver(SPEC, max_commits=MAX_COMMITS, max_events=64, policy=policy, partial=True)
    search(machine_for(driver, model, ()), examples=50, steps=12)


@pytest.mark.parametrize("quotas", [(3, 4), (0, 9), (2, 0, 2)])
def test_a_random_history_agrees_with_the_model_where_tenants_have_quotas(fresh_driver, model, search, quotas):
    driver = fresh_driver(SPEC, max_commits=MAX_COMMITS, max_events=64, quotas=quotas, partial=True)
    search(machine_for(driver, model, quotas), examples=50, steps=12)
