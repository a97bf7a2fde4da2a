"""`octavo simulate`: replay a trace, sweep settings, fit a cost model, replay what was recorded; and tables of what came out.

Composes scheduler and cache for the simulation, as `compose` does for serving.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from octavo_core.config import from_namespace
from octavo_core.errors import ConfigError
from octavo_core.records import RequestRecord, StepRecord, read_log
from octavo_engine._src.process import flight
from octavo_kvcache import RadixCache
from octavo_scheduler import SchedulerConfig
from octavo_scheduler import simulate as sim

SHOWN: Final = {
    "ttft_s_p50": ("TTFT p50", "s", 1.0),
    "ttft_s_p99": ("p99", "s", 1.0),
    "tpot_s_p50": ("TPOT p50", "ms", 1e3),
    "tpot_s_p99": ("p99", "ms", 1e3),
    "longest_gap_s": ("longest gap", "s", 1.0),
    "output_tokens_per_s": ("tokens", "1/s", 1.0),
    "goodput_per_s": ("goodput", "1/s", 1.0),
    "good_share": ("good", "%", 100.0),
    "cached_share": ("cached", "%", 100.0),
    "preemptions": ("preempted", "", 1.0),
    "refused": ("refused", "", 1.0),
}


def run(options: argparse.Namespace) -> int:
    """Do what the first word says; a path alone is a trace to replay."""
    first, *rest = options.what
    if first == "fit":
        return _fit(_one("fit", "a step log", rest), options)
    if first == "replay":
        return _replay(_one("replay", "a step log or flight record", rest), options)
    if first == "cluster":
        return _cluster(_one("cluster", "one trace", rest), options)
    return _simulate([first, *rest], options)


def _one(command: str, what: str, rest: Sequence[str]) -> str:
    if len(rest) != 1:
        raise ConfigError(f"octavo simulate {command} takes {what}, got {' '.join(rest) or 'nothing'}")
    return rest[0]


def _simulate(paths: Sequence[str], options: argparse.Namespace) -> int:
    trace = _trace(_one("", "one trace", paths), options)
    base, cost = _setup(options), _cost(options)
    limits = sim.Limits(options.slo_ttft, options.slo_tpot_ms / 1e3)
    grid: Mapping[str, Sequence[Any]] = sim.parse_sweep(options.sweep, base) if options.sweep else {}
    make_cache = _cache_maker(trace, options)
    told = functools.partial(_tell, limits=limits) if options.sweep else None
    outcomes = sim.sweep(trace, grid, base, cost, make_cache=make_cache, jobs=options.jobs, progress=told)
    notes = _notes(trace, base, cost, make_cache is not None, limits)
    _show(trace, outcomes, notes, limits)
    _write(trace, outcomes, notes, limits, options)
    return 0


def _trace(path: str, options: argparse.Namespace) -> sim.Trace:
    trace = sim.read_trace(path, limit=options.limit)
    if options.leave_out_longer:
        fits = trace.limit_len <= options.leave_out_longer
        trace = trace.pick(fits)
    if not len(trace):
        raise ConfigError(f"{path} has no request to replay")
    return trace


def _setup(options: argparse.Namespace) -> sim.Setup:
    return sim.Setup(
        config=from_namespace(SchedulerConfig, options),
        blocks=options.blocks,
        block_size=options.block_size,
        lag=options.lag,
        max_queued_requests=options.max_num_queued_reqs,
        max_queued_tokens=options.max_num_queued_tokens,
        use_prefix=not options.no_enable_prefix_caching,
        deadline_s=options.deadline,
        deadline_per_token_s=options.deadline_per_token,
        load=options.load,
    )


def _cost(options: argparse.Namespace) -> sim.CostModel:
    return sim.CostModel.parse(options.cost)


def _cache_maker(trace: sim.Trace, options: argparse.Namespace) -> Any:
    """The radix cache where the trace names the parts of prompts; counting where it does not, or where that was asked for."""
    wanted = options.cache or ("radix" if trace.names_parts else "counts")
    return functools.partial(RadixCache, policy=options.prefix_cache_policy) if wanted == "radix" else None


def _tell(outcome: sim.Outcome, limits: sim.Limits) -> None:
    found = outcome.summary(limits)
    print(
        f"{sim.label_text(outcome.label)}: goodput {found['goodput_per_s']:.3g}/s, {found['steps']} steps",
        file=sys.stderr,
        flush=True,
    )


def _notes(trace: sim.Trace, base: sim.Setup, cost: sim.CostModel, is_radix: bool, limits: sim.Limits) -> list[str]:
    pool = f"{base.blocks} blocks of {base.block_size} tokens"
    found = "the cache that serves" if is_radix else "blocks are only counted, prefixes are found as far as the trace says"
    terms = ", ".join(f"{name} {getattr(cost, name + '_s'):.3g}" for name in ("decode", "prefill", "context", "pairs", "host"))
    return [
        f"{len(trace)} requests over {trace.arrival_s[-1]:.0f} s, {int(trace.prompt_len.sum())} prompt and {int(trace.output_len.sum())} output tokens",
        f"pool: {pool}; {found}",
        f"cost in seconds: base {', '.join(f'{b:.3g}' for b in cost.base_s)}, {terms}",
        f"goodput: requests with TTFT up to {limits.ttft_s:g} s and TPOT up to {limits.tpot_s * 1e3:g} ms",
    ]


def _show(trace: sim.Trace, outcomes: Sequence[sim.Outcome], notes: Sequence[str], limits: sim.Limits) -> None:
    console = _console()
    for note in notes:
        console.print(note, highlight=False, markup=False)
    table = Table(title=trace.name)
    for name in outcomes[0].label:
        table.add_column(name)
    for heading, unit, _ in SHOWN.values():
        table.add_column(f"{heading}, {unit}" if unit else heading, justify="right")
    figures = [o.summary(limits) for o in outcomes]
    best = set(sim.pareto([f["tpot_s_p99"] for f in figures], [f["goodput_per_s"] for f in figures]))
    for at, (outcome, found) in enumerate(zip(outcomes, figures, strict=True)):
        cells = [
            f"{found[name] * scale:.3g}" if isinstance(found[name], float) else str(found[name])
            for name, (_, _, scale) in SHOWN.items()
        ]
        table.add_row(*map(str, outcome.label.values()), *cells, style="bold" if at in best and len(outcomes) > 1 else "")
    console.print(table)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


def _write(
    trace: sim.Trace, outcomes: Sequence[sim.Outcome], notes: Sequence[str], limits: sim.Limits, options: argparse.Namespace
) -> None:
    if options.csv:
        sim.write_csv(options.csv, outcomes, limits)
    if options.json:
        sim.write_json(options.json, outcomes, limits)
    if options.html:
        sim.write_html(options.html, f"octavo simulate {trace.name}", notes, outcomes, limits)
    if options.png:
        sim.write_png(options.png, sim.charts(outcomes, limits))
    if options.step_log:
        _write_steps(options.step_log, outcomes)


def _write_steps(path: str, outcomes: Sequence[sim.Outcome]) -> None:
    if len(outcomes) != 1:
        raise ConfigError("--step-log holds the steps of one simulation: leave out --sweep")
    try:
        Path(path).write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in outcomes[0].records()))
    except OSError as error:
        raise ConfigError(f"--step-log {path} cannot be written: {error.strerror}") from None


def _fit(path: str, options: argparse.Namespace) -> int:
    found = sim.fit(_steps(path))
    console = _console()
    console.print(
        f"{found.num_steps} steps, {found.num_left_out} left out; median error {found.median_error:.1%}, total {found.total_error:+.1%}",
        highlight=False,
    )
    table = Table(title="cost of a step")
    table.add_column("term")
    table.add_column("µs", justify="right")
    model = found.model
    for (tokens, rows), base_s in zip(model.shapes, model.base_s, strict=True):
        table.add_row(f"base, {tokens} tokens x {rows} rows" if tokens else "base", f"{base_s * 1e6:.4g}")
    for name, unit in (
        ("decode", "decode row"),
        ("prefill", "prompt token"),
        ("context", "KV token read"),
        ("pairs", "(query, key) pair of prompts"),
        ("host", "step, host"),
    ):
        table.add_row(f"each {unit}", f"{getattr(model, name + '_s') * 1e6:.4g}")
    console.print(table)
    target = options.output or "cost.json"
    try:
        model.save(target)
    except OSError as error:
        raise ConfigError(f"--output {target} cannot be written: {error.strerror}") from None
    console.print(f"written to {target}: octavo simulate TRACE --cost {target}", highlight=False)
    return 0


def _log(path: str, record: type[Any]) -> list[Any]:
    try:
        return list(read_log(path, record))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"wanted a log of {record.__name__}s, one JSON object a line, got {path}: {error}") from None


def _steps(path: str) -> list[StepRecord]:
    """The steps of a log, or of a flight recorder's file, whether it was dumped or lies as its core left it."""
    return flight.read(Path(path)) or _log(path, StepRecord)


def _replay(path: str, options: argparse.Namespace) -> int:
    steps = _steps(path)
    if not options.requests:
        if sim.has_calls(steps):
            return _rerun(path, steps)
        raise ConfigError(
            "a step log says what steps held, not who: give the same run's --request-log as --requests FILE, or replay a flight record"
        )
    requests = _log(options.requests, RequestRecord)
    cost = _cost(options) if options.cost != DEFAULT_COST else sim.fit(steps).model
    trace = _trace(options.requests, options)
    outcome = sim.simulate(trace, _setup(options), cost, make_cache=None)
    found = sim.compare(steps, requests, outcome)
    table = Table(title=f"{path}: recorded and simulated")
    for heading in ("from, s", "steps", "", "tokens", "", "step, ms", "", "running", "", "waiting", "", "preempted", ""):
        table.add_column(heading, justify="right")
    for was, now in zip(found.recorded, found.simulated, strict=True):
        pairs = [(getattr(s, n) for s in (was, now)) for n in ("steps", "tokens", "step_s", "running", "waiting", "preemptions")]
        cells = [f"{v * 1e3:.1f}" if isinstance(v, float) else str(v) for pair in pairs for v in pair]
        table.add_row(f"{was.start_s:.1f}", *cells)
    console = _console()
    console.print(table)
    for name, (was_s, is_s) in (("TTFT", found.ttft_s), ("TPOT", found.tpot_s)):
        console.print(f"median {name}: recorded {was_s * 1e3:.1f} ms, simulated {is_s * 1e3:.1f} ms", highlight=False)
    if options.step_log:
        _write_steps(options.step_log, [outcome])
    return 0


def _rerun(path: str, steps: Sequence[StepRecord]) -> int:
    """Plan the steps of a flight record again, and say whether they come out the same; 1 when they do not."""
    found, console = sim.rerun(steps), _console()
    first, last = found.steps[0], found.steps[-1]
    console.print(
        f"{path}: {len(steps)} steps recorded; {len(found.steps)} planned again, from step {first} to {last}, {found.tokens} tokens",
        highlight=False,
        markup=False,
    )
    for one in found.differences:
        values = ", ".join(f"{name} was {was}, is {now}" for name, (was, now) in one.values.items())
        console.print(f"step {one.step} differs: {values}", highlight=False, markup=False)
    if not found.differences:
        console.print("every step agrees: rows, tokens, contexts and preemptions", highlight=False)
    return 1 if found.differences else 0


def _cluster(path: str, options: argparse.Namespace) -> int:
    """A row for each route."""
    trace, setup, cost = _trace(path, options), _setup(options), _cost(options)
    routes = options.route.split(",") if options.route else list(sim.ROUTES)
    tiers = tuple(_tier(text) for text in options.tier)
    common = {"replicas": options.replicas, "decoders": options.decoders, "kv_bytes": options.kv_bytes, "tiers": tiers}
    specs = [sim.ClusterSpec(route=route, link_bytes_per_s=options.link, **common) for route in routes]
    found = {spec.route: sim.Cluster(spec, setup, cost).run(trace).summary() for spec in specs}
    table = Table(
        title=f"{trace.name}: {options.replicas} replicas"
        + (f" for prompts, {options.decoders} for answers" if options.decoders else "")
    )
    headings = {
        "ttft_s_p50": "TTFT p50, s",
        "ttft_s_p99": "p99, s",
        "tpot_s_p50": "TPOT p50, s",
        "tpot_s_p99": "p99, s",
        "output_tokens_per_s": "tokens, 1/s",
        "cached_share": "cached",
        "loaded_share": "of it from tiers",
        "busiest_share": "busiest replica",
    }
    for heading in ("route", *headings.values()):
        table.add_column(heading, justify="right")
    for route, figures in found.items():
        table.add_row(route, *(f"{figures[name]:.3g}" for name in headings))
    _console().print(table)
    if options.json:
        rows = [{"set": {"route": route}, **figures} for route, figures in found.items()]
        Path(options.json).write_bytes(msgspec.json.encode(rows))
    return 0


def _tier(text: str) -> sim.TierSpec:
    """`TOKENS:BYTES_PER_S[:LATENCY_S][:shared]`."""
    tokens, *rest = text.split(":")
    is_shared = rest[-1:] == ["shared"]
    try:
        rate, *latency = map(float, rest[:-1] if is_shared else rest)
        return sim.TierSpec(int(float(tokens)), rate, latency[0] if latency else 0.0, is_shared)
    except (ValueError, TypeError):
        raise ConfigError(f"a tier is TOKENS:BYTES_PER_S[:LATENCY_S][:shared], such as 4e6:2e10:1e-4, got '{text}'") from None


DEFAULT_COST: Final = "roofline"
"""Of an 8-billion-parameter model of two bytes each on an accelerator of 400 Tflop/s and 2.5 TB/s, as reached."""
