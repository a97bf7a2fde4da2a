"""What is compared, in which order it is printed, and the command line of `tools/hit-rate`.

A cache is added as one more `Row`: a name and a function from pool size and trace to a `PrefixStore`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo_tools.hit_rate.optimum import FarthestNextUse, ToldWhetherAgain
from octavo_tools.hit_rate.policies import POLICIES, LeastRecentlyUsed, Policy
from octavo_tools.hit_rate.stores import BlockChain, PrefixStore, RadixStore, WholePrompts
from octavo_tools.hit_rate.trace import TRACE_BLOCK, Trace, TraceError, read_trace


class Row(NamedTuple):
    """A cache under a name; `make(num_blocks, trace)` builds an empty one."""

    name: str
    make: Callable[[int, Trace], PrefixStore]


def _radix(policy: Callable[[], Policy], num_blocks: int, trace: Trace, *, keep_tails: bool = False) -> PrefixStore:
    return RadixStore(num_blocks, trace.block_size, policy(), keep_tails=keep_tails)


def _served(policy: str, num_blocks: int, trace: Trace, *, partial: bool = False) -> PrefixStore:
    from octavo_tools.hit_rate.served import ServedStore

    return ServedStore(num_blocks, trace, policy, partial=partial)


OPTIMUM = Row("optimum", FarthestNextUse)

ROWS = [
    Row("infinite", lambda _, trace: _radix(LeastRecentlyUsed, trace.working_set, trace)),
    OPTIMUM,
    Row("told-whether-again", ToldWhetherAgain),
    Row("whole-prompt", lambda num_blocks, trace: WholePrompts(num_blocks, trace.block_size)),
    Row("block-chain", lambda num_blocks, trace: BlockChain(num_blocks, trace.block_size)),
    Row("radix+tail", functools.partial(_radix, LeastRecentlyUsed, keep_tails=True)),
    *(Row(f"radix-{name}", functools.partial(_radix, policy)) for name, policy in POLICIES.items()),
]
"""Every row, in the order of the table. `radix+tail` goes by least recent use, as `block-chain` and `radix-lru` do."""


SERVED = [
    *(
        Row(f"octavo-{name}", functools.partial(_served, name))
        for name in ("two-lifetimes", "lru", "lfu", "fifo", "priority", "cost")
    ),
    Row("octavo+tail", functools.partial(_served, "two-lifetimes", partial=True)),
]
"""The cache that serves, jitted, by policy: printed when asked for by `--rows`, because a table with it takes minutes."""


class Measured(NamedTuple):
    """One figure: `hit_rate` is tokens found over tokens of all prompts, `of_optimum` the same over the optimum's."""

    trace: str
    row: str
    pool: float
    num_blocks: int
    hit_rate: float
    of_optimum: float


def replay(store: PrefixStore, trace: Trace) -> int:
    """Tokens found, over all requests in order."""
    found = 0
    for prompt in trace.prompts:
        found += store.match(prompt)
        store.insert(prompt)
    return found


def measure(trace: Trace, rows: Sequence[Row], pools: Sequence[float]) -> Iterator[list[Measured]]:
    """Replay a trace against every row; yields a row's figures, one for each pool, when they are there."""
    sizes = [max(1, round(pool * trace.working_set)) for pool in pools]
    best = [replay(OPTIMUM.make(size, trace), trace) for size in sizes]
    tokens = max(1, trace.num_tokens)
    for row in rows:
        found = best if row is OPTIMUM else [replay(row.make(size, trace), trace) for size in sizes]
        yield [
            Measured(trace.name, row.name, pool, size, hits / tokens, hits / most if most else 1.0)
            for pool, size, hits, most in zip(pools, sizes, found, best, strict=True)
        ]


def show(trace: Trace, rows: Sequence[Row], pools: Sequence[float]) -> list[Measured]:
    """Print a trace's table while it is measured; answers its figures."""
    counts = f"{len(trace.prompts)} requests, {trace.num_tokens} prompt tokens"
    print(f"{trace.name}: {counts}, working set {trace.working_set} blocks of {trace.block_size} tokens")
    print(f"{'hit rate (of optimum), pool:':<28}" + "".join(f"{pool:>15.0%}" for pool in pools), flush=True)
    figures: list[Measured] = []
    for line in measure(trace, rows, pools):
        cells = (f"{one.hit_rate:>7.4f} ({one.of_optimum:>5.1%})" for one in line)
        print(f"{line[0].row:<28}" + "".join(f"{cell:>15}" for cell in cells), flush=True)
        figures += line
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each trace; 2 if one cannot be read."""
    args = _parser().parse_args(argv)
    rows = [row for row in (*ROWS, *SERVED) if row.name in args.rows]
    figures: list[Measured] = []
    try:
        for trace in (read_trace(path, args.block_size) for path in args.traces):
            figures += show(trace, rows, args.pools)
    except TraceError as error:
        print(f"hit-rate: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps([_flat(one) for one in figures], indent=1) + "\n")
    return 0


def _flat(one: Measured) -> dict[str, str | float | int]:
    """A figure as dashboards want it."""
    name = f"hit_rate_{one.trace}_{one.row}_{one.pool:g}"
    return {"name": name, "value": one.hit_rate, "unit": "ratio", "n": one.num_blocks}


def _pools(text: str) -> list[float]:
    pools = [float(part) for part in text.split(",")]
    if not all(0 < pool < float("inf") for pool in pools):
        raise argparse.ArgumentTypeError(f"wanted fractions of the working set above 0, such as 0.25,0.5, got {text}")
    return pools


def _rows(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - {row.name for row in (*ROWS, *SERVED)}:
        known = ", ".join(row.name for row in (*ROWS, *SERVED))
        raise argparse.ArgumentTypeError(f"no row is called {', '.join(sorted(unknown))}; there are {known}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tools/hit-rate", description="Prefix hit rate of a trace by size of the pool.")
    add = parser.add_argument
    add("traces", nargs="+", type=Path, metavar="TRACE.jsonl", help="a trace in Mooncake's format")
    add("--pools", type=_pools, default="0.05,0.1,0.25,0.5,1.0", help="pool sizes as fractions of the working set (%(default)s)")
    add("--block-size", type=int, default=TRACE_BLOCK, help="tokens per block, a divisor of 512 (%(default)s)")
    add(
        "--rows",
        type=_rows,
        default=",".join(row.name for row in ROWS),
        help=f"rows to print (%(default)s); also {', '.join(row.name for row in SERVED)}",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures as a flat list")
    return parser
