"""The same behaviour as `ChunkedScheduler` around a cache without prefixes, in plain Python: lists, loops, no arrays until the plan is written.

The oracle of `tests/test_plain_scheduler.py`, written from the documents, not from the jitted code: one sequence at a time, in policy
order, each rule where it applies. Not here: `lpm`, which wants prefixes, and `slo`, which reckons in float32.
"""

from __future__ import annotations

# A plan is written in NumPy arrays where annotations say jax's.
# mypy: disable-error-code="arg-type"
import dataclasses

import numpy as np

from octavo_core.plan import Arrivals, CacheEvents, StepPlan, StepResult
from octavo_core.specs import CacheSpec
from octavo_scheduler import SchedulerConfig


@dataclasses.dataclass(eq=False)
class Sequence:
    """One token stream."""

    index: int
    tokens: list[int]
    limit_len: int
    order: int
    priority: int
    deadline: int
    tenant: int
    in_flight: int = 0
    computed: int = 0
    guard: int = 0
    runs: bool = False
    cached_len: int = -1
    cost: int = 0
    blocks: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        """Tokens, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def is_open(self) -> bool:
        """Running and short of its limit."""
        return self.runs and self.total < self.limit_len


class PlainPlanner:
    """A `Planner` for `HostLoop`."""

    def __init__(self, config: SchedulerConfig, spec: CacheSpec) -> None:
        self.config, self.spec = config, spec
        self.live: dict[int, Sequence] = {}
        self.free = [list(range(1, n)) for n in spec.num_blocks]
        self.line: list[Sequence] = []
        self.served = [0] * len(config.tenant_weights)
        self.growth, self.claim = 700, 0

    def share(self, s: Sequence) -> int:
        """Whose share a sequence is served from."""
        return max(0, min(s.tenant, len(self.served) - 1))

    def key(self, s: Sequence) -> tuple[int, int]:
        """Smaller goes first."""
        by_policy = {"priority": s.priority, "edf": s.deadline, "fair": self.served[self.share(s)]}
        return by_policy.get(self.config.policy, 0), s.order

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.spec.block_size)

    def wanted(self, s: Sequence) -> int:
        """Blocks kept for a sequence."""
        rest = s.limit_len - 1 - s.total
        growth = max(1, min(rest, 4096) * self.growth // 1000, min(rest, s.total // 4))
        growth = {"none": 1, "guaranteed": rest}.get(self.config.reservation, growth)
        return self.blocks(min(s.total + growth, s.limit_len - 1))

    def arrive(self, arrivals: Arrivals) -> None:
        """Take in newcomers and admit who fits."""
        present = {self.share(s) for s in self.live.values()}
        if present and self.config.policy == "fair":
            least = min(self.served[t] for t in present)
            self.served = [max(0, n - least) for n in self.served]
        for i in range(arrivals.sequence.size):
            index = int(arrivals.sequence[i])
            if index >= 0:
                facts = (arrivals.limit_len, arrivals.order, arrivals.priority, arrivals.deadline, arrivals.tenant)
                prompt = arrivals.tokens[i, : arrivals.prompt_len[i]].tolist()
                self.live[index] = Sequence(index, prompt, *(int(f[i]) for f in facts))
        self.line = sorted(self.live.values(), key=self.key)
        self.admit([s for s in self.line if not s.runs][: self.config.max_arrivals])
        waiting = [s for s in self.line if not s.runs]
        self.claim = self.wanted(waiting[0]) if waiting and self.is_owed(waiting[0]) else 0

    def admit(self, waiting: list[Sequence]) -> None:
        """Let them in, in order, until one does not fit."""
        for s in waiting:
            running = [r for r in self.live.values() if r.runs]
            promised = sum(max(0, self.wanted(r) - self.blocks(r.computed)) for r in running if r.is_open)
            kept = promised + (self.config.watermark_blocks if running else 0)
            has_room = all(len(f) - kept >= self.wanted(s) for f in self.free)
            if s.in_flight or len(running) >= self.config.max_num_seqs or not has_room:
                return
            s.runs, s.cached_len, s.blocks = True, 0, [[] for _ in self.free]

    def is_owed(self, s: Sequence) -> bool:
        """Somebody that runs was served too much more than this one's tenant."""
        ahead = max((self.served[self.share(r)] for r in self.live.values() if r.is_open), default=0)
        return self.config.policy == "fair" and ahead > self.served[self.share(s)] + 1000 * self.config.fair_quantum

    def step(self, result: StepResult) -> StepPlan:
        """The next plan."""
        ended = [s for i in sorted(self.live) if (s := self.live[i]) and self.take(s, result)]
        for s in ended:
            del self.live[s.index]
            self.line.remove(s)
        chosen, lack = self.serve(self.share_budget())
        gives_way = (lack or self.claim) and not any(s.runs for s in ended)
        victim = self.victim(max(lack, self.claim)) if gives_way else None
        if victim is not None:
            chosen.pop(victim.index, None)
        plan = self.write(chosen, victim)
        for s in [*ended, *([victim] if victim else [])]:
            for free, held in zip(self.free, s.blocks, strict=False):
                free.extend(held)
                free.sort()
        for index, q in chosen.items():
            s = self.live[index]
            samples = s.computed + q == s.total
            fresh = max(0, s.computed + q - max(s.computed, s.guard - 1))
            s.cost = fresh + samples
            s.computed += q
            s.in_flight += samples
        if self.config.policy == "fair":
            for t, weight in enumerate(self.config.tenant_weights):
                cost = sum(self.live[i].cost for i in chosen if self.share(self.live[i]) == t)
                self.served[t] = min(self.served[t] + cost * 1000 // weight, 1 << 30)
        if victim is not None:
            victim.guard, victim.computed, victim.runs, victim.blocks = victim.total, 0, False, []
        self.growth = max(100, min(1000, self.growth - 1 if victim is None else 2 * self.growth))
        return self.count(plan)

    def take(self, s: Sequence, result: StepResult) -> bool:
        """Append what was sampled; whether the sequence ends."""
        accepted = int(result.accepted[s.index])
        s.tokens += result.token_ids[s.index, :accepted].tolist()
        s.in_flight -= accepted > 0
        return bool(result.finished[s.index])

    def share_budget(self) -> dict[int, int]:
        """Tokens for each sequence that gets any: decodes first, then chunks while the budget lasts."""
        config = self.config
        left = config.token_budget
        queries: dict[int, int] = {}
        for s in self.line:
            if s.is_open and s.total - s.computed == 1 and left:
                queries[s.index] = 1
                left -= 1
        limit = config.chunk_tokens
        if config.chunk_policy == "adaptive":
            limit = min(limit, 512 if len(queries) > 64 else 1024 if len(queries) > 32 else 2048)
        num_partial = num_long = 0
        for s in self.line:
            remaining = s.total - s.computed
            if not s.is_open or remaining < 2 or s.in_flight:
                continue
            chunk, threshold = min(remaining, limit), config.long_prefill_token_threshold
            if threshold and remaining > threshold:
                num_long += 1
                if config.max_long_partial_prefills and num_long > config.max_long_partial_prefills:
                    continue
                chunk = min(chunk, threshold)
            num_partial += 1
            if config.max_num_partial_prefills and num_partial > config.max_num_partial_prefills:
                break
            if left:
                queries[s.index] = min(chunk, left)
                left -= queries[s.index]
        return queries

    def serve(self, queries: dict[int, int]) -> tuple[dict[int, int], int]:
        """Hand out blocks in policy order; after the first refusal only those go on that need none. Answers what was refused, too."""
        served: dict[int, int] = {}
        lacking = 0
        for s in self.line:
            if s.index not in queries:
                continue
            need = self.blocks(s.computed + queries[s.index])
            lack = [max(0, need - len(held)) for held in s.blocks]
            if any(lack):
                if lacking or any(n > len(f) for n, f in zip(lack, self.free, strict=True)):
                    lacking += need - self.blocks(s.computed)
                    continue
                for n, held, free in zip(lack, s.blocks, self.free, strict=True):
                    held += free[:n]
                    del free[:n]
            served[s.index] = queries[s.index]
        return served, lacking

    def victim(self, lack: int) -> Sequence | None:
        """Who gives way so that others get the blocks they lack."""
        candidates = [s for s in self.line if s.is_open][1:]
        if not candidates:
            return None
        candidates = [s for s in candidates if s.total > s.guard] or candidates
        if self.config.policy in ("priority", "fair"):
            worth = {s.index: s.priority if self.config.policy == "priority" else self.served[self.share(s)] for s in candidates}
            candidates = [s for s in candidates if worth[s.index] == max(worth.values())]
        enough = [s for s in candidates if self.blocks(s.computed) >= lack]
        most = max(self.blocks(s.computed) for s in candidates)
        candidates = enough or [s for s in candidates if self.blocks(s.computed) == most]
        return [s for s in candidates if s.computed == min(c.computed for c in candidates)][-1]

    def write(self, chosen: dict[int, int], victim: Sequence | None) -> StepPlan:
        """The plan as arrays."""
        rows = [s for s in self.line if chosen.get(s.index) == 1] + [s for s in self.line if chosen.get(s.index, 0) > 1]
        plan = blank_plan(self.config, self.spec)
        t = 0
        for r, s in enumerate(rows):
            q = chosen[s.index]
            plan.sequence[r], plan.cached_len[r], plan.context_len[r] = s.index, s.cached_len, s.computed + q
            for position in range(s.computed, s.computed + q):
                plan.token_ids[t] = s.tokens[position] if position < len(s.tokens) else -1
                plan.positions[t], plan.row[t] = position, r
                for g, held in enumerate(s.blocks):
                    block, offset = divmod(position, self.spec.block_size)
                    plan.slot_mapping[g, t] = held[block] * self.spec.block_size + offset
                t += 1
            for g, held in enumerate(s.blocks):
                used = self.blocks(s.computed + q)
                plan.block_table[g, r, :used] = held[:used]
            plan.sample_rows[r] = t - 1 if s.computed + q == s.total else -1
            plan.query_start[r + 1 :] = t
        scalars = {"num_tokens": t, "num_rows": len(rows), "num_single": sum(chosen[s.index] == 1 for s in rows)}
        lost = {"preempted": -1, "lost_len": 0} if victim is None else {"preempted": victim.index, "lost_len": victim.computed}
        return plan._replace(**scalars, **lost)

    def count(self, plan: StepPlan) -> StepPlan:
        """The plan with what holds after it."""
        running = sum(s.runs for s in self.live.values())
        events = plan.events._replace(num_free=np.array([len(f) for f in self.free]))
        return plan._replace(num_running=running, num_waiting=len(self.live) - running, events=events)


def blank_plan(config: SchedulerConfig, spec: CacheSpec) -> StepPlan:
    """A plan of nothing."""
    rows, tokens, groups = config.max_num_seqs, config.token_budget, spec.groups
    return StepPlan(
        token_ids=np.zeros(tokens, int),
        positions=np.zeros(tokens, int),
        row=np.full(tokens, rows),
        query_start=np.zeros(rows + 1, int),
        context_len=np.zeros(rows, int),
        block_table=np.zeros((groups, rows, spec.max_blocks), int),
        slot_mapping=np.full((groups, tokens), -1),
        sample_rows=np.full(rows, -1),
        copies=np.full((groups, spec.max_sequences, 2), -1),
        sequence=np.full(rows, -1),
        cached_len=np.zeros(rows, int),
        num_tokens=0,
        num_rows=0,
        num_single=0,
        preempted=-1,
        lost_len=0,
        num_running=0,
        num_waiting=0,
        events=CacheEvents(np.full((1, 5), -1), np.full((1, 3), -1), np.bool_(False), np.zeros(groups, int), np.zeros(groups, int)),
    )
