"""The same behaviour as `ChunkedScheduler` around `SmallCache`, in plain Python: lists, loops, no arrays until the plan is written.

Written from the documents, not from the jitted code: one sequence at a time, in policy order, each rule where it applies.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from octavo_core.plan import Arrivals, CacheEvents, StepPlan, StepResult
from octavo_core.specs import CacheSpec
from octavo_scheduler import SchedulerConfig


@dataclasses.dataclass
class Sequence:
    index: int
    tokens: list[int]
    limit_len: int
    key: tuple[int, int]
    in_flight: int = 0
    computed: int = 0
    guard: int = 0
    runs: bool = False
    cached_len: int = -1
    blocks: list[list[int]] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def is_open(self) -> bool:
        return self.runs and self.total < self.limit_len


class OraclePlanner:
    """A `Planner` for `HostLoop`."""

    def __init__(self, config: SchedulerConfig, spec: CacheSpec) -> None:
        self.config, self.spec = config, spec
        self.live: dict[int, Sequence] = {}
        self.free = [list(range(1, n)) for n in spec.num_blocks]

    def in_order(self) -> list[Sequence]:
        return sorted(self.live.values(), key=lambda s: s.key)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.spec.block_size)

    def wanted(self, s: Sequence) -> int:
        return self.blocks(min(s.total + 1, s.limit_len - 1))

    def arrive(self, arrivals: Arrivals) -> None:
        for i in range(arrivals.sequence.size):
            index = int(arrivals.sequence[i])
            if index >= 0:
                priority = int(arrivals.priority[i]) if self.config.policy == "priority" else 0
                prompt = arrivals.tokens[i, : arrivals.prompt_len[i]].tolist()
                self.live[index] = Sequence(index, prompt, int(arrivals.limit_len[i]), (priority, int(arrivals.order[i])))
        waiting = [s for s in self.in_order() if not s.runs]
        for s in waiting[: self.config.max_arrivals]:
            running = [r for r in self.live.values() if r.runs]
            promised = sum(max(0, self.wanted(r) - self.blocks(r.computed)) for r in running if r.is_open)
            kept = promised + (self.config.watermark_blocks if running else 0)
            has_room = all(len(f) - kept >= self.wanted(s) for f in self.free)
            if s.in_flight or len(running) >= self.config.max_num_seqs or not has_room:
                return
            s.runs, s.cached_len, s.blocks = True, 0, [[] for _ in self.free]

    def step(self, result: StepResult) -> StepPlan:
        ended = [s for i in sorted(self.live) if (s := self.live[i]) and self.take(s, result)]
        for s in ended:
            del self.live[s.index]
        chosen, refused = self.serve(self.share_budget())
        victim = self.victim() if refused and not any(s.runs for s in ended) else None
        if victim is not None:
            chosen.pop(victim.index, None)
        plan = self.write(chosen, victim)
        for s in [*ended, *([victim] if victim else [])]:
            for free, held in zip(self.free, s.blocks, strict=False):
                free.extend(held)
                free.sort()
        for index, q in chosen.items():
            s = self.live[index]
            s.computed += q
            s.in_flight += s.computed == s.total
        if victim is not None:
            victim.guard, victim.computed, victim.runs, victim.blocks = victim.total, 0, False, []
        return self.count(plan)

    def take(self, s: Sequence, result: StepResult) -> bool:
        accepted = int(result.accepted[s.index])
        s.tokens += result.token_ids[s.index, :accepted].tolist()
        s.in_flight -= accepted > 0
        return bool(result.finished[s.index])

    def share_budget(self) -> dict[int, int]:
        """Tokens for each sequence that gets any: decodes first, then chunks while the budget lasts."""
        left = self.config.token_budget
        chunk = min(self.config.chunk_size or left, left)
        queries: dict[int, int] = {}
        for s in self.in_order():
            if s.is_open and s.total - s.computed == 1 and left:
                queries[s.index] = 1
                left -= 1
        for s in self.in_order():
            remaining = s.total - s.computed
            if s.is_open and remaining > 1 and not s.in_flight and left:
                queries[s.index] = min(remaining, chunk, left)
                left -= queries[s.index]
        return queries

    def serve(self, queries: dict[int, int]) -> tuple[dict[int, int], bool]:
        """Hand out blocks in policy order; after the first refusal only those go on that need none."""
        served: dict[int, int] = {}
        short = False
        for s in self.in_order():
            if s.index not in queries:
                continue
            need = self.blocks(s.computed + queries[s.index])
            lack = [max(0, need - len(held)) for held in s.blocks]
            if any(lack):
                short = short or any(n > len(f) for n, f in zip(lack, self.free, strict=True))
                if short:
                    continue
                for n, held, free in zip(lack, s.blocks, self.free, strict=True):
                    held += free[:n]
                    del free[:n]
            served[s.index] = queries[s.index]
        return served, short

    def victim(self) -> Sequence | None:
        candidates = [s for s in self.in_order() if s.is_open]
        if len(candidates) < 2:
            return None
        open_to_it = [s for s in candidates if s.total > s.guard]
        return (open_to_it or candidates)[-1]

    def write(self, chosen: dict[int, int], victim: Sequence | None) -> StepPlan:
        rows = [s for s in self.in_order() if chosen.get(s.index) == 1] + [s for s in self.in_order() if chosen.get(s.index, 0) > 1]
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
        return plan._replace(preempted=np.int32(-1 if victim is None else victim.index), **scalars)

    def count(self, plan: StepPlan) -> StepPlan:
        running = sum(s.runs for s in self.live.values())
        events = plan.events._replace(num_free=np.array([len(f) for f in self.free]))
        return plan._replace(num_running=running, num_waiting=len(self.live) - running, events=events)


def blank_plan(config: SchedulerConfig, spec: CacheSpec) -> StepPlan:
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
        num_running=0,
        num_waiting=0,
        events=CacheEvents(np.full((1, 5), -1), np.full((1, 3), -1), np.bool_(False), np.zeros(groups, int), np.zeros(groups, int)),
    )
