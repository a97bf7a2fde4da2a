"""Which step shapes are compiled, how many tokens a step may hold and what it costs: decided by timing the device it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

from octavo_engine._src import sizing
from octavo_engine._src.programs import Programs
from octavo_engine._src.runner import ModelRunner
from octavo_engine.config import EngineConfig

DEVICE_BUDGET: Final = 2_048
DEVICE_COST_US: Final = (10_000, 0, 10)
"""Assumed of an accelerator until steps have been seen."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a scheduler has to know of the steps of a device.

    Attributes:
        budget: Most new tokens in a step.
        why: The reason, for the start-up table.
        sizes: Token counts a step is padded to; empty where pads cost nothing.
        cost_us: µs of any step, of a decode row more and of a prompt token more.
    """

    budget: int
    why: str
    sizes: tuple[int, ...]
    cost_us: tuple[int, int, int]


def num_programs(config: EngineConfig, max_num_seqs: int, *, alone: bool, pads_free: bool) -> int:
    """About how many programs `compile_steps` compiles, for a progress bar."""
    likely = sizing.buckets(config.max_num_batched_tokens or sizing.PROBE_TOKENS[1], max_num_seqs, alone=alone)
    return (3 if pads_free else len(likely)) + len({b.rows for b in likely})


def compile_steps(
    runner: ModelRunner,
    config: EngineConfig,
    max_num_seqs: int,
    advance: Callable[[int], None],
    *,
    on_cpu: bool,
    alone: bool,
    pads_free: bool,
    kept: Programs,
) -> Steps:
    """Compile the shapes and time some, unless an earlier start did: a budget that moved from start to start would be compiled anew.

    Args:
        runner: Compiles and runs them.
        config: The operator's wishes.
        max_num_seqs: Most rows in a step.
        advance: Hears of each program.
        on_cpu: The budget is chosen by time.
        alone: One row is not as dear as eight.
        pads_free: Tokens that only fill a shape cost little: two shapes are enough, however many rows are sampled.
        kept: What earlier starts found.
    """
    asked = config.max_num_batched_tokens
    largest = sizing.buckets(asked or max(sizing.CPU_BUDGETS[-1], 2 * max_num_seqs), max_num_seqs, alone=alone)
    rows = sorted({b.rows for b in largest}) if pads_free else ()

    def compile_for(budget: int) -> None:
        wanted = sizing.few_shapes(budget, max_num_seqs) if pads_free else sizing.buckets(budget, max_num_seqs, alone=alone)
        runner.compile(wanted, advance, rows=rows)

    def timed() -> tuple[int, str]:
        compile_for(sizing.PROBE_TOKENS[1])
        small_s, large_s = (runner.time_step(tokens) for tokens in sizing.PROBE_TOKENS)
        return sizing.cpu_budget(small_s, large_s, max_num_seqs)

    if asked:
        budget, why = asked, "--max-num-batched-tokens"
    elif on_cpu:
        budget, why = kept.recall("token budget", timed)
    else:
        budget, why = DEVICE_BUDGET, "default of this device"
    compile_for(budget)
    sizes = () if pads_free else tuple(b.tokens for b in runner.shapes)
    cost_us = kept.recall(f"cost of a step of {budget}", lambda: _cost_us(runner, budget)) if on_cpu else DEVICE_COST_US
    return Steps(budget, why, sizes, cost_us)


def _cost_us(runner: ModelRunner, budget: int) -> tuple[int, int, int]:
    """What a step costs on this device until the scheduler has seen some."""
    small, large = (min(tokens, budget) for tokens in (sizing.ROW_LANES, sizing.PROBE_TOKENS[1]))
    small_s, large_s = runner.time_step(small), runner.time_step(large)
    token_s = max((large_s - small_s) / max(large - small, 1), 0.0)
    base_s = max(small_s - token_s * small, 0.0)
    return round(1e6 * base_s), round(1e6 * token_s), round(1e6 * token_s)
