"""Many simulations of one trace: what is set, which values are tried, and running them, in several processes where there are cores.

Knows settings by the names of `SchedulerConfig` and `Setup`; which cache stands behind them is told from outside.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from octavo_core.config import parse_int
from octavo_core.errors import ConfigError, nearest_name
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec
from octavo_scheduler._src.config import SchedulerConfig
from octavo_scheduler._src.scheduler import ChunkedScheduler
from octavo_scheduler._src.sim_cache import CountingCache
from octavo_scheduler._src.sim_cost import CostModel
from octavo_scheduler._src.sim_loop import Simulator
from octavo_scheduler._src.sim_metrics import Outcome
from octavo_scheduler._src.sim_trace import Trace
from octavo_scheduler._src.sim_turn import HostRules

CacheMaker = Callable[[CacheSpec], PrefixCache[Any]]

WAITING_INDICES: Final = 64
"""Indices for sequences that wait, beside those of running ones."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """An engine to simulate. As an engine does, it keeps a hundredth of the pool free where the scheduler's watermark is 0.

    Attributes:
        config: Of the scheduler.
        blocks: Of the pool, the reserved one included.
        block_size: Tokens in a block.
        waiting: Indices for sequences that wait.
        lag: Steps whose results a plan does not know yet.
        max_queued_requests, max_queued_tokens: Bounds of the queue; 0: none.
        use_prefix: Match the cache.
        deadline_s, deadline_per_token_s: When the first token is due (policy `edf`), see `HostRules`.
        load: Arrivals come so many times as fast as in the trace.
    """

    config: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    blocks: int = 16_384
    block_size: int = 32
    waiting: int = WAITING_INDICES
    lag: int = 1
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    use_prefix: bool = True
    deadline_s: float = 0.0
    deadline_per_token_s: float = 0.0
    load: float = 1.0

    def with_values(self, values: Mapping[str, Any]) -> Setup:
        """The same with some settings replaced, the scheduler's by its own names."""
        own = {name: value for name, value in values.items() if name in _own_names()}
        rest = {name: value for name, value in values.items() if name not in own}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **rest), **own)

    def value(self, name: str) -> Any:
        """A setting by name."""
        return getattr(self if name in _own_names() else self.config, name)


def _own_names() -> list[str]:
    return [f.name for f in dataclasses.fields(Setup) if f.name != "config"]


def names() -> list[str]:
    """Everything that can be swept."""
    return [*_own_names(), *(f.name for f in dataclasses.fields(SchedulerConfig) if "help" in f.metadata)]


def parse_sweep(text: str, base: Setup) -> dict[str, list[Any]]:
    """`token_budget=512:2048,chunk_policy` as the values of each setting; a name alone tries all choices, or half and double a number.

    Raises:
        ConfigError: An unknown name, a value of another type, or a setting of which there is nothing to try.
    """
    grid: dict[str, list[Any]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, given = part.partition("=")
        name = name.replace("-", "_")
        if name not in names():
            raise ConfigError(f"nothing to sweep is called '{name}'{nearest_name(name, names())}")
        grid[name] = [_value(name, word) for word in given.split(":")] if equals else _usual(name, base)
    if not grid:
        raise ConfigError("--sweep names at least one setting, such as token_budget=512:2048")
    return grid


def _value(name: str, word: str) -> Any:
    kind = typing.get_type_hints(Setup if name in _own_names() else SchedulerConfig)[name]
    try:
        if kind is bool:
            return {"true": True, "false": False}[word.lower()]
        return parse_int(word) if kind is int else kind(word)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"wanted a {kind.__name__} for {name}, got '{word}'") from error
    except Exception as error:  # argparse's own, which is no ValueError
        raise ConfigError(f"{name}: {error}") from error


def _usual(name: str, base: Setup) -> list[Any]:
    """What is tried of a setting that has no values of its own on the command line."""
    field = {f.name: f for f in dataclasses.fields(SchedulerConfig)}.get(name)
    if field is not None and field.metadata.get("choices"):
        return list(field.metadata["choices"])
    value = base.value(name)
    if isinstance(value, bool):
        return [False, True]
    if not value:
        raise ConfigError(f"{name} is {value}: say which values to try, such as {name}=1:2:4")
    return [type(value)(value * factor) for factor in (0.5, 1, 2)]


def points(grid: Mapping[str, Sequence[Any]], base: Setup) -> Iterator[tuple[dict[str, Any], Setup]]:
    """Every combination, as what was set and the engine that follows."""
    for values in itertools.product(*grid.values()):
        label = dict(zip(grid, values, strict=True))
        yield label, base.with_values(label)


def simulator(setup: Setup, cost: CostModel, span: int, max_len: int, make_cache: CacheMaker | None) -> Simulator:
    """The simulator of an engine; the last few are kept, since they are compiled. Where blocks are only counted, engines that differ only
    in what `SchedulerConfig.knobs` has share one, and run with `knobs_of`."""
    if make_cache is None:
        usual: dict[str, Any] = SchedulerConfig().knobs | {"tenant_weights": (1,) * len(setup.config.tenant_weights)}
        setup = dataclasses.replace(setup, config=dataclasses.replace(setup.config, **usual))
    return _simulator(setup, cost, span, max_len, make_cache)


def knobs_of(setup: Setup) -> dict[str, Any]:
    """Values of what engines that share a simulator may differ in."""
    return setup.config.knobs | {"watermark_blocks": _watermark(setup)}


def _watermark(setup: Setup) -> int:
    return setup.config.watermark_blocks or max(1, setup.blocks // 100)


@functools.lru_cache(maxsize=4)
def _simulator(setup: Setup, cost: CostModel, span: int, max_len: int, make_cache: CacheMaker | None) -> Simulator:
    sequences = setup.config.max_num_seqs + setup.waiting
    if make_cache is None:
        cache: PrefixCache[Any] = CountingCache(setup.blocks, setup.block_size, sequences)
    else:
        cache = make_cache(CacheSpec((setup.blocks,), setup.block_size, sequences, -(-max_len // setup.block_size)))
    rules = HostRules(
        lag=setup.lag,
        max_arrivals=setup.config.max_arrivals,
        max_queued_requests=setup.max_queued_requests,
        max_queued_tokens=setup.max_queued_tokens,
        use_prefix=setup.use_prefix,
        span=span,
        deadline_s=setup.deadline_s,
        deadline_per_token_s=setup.deadline_per_token_s,
    )
    config = dataclasses.replace(
        setup.config,
        watermark_blocks=_watermark(setup),
        step_sizes=setup.config.step_sizes or tuple(sorted({tokens for tokens, _ in cost.shapes if tokens})),
    )
    return Simulator(ChunkedScheduler(config, cache), cache, cost, rules)


def simulate(
    trace: Trace, setup: Setup, cost: CostModel, *, make_cache: CacheMaker | None = None, label: Mapping[str, Any] | None = None
) -> Outcome:
    """Replay a trace on an engine.

    Args:
        trace: What arrives.
        setup: The engine.
        cost: How long its steps take.
        make_cache: The cache that serves; None: blocks are only counted, and prefixes are found as far as the trace says.
        label: What the outcome is called.

    Raises:
        ConfigError: Settings that cannot work, or a request that cannot fit.
    """
    max_len = int(trace.limit_len.max(initial=1))
    ready = simulator(dataclasses.replace(setup, load=1.0), cost, trace.span, max_len, make_cache)
    loaded = trace.at_load(setup.load)
    books, steps = ready.run(loaded, knobs=None if make_cache else knobs_of(setup))
    return Outcome(label or {}, loaded, books, steps)


def sweep(
    trace: Trace,
    grid: Mapping[str, Sequence[Any]],
    base: Setup,
    cost: CostModel,
    *,
    make_cache: CacheMaker | None = None,
    jobs: int = 1,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Replay a trace on every engine of a grid, in the grid's order.

    Args:
        trace, cost, make_cache: As for `simulate`.
        grid: Values of each setting.
        base: The rest of the settings.
        jobs: Processes; each compiles what it runs.
        progress: Called with each outcome as it comes.
    """
    # Loads last: engines that differ in nothing else share a compiled program.
    grid = {name: grid[name] for name in sorted(grid, key=lambda name: name == "load")}
    work = list(points(grid, base))
    if jobs <= 1:
        return [_told(simulate(trace, setup, cost, make_cache=make_cache, label=label), progress) for label, setup in work]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(work)), mp_context=context) as pool:
        tasks = [pool.submit(simulate, trace, setup, cost, make_cache=make_cache, label=label) for label, setup in work]
        return [_told(task.result(), progress) for task in tasks]


def _told(outcome: Outcome, progress: Callable[[Outcome], None] | None) -> Outcome:
    if progress is not None:
        progress(outcome)
    return outcome
