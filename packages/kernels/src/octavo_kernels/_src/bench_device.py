"""The Hopper kernels on a Hopper GPU: right first, then how fast, beside JAX's own kernels in the same run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from octavo_core.testing.attention import check_dropped_writes, check_moved_blocks, check_parity
from octavo_kernels._src.bench_others import LAYERS, importable, times
from octavo_kernels._src.bench_profile import kernel_times_us
from octavo_kernels._src.bench_report import Report
from octavo_kernels._src.bench_steps import Step, check_sample, make_step, median_s
from octavo_kernels._src.hopper_attention import HopperAttention
from octavo_kernels._src.hopper_tuning import HopperChoices, candidates
from octavo_kernels.cases import HOPPER_CASES, QUICK, SPEED_CASES, SpeedCase

COPY_BYTES = 4 << 30
COMPILING = 8
"""Programs compiled at once."""


def run(report: Report, *, only: re.Pattern[str], quick: bool, mode: str) -> None:
    """Check, then time; in mode `sweep` every configuration, in mode `profile` every kernel."""
    backend = HopperAttention()
    if mode == "time":
        _check(report, backend, only)
    cases = [case for case in SPEED_CASES if only.search(case.name) and (not quick or case.name in QUICK)]
    if mode == "profile":
        _profile(report, cases)
    if mode == "profile" or not cases:
        return
    rounds = 3 if quick else 5
    copy = _copy_rate(rounds)
    report.add("copy bandwidth, read and written", copy / 1e9, "GB/s", rounds)
    others = importable(report) if mode == "time" else []
    for case in cases:
        _time_case(report, case, _sweep(case) if mode == "sweep" else {"": HopperChoices()}, copy, rounds)
        for name, seconds in times(report, others, case, rounds):
            _add_times(report, f"{case.name}/{name}", case, seconds, copy, rounds)


def _check(report: Report, backend: HopperAttention, only: re.Pattern[str]) -> None:
    checks: dict[str, Callable[[], Any]] = {}
    for case in HOPPER_CASES:
        checks[f"check/{case.name}"] = functools.partial(check_parity, backend, case)
    checks["check/blocks carried elsewhere as bytes"] = functools.partial(check_moved_blocks, backend, HOPPER_CASES[-1])
    checks["check/writes outside the pool"] = functools.partial(check_dropped_writes, backend, HOPPER_CASES[0])
    chosen = {name: check for name, check in checks.items() if only.search(name)}
    with ThreadPoolExecutor(COMPILING) as pool:
        running = {name: pool.submit(check) for name, check in chosen.items()}
        for name, future in running.items():
            try:
                future.result()
                report.add(name, "ok", "text", 1)
            except Exception as error:
                report.fail(name, error)


def _profile(report: Report, cases: Sequence[SpeedCase]) -> None:
    for case in cases:
        step = make_step(case)
        _, layers = _programs(step, HopperChoices())
        for kernel, (runs, mean_us) in kernel_times_us(layers, step.q, step.kv, step.batch).items():
            report.add(f"{case.name}/{kernel}", mean_us, "us", runs)


def _copy_rate(rounds: int) -> float:
    """Bytes a second of a device-to-device copy, read and written ones."""
    x = jax.random.normal(jax.random.key(0), (COPY_BYTES // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * COPY_BYTES / median_s(lambda: copy(x), rounds=rounds)


def _time_case(report: Report, case: SpeedCase, choices: dict[str, HopperChoices], copy: float, rounds: int) -> None:
    step = make_step(case)
    with ThreadPoolExecutor(COMPILING) as pool:
        programs = {label: pool.submit(_programs, step, choice) for label, choice in choices.items()}
    for label, future in programs.items():
        name = f"{case.name}{label}"
        try:
            once, layers = future.result()
            error = check_sample(step, once(step.q, step.kv, step.batch))
            seconds = median_s(functools.partial(layers, step.q, step.kv, step.batch), rounds=rounds) / LAYERS
            _add_times(report, f"{name}/hopper", case, seconds, copy, rounds)
            report.add(f"{name}/hopper/relative error", error, "", 1)
        except Exception as failure:
            report.fail(f"{name}/hopper", failure)


def _programs(step: Step, choices: HopperChoices) -> tuple[Any, Any]:
    """One call, and `LAYERS` in a chain, compiled."""
    backend = HopperAttention(choices=choices)

    def once(q: jax.Array, kv: Any, batch: Any) -> jax.Array:
        return backend.attend(kv, 0, q, batch, scale=step.scale, **step.rules)

    return _compiled(once, step), _compiled(_chain(once), step)


def _chain(once: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def layers(q: jax.Array, kv: Any, batch: Any) -> jax.Array:
        for _ in range(LAYERS):
            q = q + once(q, kv, batch)
        return q

    return layers


def _compiled(function: Callable[..., jax.Array], step: Step) -> Any:
    return jax.jit(function).lower(step.q, step.kv, step.batch).compile()


def _add_times(report: Report, name: str, case: SpeedCase, seconds: float, copy: float, rounds: int) -> None:
    report.add(f"{name}/time", seconds * 1e6, "us", rounds)
    if case.name.startswith("decode"):
        report.add(f"{name}/KV read", case.kv_bytes / seconds / 1e9, "GB/s", rounds)
        report.add(f"{name}/fraction of copy bandwidth", case.kv_bytes / seconds / copy, "", rounds)
    else:
        report.add(f"{name}/rate", case.flops / seconds / 1e12, "TFLOP/s", rounds)


def _sweep(case: SpeedCase) -> dict[str, HopperChoices]:
    """Every configuration that can launch; over latents there is one."""
    if case.is_latent:
        return {"": HopperChoices()}
    pool = (1, case.kv_heads, case.block_size, case.head_dim)
    kernel = "decode" if case.name.startswith("decode") else "prefill"
    return dict(candidates(case.q_heads // case.kv_heads, pool, kernel, case.dtype))
