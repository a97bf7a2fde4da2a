"""How fast the tree's operations are: `python -m octavo_kvcache.bench [--json FILE] [--quick]`.

Each operation is timed from NumPy arguments to NumPy answers, its state donated where it changes. Beside it stands `*_floor`: a jit that takes
and gives the same arrays and computes nothing, which is what calling costs. XLA runs on one thread (`NPROC=1`) without asynchronous
dispatch, as a planner process runs it: operations this small only lose by a second thread.

The baselines (`octavo_tools.prefix_baselines`, in the workspace only) are other designs for the same job, in Python.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import octavo_kvcache as kv
from octavo_core.bench import Report, parse_arguments
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.evict import evict
from octavo_kvcache.policy import LeastRecentlyUsed

BLOCK_SIZE: Final = 32
POOL: Final = 65_536
LONG: Final = 1_024
SHORT: Final = 64
GOALS: Final = {
    "match_32768": 200,
    "match_2048": 80,
    "insert_64": 100,
    "evict_1024": 600,
    "lease_release": 50,
    "speedup_match_32768_sha256": 8,
    "speedup_match_32768_radix": 5,
    "bytes_per_block": 240,
}
OPTIONS: Final = {"xla_cpu_copy_insertion_use_region_analysis": True}
SPEC: Final = CacheSpec((POOL + 1,), BLOCK_SIZE, 1, LONG)
SPACE: Final = np.array([11, 22], np.uint32)

jit = functools.partial(jax.jit, compiler_options=OPTIONS)


class Filled:
    """A tree in which 56 prompts of 1,024 blocks are cached, and what holds them.

    Attributes:
        radix: The tree; operations that donate it put the next one here.
        prompts: Tokens of each prompt.
        ids: Blocks of each prompt.
    """

    def __init__(self, prompts: int = 56) -> None:
        self.radix = kv.init(SPEC, max_events=2 * LONG)
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, 49_152, (prompts, LONG * BLOCK_SIZE)).astype(np.int32)
        add = jit(_add, donate_argnums=0)
        self.ids = []
        for prompt in self.prompts:
            self.radix, ids = add(self.radix, prompt)
            self.ids.append(np.asarray(ids))
        self.radix = jax.block_until_ready(self.radix)

    def update(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Run an operation that takes the tree and gives it back first; answers the rest, on the host."""
        self.radix, *rest = operation(self.radix, *arguments)
        return [np.asarray(x) for x in jax.tree.leaves(rest)]


def _add(radix: kv.RadixState, prompt: Any) -> tuple[kv.RadixState, Any]:
    """Cache a prompt, a part at a time, and let go of it."""
    part = SHORT

    def some(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        radix, prefix, generations = carry
        radix, ids, gens, _ = kv.allocate(radix, jnp.int32(part), size=part)
        tokens = jax.lax.dynamic_slice_in_dim(prompt, i * part * BLOCK_SIZE, part * BLOCK_SIZE)
        radix, ids, gens, _ = kv.insert(radix, prefix, tokens, ids, gens, jnp.asarray(SPACE))
        at = i * part
        filled = jax.lax.dynamic_update_slice(prefix.block_ids, ids, (at,))
        generations = jax.lax.dynamic_update_slice(generations, gens, (at,))
        found = kv.match(radix, prompt, (i + 1) * part * BLOCK_SIZE, jnp.asarray(SPACE))
        return radix, found._replace(block_ids=filled, generations=generations), generations

    empty = kv.match(radix, prompt, jnp.int32(0), jnp.asarray(SPACE))
    radix, found, _ = jax.lax.fori_loop(0, LONG // part, some, (radix, empty, jnp.zeros(LONG, jnp.int32)))
    radix, _ = kv.release(radix, found.block_ids, found.generations)
    return radix, found.block_ids


def _floor(radix: kv.RadixState, *arguments: Any) -> tuple[kv.RadixState, Any]:
    """Nothing but the arrays."""
    return radix, [jnp.ravel(x)[:1] for x in arguments]


def bench_match(report: Report, filled: Filled, budget_s: float) -> float:
    """Match long and short prompts; answers the time of the long one."""

    def find(radix: kv.RadixState, tokens: Any, length: Any) -> Any:
        found = kv.match(radix, tokens, length, SPACE)
        return jnp.append(found.block_ids, found.num_blocks)

    match, medians = jit(find), []
    for blocks in (LONG, SHORT):
        tokens, length = filled.prompts[3][: blocks * BLOCK_SIZE], np.int32(blocks * BLOCK_SIZE)
        answer = np.asarray(match(filled.radix, tokens, length))
        assert answer[-1] == blocks and (answer[:-1] == filled.ids[3][:blocks]).all()
        name = f"match_{blocks * BLOCK_SIZE}"
        medians.append(
            report.time(name, lambda t=tokens, n=length: np.asarray(match(filled.radix, t, n)), budget_s=budget_s).median_us
        )
        empty = jit(lambda radix, tokens, length: jnp.append(tokens[:blocks], length))  # noqa: B023 (called in this turn)
        report.time(f"{name}_floor", lambda t=tokens, n=length: np.asarray(empty(filled.radix, t, n)), budget_s=budget_s / 4)
        as_list = tokens.tolist()
        report.time(
            f"{name}_from_list",
            lambda t=as_list, n=length: np.asarray(match(filled.radix, np.array(t, np.int32), n)),
            budget_s=budget_s / 2,
        )
    return medians[0]


def bench_tail(report: Report, filled: Filled, budget_s: float) -> None:
    """Find the block to copy for a prompt that leaves a cached one in the middle of a block."""
    tokens = filled.prompts[3][: SHORT * BLOCK_SIZE].copy()
    tokens[-BLOCK_SIZE // 2 :] += 1
    length = np.int32(len(tokens))

    def find(radix: kv.RadixState, tokens: Any, length: Any) -> Any:
        found = kv.match(radix, tokens, length, SPACE)
        return jnp.stack(kv.match_tail(radix, found, tokens, length, SPACE))

    match = jit(find)
    assert np.asarray(match(filled.radix, tokens, length))[1] == BLOCK_SIZE // 2
    report.time("match_2048_and_tail", lambda: np.asarray(match(filled.radix, tokens, length)), budget_s=budget_s)


def bench_insert(report: Report, filled: Filled, budget_s: float) -> None:
    """Insert 64 new blocks as a prefix of their own; between calls, untimed, they are evicted again."""
    rng, empty = np.random.default_rng(1), jit(lambda radix: kv.match(radix, jnp.zeros(BLOCK_SIZE, jnp.int32), jnp.int32(0), SPACE))
    prefix = jax.tree.map(np.asarray, empty(filled.radix))
    allocate = jit(lambda radix: kv.allocate(radix, jnp.int32(SHORT), size=SHORT)[:3], donate_argnums=0)
    insert = jit(lambda *a: kv.insert(*a, SPACE), donate_argnums=0)
    undo = jit(
        lambda radix, ids, gens: (evict(kv.release(radix, ids, gens)[0], jnp.int32(SHORT), Newest(), max_depth=LONG - 1),),
        donate_argnums=0,
    )
    times = []
    nothing = jit(_floor, donate_argnums=0)
    for turn in range(max(30, int(400 * budget_s))):
        tokens = rng.integers(0, 49_152, SHORT * BLOCK_SIZE).astype(np.int32)
        ids, gens = filled.update(allocate)
        start = _now()
        answer = filled.update(insert, prefix, tokens, ids, gens)
        if turn >= 5:
            times.append(_now() - start)
        assert answer[-1] == 0 and (answer[0] == ids).all()
        filled.update(undo, ids, gens)
    times.sort()
    report.add(
        "insert_64", times[len(times) // 2], "us", len(times), f"min {times[0]:.1f}, p99 {times[len(times) * 99 // 100]:.1f}"
    )
    report.time("insert_64_floor", lambda: filled.update(nothing, tokens, ids, gens), budget_s=budget_s / 4)


class Newest(LeastRecentlyUsed):
    """Most recently used first: what the bench undoes its inserts with."""

    def rank(self, stamp: Any, clock: Any, bits: int) -> Any:
        """By time, backwards."""
        return (1 << bits) - 1 - super().rank(stamp, clock, bits)


def bench_evict(report: Report, filled: Filled, budget_s: float) -> None:
    """Evict 1,024 of 65,536 blocks with the oldest stamps; the tree is copied before each call, untimed."""
    step = jit(
        lambda radix: (evict(radix, jnp.int32(1024), LeastRecentlyUsed(), max_depth=LONG - 1, batch=1024),), donate_argnums=0
    )
    nothing = jit(_floor, donate_argnums=0)
    copy = jit(lambda radix: jax.tree.map(jnp.copy, radix))
    for name, operation in (("evict_1024", step), ("evict_1024_floor", nothing)):
        times = []
        for _ in range(max(20, int(60 * budget_s))):
            radix = jax.block_until_ready(copy(filled.radix))
            start = _now()
            after = operation(radix)
            jax.block_until_ready(after)
            times.append(_now() - start)
        times.sort()
        report.add(name, times[len(times) // 2], "us", len(times), f"min {times[0]:.1f}, p99 {times[len(times) * 99 // 100]:.1f}")
    freed = int(after[0].read().num_free)
    assert freed == int(filled.radix.read().num_free)
    assert int(step(copy(filled.radix))[0].read().num_free) == freed + 1024


def bench_lease(report: Report, filled: Filled, budget_s: float) -> None:
    """Lease a path of 1,024 blocks and release it again, in one call."""
    ids = filled.ids[5]
    gens = np.asarray(kv.handle(filled.radix, ids))

    def both(radix: kv.RadixState, ids: Any, gens: Any) -> Any:
        radix, leased = kv.lease(radix, ids, gens)
        radix, released = kv.release(radix, ids, gens)
        return radix, jnp.stack([leased, released])

    operation, nothing = jit(both, donate_argnums=0), jit(_floor, donate_argnums=0)
    assert filled.update(operation, ids, gens)[0].tolist() == [0, 0]
    report.time("lease_release", lambda: filled.update(operation, ids, gens), budget_s=budget_s)
    report.time("lease_release_floor", lambda: filled.update(nothing, ids, gens), budget_s=budget_s / 4)


def bench_size(report: Report, filled: Filled) -> None:
    """State per block, without the fixed rest: events and scalars."""
    fixed = {"stored", "removed", "counters"}
    total = sum(x.nbytes for name, field in filled.radix._asdict().items() if name not in fixed for x in jax.tree.leaves(field))
    report.add("bytes_per_block", total / POOL, "B")


def bench_baselines(report: Report, filled: Filled, ours_us: float, budget_s: float) -> None:
    """The same match by other designs, from a list of ints, in the same run."""
    try:
        from octavo_tools import prefix_baselines
    except ImportError:
        print("baselines: octavo_tools is not installed; they run in the workspace only")
        return
    for name, make in prefix_baselines.ALL.items():
        median = prefix_baselines.time_match(make, filled.prompts, probe=3, budget_s=budget_s)
        report.add(f"baseline_match_32768_{name}", median, "us")
        report.add(f"speedup_match_32768_{name}", median / ours_us, "x")


def _now() -> float:
    import time

    return time.perf_counter_ns() / 1e3


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything."""
    arguments = parse_arguments("Speed of the prefix cache's operations.", argv)
    os.environ.setdefault("NPROC", "1")  # read when XLA starts its threads, at the first operation
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    budget_s = 0.1 if arguments.quick else 1.5
    report = Report(f"octavo_kvcache: {POOL:,} blocks of {BLOCK_SIZE} tokens; XLA threads: {os.environ['NPROC']}", GOALS)
    filled = Filled()
    ours = bench_match(report, filled, budget_s)
    bench_tail(report, filled, budget_s)
    bench_insert(report, filled, budget_s)
    bench_lease(report, filled, budget_s)
    bench_evict(report, filled, budget_s)
    bench_size(report, filled)
    bench_baselines(report, filled, ours, budget_s)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
