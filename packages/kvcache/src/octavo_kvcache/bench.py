"""How fast the tree's operations are: `python -m octavo_kvcache.bench [--json FILE] [--quick]`.

Each operation is timed from NumPy arguments to NumPy answers. Beside it stands `*_floor`: the same call with a body that computes nothing,
which is what calling costs. XLA runs on one thread (`NPROC=1`) without asynchronous dispatch, as a planner of its own would run it:
operations this small only lose by a second thread.

The baselines (`octavo_tools.prefix_baselines`, in the workspace only) are other designs for the same job, in Python.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import octavo_kvcache as kv
from octavo_core.bench import Report, Timing, parse_arguments, summarise
from octavo_core.specs import CacheSpec
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
SPEC: Final = CacheSpec((POOL + 1,), BLOCK_SIZE, 1, LONG)
FORGOTTEN: Final = 64
"""Inserts after which the bench evicts them, all at once, so that what it times finds its caches as a scheduler would leave them."""
SPACE: Final[Any] = np.array([11, 22], np.uint32)
EVICT: Final = functools.partial(kv.evict, max_depth=LONG - 1)


class Filled:
    """A tree in which 56 prompts of 1,024 blocks are cached, none of them leased.

    Attributes:
        radix: The tree; what an operation makes of it is put here.
        prompts: Tokens of each prompt.
        ids: Blocks of each prompt.
    """

    def __init__(self, prompts: int = 56) -> None:
        self.radix: Any = kv.init(SPEC, max_events=2 * LONG)
        rng = np.random.default_rng(0)
        self.prompts = rng.integers(0, 49_152, (prompts, LONG * BLOCK_SIZE)).astype(np.int32)
        add = jax.jit(_cache_prompt, donate_argnums=0)
        self.ids: list[Any] = []
        for prompt in self.prompts:
            self.radix, ids = add(self.radix, prompt)
            self.ids.append(np.asarray(ids))

    def run(self, operation: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Let an operation change the tree; its answers on the host."""
        self.radix, *answers = operation(self.radix, *arguments)
        return [np.asarray(x) for x in jax.tree.leaves(answers)]


def _cache_prompt(radix: kv.RadixState, prompt: Any) -> tuple[kv.RadixState, Any]:
    """Cache a prompt, a part at a time, and let go of it."""
    span = SHORT * BLOCK_SIZE

    def part(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        radix, prefix = carry
        radix, ids, gens, _ = kv.allocate(radix, jnp.int32(SHORT), size=SHORT)
        tokens = jax.lax.dynamic_slice_in_dim(prompt, i * span, span)
        radix, _, _, _ = kv.insert(radix, prefix, tokens, ids, gens, jnp.asarray(SPACE))
        return radix, kv.match(radix, prompt, (i + 1) * span, jnp.asarray(SPACE))

    empty = kv.match(radix, prompt, jnp.int32(0), jnp.asarray(SPACE))
    radix, found = jax.lax.fori_loop(0, LONG // SHORT, part, (radix, empty))
    radix, _ = kv.release(radix, found.block_ids, found.generations)
    return radix, found.block_ids


def time_changes(
    filled: Filled,
    operation: Callable[..., Any],
    prepare: Callable[[], tuple[Any, ...]],
    undo: Callable[..., None],
    budget_s: float,
) -> Timing:
    """Time an operation that cannot be repeated as it is; `prepare` makes its arguments, `undo` takes it back, both untimed."""
    times: list[int] = []
    end = float("inf")
    while len(times) < 30 or time.perf_counter() < end:
        arguments = prepare()
        start = time.perf_counter_ns()
        filled.run(operation, *arguments)
        times.append(time.perf_counter_ns() - start)
        undo(*arguments)
        if len(times) == 10:  # compiled and warm: from here on it counts
            end = time.perf_counter() + budget_s
    return summarise(times[10:])


def _find(radix: kv.RadixState, tokens: Any, length: Any) -> Any:
    found = kv.match(radix, tokens, length, SPACE)
    return jnp.append(found.block_ids, found.num_blocks)


def _find_tail(radix: kv.RadixState, tokens: Any, length: Any) -> Any:
    found = kv.match(radix, tokens, length, SPACE)
    return jnp.stack(kv.match_tail(radix, found, tokens, length, SPACE))


def _find_nothing(radix: kv.RadixState, tokens: Any, length: Any) -> Any:
    return jnp.append(tokens[: tokens.shape[0] // BLOCK_SIZE], length)


def bench_match(report: Report, filled: Filled, budget_s: float) -> Any:
    """Match a long and a short prompt, from an array and from a list, and one that ends inside a block."""
    match, tail, nothing = jax.jit(_find), jax.jit(_find_tail), jax.jit(_find_nothing)

    def call(function: Any, tokens: Any) -> Any:
        return np.asarray(function(filled.radix, np.asarray(tokens, np.int32), np.int32(len(tokens))))

    for blocks in (LONG, SHORT):
        tokens, name = filled.prompts[3][: blocks * BLOCK_SIZE], f"match_{blocks * BLOCK_SIZE}"
        if call(match, tokens).tolist() != [*filled.ids[3][:blocks].tolist(), blocks]:
            raise RuntimeError("the bench's prompt is not found")
        report.time(name, functools.partial(call, match, tokens), budget_s=budget_s)
        report.time(f"{name}_floor", functools.partial(call, nothing, tokens), budget_s=budget_s / 3)
        report.time(f"{name}_from_list", functools.partial(call, match, tokens.tolist()), budget_s=budget_s)
    cut = filled.prompts[3][: SHORT * BLOCK_SIZE].copy()
    cut[-BLOCK_SIZE // 2 :] += 1
    if call(tail, cut)[1] != BLOCK_SIZE // 2:
        raise RuntimeError("the bench's tail is not found")
    report.time("match_2048_and_tail", functools.partial(call, tail, cut), budget_s=budget_s)


def _insert(radix: kv.RadixState, prefix: kv.Match, tokens: Any, ids: Any, gens: Any) -> Any:
    return kv.insert(radix, prefix, tokens, ids, gens, jnp.asarray(SPACE))


class Newest(LeastRecentlyUsed):
    """Most recently used first: what the bench takes its inserts back with."""

    def rank(self, stamp: Any, now: Any, bits: int) -> Any:
        """By time, backwards."""
        return (1 << bits) - 1 - super().rank(stamp, now, bits)


def bench_insert(report: Report, filled: Filled, budget_s: float) -> None:
    """Insert 64 new blocks as a prefix of their own."""
    rng = np.random.default_rng(1)
    empty = jax.jit(lambda radix: kv.match(radix, jnp.zeros(BLOCK_SIZE, jnp.int32), jnp.int32(0), jnp.asarray(SPACE)))
    prefix = jax.tree.map(np.asarray, empty(filled.radix))
    allocate: Any = kv.InPlace(lambda radix: kv.allocate(radix, jnp.int32(SHORT), size=SHORT)[:3])
    forget: Any = kv.InPlace(lambda radix, count: (EVICT(radix, count, Newest(), batch=LONG),))
    free: Any = kv.InPlace(lambda radix, ids, gens: (kv.release(radix, ids, gens)[0],))
    insert: Any = kv.InPlace(_insert)
    nothing: Any = kv.InPlace(_insert_nothing)
    inserted = 0
    filled.run(forget, np.int32(0))  # compiled before anything is timed

    def prepare() -> tuple[Any, ...]:
        return prefix, rng.integers(0, 49_152, SHORT * BLOCK_SIZE).astype(np.int32), *filled.run(allocate)

    def release(*arguments: Any) -> None:
        filled.run(free, *arguments[2:])

    def undo(*arguments: Any) -> None:
        nonlocal inserted
        release(*arguments)
        inserted += 1
        if inserted % FORGOTTEN == 0:
            filled.run(forget, np.int32(FORGOTTEN * SHORT))

    report.take("insert_64", time_changes(filled, insert, prepare, undo, budget_s))
    filled.run(forget, np.int32(inserted % FORGOTTEN * SHORT))
    report.take("insert_64_floor", time_changes(filled, nothing, prepare, release, budget_s / 3))


def _insert_nothing(radix: kv.RadixState, prefix: kv.Match, tokens: Any, ids: Any, gens: Any) -> Any:
    changed = ("tokens", "first", "parent", "depth", "stamp", "namespace", "slot", "index_tag", "index_block", "leases", "free")
    return _pretend(radix, (*changed, "stored", "counters")), ids, gens, prefix.num_blocks + tokens[0]


def _pretend(radix: kv.RadixState, changed: Sequence[str]) -> kv.RadixState:
    """The same tree, of which these arrays count as changed."""
    return radix._replace(**{name: getattr(radix, name).at[(0,) * getattr(radix, name).ndim].add(0) for name in changed})


def bench_lease(report: Report, filled: Filled, budget_s: float) -> None:
    """Lease a path of 1,024 blocks, as a match answered it, and release it again, in one call."""
    ids = jnp.asarray(filled.ids[5])
    gens = kv.handle(filled.radix, ids)

    def both(radix: kv.RadixState, ids: Any, gens: Any) -> Any:
        radix, leased = kv.lease(radix, ids, gens)
        radix, released = kv.release(radix, ids, gens)
        return radix, jnp.stack([leased, released])

    def neither(radix: kv.RadixState, ids: Any, gens: Any) -> Any:
        return _pretend(radix, ("leases", "stamp", "free", "counters")), ids[:2] + gens[:2]

    operation: Any = kv.InPlace(both)
    nothing: Any = kv.InPlace(neither)
    if filled.run(operation, ids, gens)[0].any():
        raise RuntimeError("the bench's path is refused")
    report.time("lease_release", lambda: filled.run(operation, ids, gens), budget_s=budget_s)
    report.time("lease_release_floor", lambda: filled.run(nothing, ids, gens), budget_s=budget_s / 3)


def bench_evict(report: Report, filled: Filled, budget_s: float) -> None:
    """Evict the 1,024 blocks that were used longest ago; what that changes is put back after each call, untimed."""
    changed = ("slot", "index_block", "free", "removed", "counters")
    kept = {name: np.array(getattr(filled.radix, name)) for name in changed}

    def evict(radix: kv.RadixState) -> Any:
        radix = EVICT(radix, jnp.int32(LONG), LeastRecentlyUsed(), batch=LONG)
        return radix, radix.read().num_free

    def nothing(radix: kv.RadixState) -> Any:
        return _pretend(radix, changed), radix.counters[0]

    def undo(*_: Any) -> None:
        filled.radix = filled.radix._replace(**{name: jnp.array(value) for name, value in kept.items()})

    report.take("evict_1024", time_changes(filled, kv.InPlace(evict), tuple, undo, budget_s))
    report.take("evict_1024_floor", time_changes(filled, kv.InPlace(nothing), tuple, undo, budget_s / 3))
    before = int(filled.radix.read().num_free)
    if filled.run(kv.InPlace(evict))[0] != before + LONG:
        raise RuntimeError("the bench's eviction frees another number of blocks")
    undo()


def bench_size(report: Report, filled: Filled) -> None:
    """State per block, without what does not grow with the pool: events and scalars."""
    fixed = {"stored", "removed", "counters"}
    growing = [field for name, field in filled.radix._asdict().items() if name not in fixed]
    report.add("bytes_per_block", sum(x.nbytes for x in jax.tree.leaves(growing)) / POOL, "B")


def bench_baselines(report: Report, budget_s: float) -> None:
    """The same match by other designs, from a list of ints (which is what they hash), in the same run."""
    tools = Path(__file__).parents[4] / "tools"  # beside packages/ in the workspace; an installed wheel has none
    if not (tools / "octavo_tools").is_dir():
        print("baselines: they are in the workspace's tools/ and run there only")
        return
    sys.path.append(str(tools))
    baselines = importlib.import_module("octavo_tools.prefix_baselines")
    ours = {figure.name: figure.value for figure in report.figures}
    medians = baselines.time_all(num_blocks=POOL, prompt_blocks=LONG, block_size=BLOCK_SIZE, repeats=20 if budget_s < 1 else 100)
    for name, median_us in medians.items():
        # SGLang's tree compares tokens one by one; with slices in place of its loop it is faster than it is.
        name = {"radix_page_1_loop": "radix", "radix_page_1": "radix_by_slices"}.get(name, name)
        report.add(f"baseline_match_32768_{name}", median_us, "us")
        report.add(
            f"speedup_match_32768_{name}", median_us / ours["match_32768"], "x", note="ours from an array, theirs from a list"
        )
        report.add(f"speedup_match_32768_{name}_from_list", median_us / ours["match_32768_from_list"], "x")


def main(argv: Sequence[str] | None = None) -> None:
    """Run everything."""
    arguments = parse_arguments("Speed of the prefix cache's operations.", argv)
    os.environ.setdefault("NPROC", "1")  # read when XLA starts its threads, at the first operation
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    budget_s = 0.1 if arguments.quick else 2.0
    report = Report(f"octavo_kvcache: {POOL:,} blocks of {BLOCK_SIZE} tokens; XLA threads: {os.environ['NPROC']}", GOALS)
    filled = Filled()
    bench_match(report, filled, budget_s)
    bench_insert(report, filled, budget_s)
    bench_lease(report, filled, budget_s)
    bench_evict(report, filled, budget_s)
    bench_size(report, filled)
    bench_baselines(report, budget_s)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
