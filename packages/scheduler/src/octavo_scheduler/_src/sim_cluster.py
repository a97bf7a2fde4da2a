"""Several engines behind a router: what a policy of routing, a split of prompts from answers, and slower tiers of KV would do.

Every replica is the scheduler that serves around counted blocks; all share one compiled program. The host between them is plain Python:
it routes requests as they arrive, keeps what each replica has cached as least recently used parts of prompts, and works out what a load from
a slower tier or from another replica takes. What it does not model: bandwidth shared by loads at the same time, and blocks that running
sequences keep from the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int32

from octavo_core.errors import ConfigError
from octavo_scheduler._src.sim_cost import CostModel
from octavo_scheduler._src.sim_loop import trace_fits
from octavo_scheduler._src.sim_state import DONE, TICK_S, Requests, World, requests_of
from octavo_scheduler._src.sim_sweep import Setup, knobs_of, simulator
from octavo_scheduler._src.sim_trace import Trace

ROUTES: Final = ("round-robin", "least-loaded", "prefix-hash", "kv-aware")
NEVER: Final = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TierSpec:
    """A place for KV beyond the pool of a replica.

    Attributes:
        tokens: It holds so many.
        bytes_per_s: Of a load.
        latency_s: Before its first byte.
        is_shared: One for all replicas.
    """

    tokens: int
    bytes_per_s: float
    latency_s: float = 0.0
    is_shared: bool = False


@dataclasses.dataclass(frozen=True)
class ClusterSpec:
    """Replicas and what is between them.

    Attributes:
        replicas: Engines that serve whole requests, or prompts only where `decoders` is not 0.
        decoders: Engines that go on where the others have computed a prompt.
        route: How a request finds its replica: in turn; where the fewest tokens are outstanding; by hash of how its prompt begins, passing
            over replicas above `bound`; or where what is cached and what is outstanding together promise the first token soonest.
        bound: Most load of a replica relative to the mean before `prefix-hash` passes it over.
        hash_parts: Parts of the prompt that are hashed.
        kv_bytes: Of a token.
        link_bytes_per_s, link_latency_s: Between replicas, for handing a prompt's KV over.
        tiers: Where evicted KV goes, the nearest first; asked in order.
    """

    replicas: int = 2
    decoders: int = 0
    route: str = "round-robin"
    bound: float = 1.25
    hash_parts: int = 4
    kv_bytes: float = 131072.0
    link_bytes_per_s: float = 25e9
    link_latency_s: float = 1e-3
    tiers: tuple[TierSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.route not in ROUTES:
            raise ConfigError(f"route is one of {', '.join(ROUTES)}, got '{self.route}'")
        if self.replicas < 1 or self.decoders < 0 or self.hash_parts < 1 or self.bound < 1:
            raise ConfigError(f"a cluster has a replica, no fewer than 0 decoders, and bounds of at least 1, got {self}")
        rates = [self.link_bytes_per_s, *(tier.bytes_per_s for tier in self.tiers)]
        if min(rates) <= 0 or self.kv_bytes <= 0 or min([self.link_latency_s, *(t.latency_s for t in self.tiers)]) < 0:
            raise ConfigError(f"bytes and rates are above 0 and latencies at least 0, got {self}")


class PartsHeld:
    """Parts of prompts somewhere, the least recently used leave first; a part is found only behind all before it.

    Args:
        capacity: Parts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def match(self, keys: Sequence[tuple[int, ...]]) -> int:
        """How many leading parts are here."""
        return next((at for at, key in enumerate(keys) if key not in self._held), len(keys))

    def put(self, keys: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Use these parts, the last of them the longest ago, and answer what had to leave."""
        for key in reversed(keys):
            self._held.pop(key, None)
            self._held[key] = None
        return [self._held.popitem(last=False)[0] for _ in range(max(0, len(self._held) - self.capacity))]


@dataclasses.dataclass
class Replica:
    """An engine of the cluster.

    Attributes:
        world: Of its simulation.
        held: What its pool has cached.
        tiers: What its own slower tiers hold; shared ones are the same object in all replicas.
        queue: Requests routed here so far.
    """

    world: World
    held: PartsHeld
    tiers: list[PartsHeld]
    queue: list[int]


@dataclasses.dataclass(frozen=True)
class ClusterOutcome:
    """What became of each request.

    Attributes:
        trace: What arrived.
        replica: Where it was served; where its prompt was computed, in a cluster with decoders.
        ttft_s, tpot_s: Of each request; NaN for TPOT where there was one token.
        cached_len: Tokens found, in the pool or a tier.
        loaded_len: Of them, from a tier.
        makespan_s: From the first arrival to the last token.
    """

    trace: Trace
    replica: Int32[np.ndarray, " requests"]
    ttft_s: Float64[np.ndarray, " requests"]
    tpot_s: Float64[np.ndarray, " requests"]
    cached_len: Int32[np.ndarray, " requests"]
    loaded_len: Int32[np.ndarray, " requests"]
    makespan_s: float

    def summary(self) -> dict[str, int | float]:
        """Figures of a table."""
        counts = np.bincount(self.replica)
        found: dict[str, int | float] = {"requests": len(self.trace)}
        for name, values in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s[np.isfinite(self.tpot_s)])):
            found |= {f"{name}_p{p}": float(np.percentile(values, p)) if len(values) else 0.0 for p in (50, 90, 99)}
        total = max(1, int(self.trace.prompt_len.sum()))
        found["output_tokens_per_s"] = float(self.trace.output_len.sum() / max(self.makespan_s, TICK_S))
        found["cached_share"], found["loaded_share"] = float(self.cached_len.sum() / total), float(self.loaded_len.sum() / total)
        return found | {"busiest_share": float(counts.max() / counts.sum()), "makespan_s": self.makespan_s}


class Cluster:
    """Replicas of one engine behind a router.

    Args:
        spec: Of the cluster.
        setup: Of each engine; its `load` scales arrivals.
        cost: Of a step of each.
    """

    def __init__(self, spec: ClusterSpec, setup: Setup, cost: CostModel) -> None:
        self.spec, self.setup, self.cost = spec, dataclasses.replace(setup, load=1.0), cost
        self.load = setup.load
        self.step_s = float(cost.base_s[0]) + cost.host_s

    def run(self, trace: Trace) -> ClusterOutcome:
        """Replay a trace."""
        trace = trace.at_load(self.load)
        trace_fits(trace, (self.setup.blocks - 1) * self.setup.block_size, 2**30)
        keys = [_keys(row, length, trace.span) for row, length in zip(trace.parts, trace.prompt_len.tolist(), strict=True)]
        cached, loaded = np.zeros(len(trace), np.int32), np.zeros(len(trace), np.int32)
        front = trace if not self.spec.decoders else dataclasses.replace(trace, output_len=np.ones_like(trace.output_len))
        ready_s = trace.arrival_s.copy()

        def admit(request: int, replica: Replica) -> None:
            cached[request], loaded[request], wait_s = self._find(
                keys[request], int(trace.prompt_len[request]), trace.span, replica
            )
            ready_s[request] += wait_s

        first = self._serve(
            front, self.spec.replicas, trace.arrival_s, ready_s, cached, lambda r, all_: self._route(r, all_, trace, keys), admit
        )
        if not self.spec.decoders:
            return self._outcome(trace, first, first, cached, loaded)
        handed_s = trace.prompt_len * self.spec.kv_bytes / self.spec.link_bytes_per_s + self.spec.link_latency_s
        at_s = first.first_s + handed_s
        # The decoder holds the prompt's KV when it begins, and the first token is already out: one token fewer to make.
        several = trace.output_len > 1
        back = dataclasses.replace(trace, prompt_len=trace.prompt_len + 1, output_len=np.maximum(trace.output_len - 1, 1))
        second = self._serve(
            back, self.spec.decoders, at_s, at_s.copy(), trace.prompt_len, self._least_loaded, lambda r, _: None, several
        )
        return self._outcome(trace, first, second, cached, loaded)

    def _outcome(self, trace: Trace, first: _Served, second: _Served, cached: np.ndarray, loaded: np.ndarray) -> ClusterOutcome:
        last_s = np.where(np.isfinite(second.last_s), second.last_s, first.last_s)
        gaps = np.maximum(trace.output_len - 1, 1)
        return ClusterOutcome(
            trace=trace,
            replica=first.replica,
            ttft_s=first.first_s - trace.arrival_s,
            tpot_s=np.where(trace.output_len > 1, (last_s - first.first_s) / gaps, np.nan),
            cached_len=cached,
            loaded_len=loaded,
            makespan_s=float(last_s.max(initial=0.0)),
        )

    # Routing --------------------------------------------------------------------------------------------------------------

    def _route(self, request: int, replicas: Sequence[Replica], trace: Trace, keys: Sequence[Sequence[tuple[int, ...]]]) -> int:
        if self.spec.route == "round-robin":
            return request % len(replicas)
        if self.spec.route == "least-loaded":
            return self._least_loaded(request, replicas)
        loads = [_outstanding(replica, trace) for replica in replicas]
        if self.spec.route == "prefix-hash":
            return _bounded_hash(keys[request][: self.spec.hash_parts], loads, self.spec.bound)
        fresh = [trace.prompt_len[request] - replica.held.match(keys[request]) * trace.span for replica in replicas]
        wait = (np.maximum(fresh, 0) + np.array(loads)).tolist()
        return min(range(len(replicas)), key=lambda i: (wait[i], len(replicas[i].queue)))

    def _least_loaded(self, request: int, replicas: Sequence[Replica]) -> int:
        return int(np.argmin([len(replica.queue) - int(np.sum(replica.world.books.status == DONE)) for replica in replicas]))

    def _find(self, keys: Sequence[tuple[int, ...]], prompt_len: int, span: int, replica: Replica) -> tuple[int, int, float]:
        """Tokens found, of them loaded from tiers, and how long the loads take; a load that takes longer than computing is not done."""
        found, wait_s, pool = replica.held.match(keys), 0.0, replica.held.match(keys)
        for tier, held in zip(self.spec.tiers, replica.tiers, strict=True):
            further = held.match(keys[found:])
            tokens = further * span
            load_s = tier.latency_s + tokens * self.spec.kv_bytes / tier.bytes_per_s
            budget = self.setup.config.token_budget
            compute_s = tokens * self.cost.prefill_s + -(-tokens // budget) * self.step_s
            if further and load_s < compute_s:
                found, wait_s = found + further, wait_s + load_s
        left = list(keys)
        for held in [replica.held, *replica.tiers]:
            left = held.put(left) if left else []
        cached = min(found * span, prompt_len - 1)
        return cached, max(0, cached - pool * span), wait_s

    # Serving ---------------------------------------------------------------------------------------------------------------

    def _serve(
        self,
        trace: Trace,
        count: int,
        arrival_s: np.ndarray,
        ready_s: np.ndarray,
        cached: np.ndarray,
        route: Callable[[int, Sequence[Replica]], int],
        admit: Callable[[int, Replica], None],
        which: np.ndarray | None = None,
    ) -> _Served:
        """Route requests in order of arrival, each when it arrives, to `count` replicas, and let all end."""
        ready = simulator(self.setup, self.cost, trace.span, int(trace.limit_len.max(initial=1)), None)
        # Arrivals and hits are known only once a request is routed: until then it never arrives.
        requests = requests_of(trace, with_parts=False)._replace(
            arrival=jnp.full_like(requests_of(trace, with_parts=False).arrival, NEVER)
        )
        replicas = self._replicas(count, ready, requests, trace.span)
        where, at = np.full(len(trace), -1, np.int32), np.array(requests.arrival)
        found = np.array(requests.found)
        order = np.argsort(arrival_s, kind="stable")
        for request in order[np.ones(len(trace), bool)[order] if which is None else which[order]].tolist():
            now = _ticks(arrival_s[request])
            for replica in replicas:
                replica.world = ready.advance(replica.world, requests, now)
            where[request] = route(request, replicas)
            chosen = replicas[where[request]]
            admit(request, chosen)
            at[request], found[request] = _ticks(ready_s[request]), cached[request]
            requests = requests._replace(arrival=jnp.asarray(at), found=jnp.asarray(found))
            _enqueue(chosen, request, at)
        for replica in replicas:
            replica.world = ready.advance(replica.world, requests, NEVER)
        return _collect(where, replicas)

    def _replicas(self, count: int, ready: Any, requests: Requests, span: int) -> list[Replica]:
        capacity = (self.setup.blocks - 1) * self.setup.block_size // span
        shared = {i: PartsHeld(tier.tokens // span) for i, tier in enumerate(self.spec.tiers) if tier.is_shared}
        return [
            Replica(
                world=ready.init(requests, 0, knobs_of(self.setup)),
                held=PartsHeld(capacity),
                tiers=[shared.get(i) or PartsHeld(tier.tokens // span) for i, tier in enumerate(self.spec.tiers)],
                queue=[],
            )
            for _ in range(count)
        ]


@dataclasses.dataclass(frozen=True)
class _Served:
    """Where requests were served and when their first and last tokens came; NaN where they were not."""

    replica: Int32[np.ndarray, " requests"]
    first_s: Float64[np.ndarray, " requests"]
    last_s: Float64[np.ndarray, " requests"]


def _collect(where: np.ndarray, replicas: Sequence[Replica]) -> _Served:
    first, last = (np.stack([np.asarray(getattr(r.world.books, name)) for r in replicas]) for name in ("first", "last"))
    index = np.arange(len(where))
    served = where >= 0
    first_s = np.where(served, first[np.maximum(where, 0), index] * TICK_S, np.nan)
    return _Served(where, first_s, np.where(served, last[np.maximum(where, 0), index] * TICK_S, np.nan))


def _ticks(seconds: float) -> int:
    return round(float(seconds) / TICK_S)


def _enqueue(replica: Replica, request: int, arrival: np.ndarray) -> None:
    """Put a request behind those of its replica that arrive before it; those taken already stay in front."""
    taken = int(replica.world.cursor)
    replica.queue.append(request)
    replica.queue[taken:] = sorted(replica.queue[taken:], key=lambda r: (arrival[r], r))
    queue = np.asarray(replica.world.queue).copy()
    queue[: len(replica.queue)] = replica.queue
    replica.world = replica.world._replace(queue=jnp.asarray(queue), num_offered=jnp.int32(len(replica.queue)))


def _outstanding(replica: Replica, trace: Trace) -> int:
    """Prompt tokens routed here whose requests have made no token yet, and a token for each answer under way."""
    first, status = np.asarray(replica.world.books.first), np.asarray(replica.world.books.status)
    return sum(int(trace.prompt_len[r]) if first[r] < 0 else int(status[r] != DONE) for r in replica.queue)


def _bounded_hash(keys: Sequence[tuple[int, ...]], loads: Sequence[int], bound: float) -> int:
    """The first replica in the order of a rendezvous hash whose load is within the bound.

    Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), over highest random weights.
    """
    last = repr(keys[-1] if keys else ()).encode()
    weight = [hashlib.sha256(last + bytes([i])).digest() for i in range(len(loads))]
    allowed = bound * (sum(loads) + 1) / len(loads)
    order = sorted(range(len(loads)), key=lambda i: weight[i], reverse=True)
    return next((i for i in order if loads[i] <= allowed), order[0])


def _keys(row: Int32[np.ndarray, " parts"], prompt_len: int, span: int) -> list[tuple[int, ...]]:
    """A name for each full part of a prompt that stands for it and everything before it."""
    names, chain = row[: prompt_len // span].tolist(), 0
    keys: list[tuple[int, ...]] = []
    for name in names:
        chain = hash((chain, name))
        keys.append((chain, name))
    return keys
