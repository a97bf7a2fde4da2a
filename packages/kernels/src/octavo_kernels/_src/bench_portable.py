"""The portable backend on this machine's CPU, beside the float32 reference."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from octavo_core.specs import KVGroupSpec
from octavo_kernels._src.bench_report import Report
from octavo_kernels._src.bench_steps import make_step, median_s
from octavo_kernels._src.dispatch import attention_backend
from octavo_kernels.cases import SpeedCase

CASES = (
    SpeedCase("decode/rows=8/context=512", ((511, 1),) * 8, q_heads=9, kv_heads=3, head_dim=64, block_size=16),
    SpeedCase("decode/rows=32/context=512", ((511, 1),) * 32, q_heads=9, kv_heads=3, head_dim=64, block_size=16),
    SpeedCase("prefill/rows=1/query=256", ((0, 256),), q_heads=9, kv_heads=3, head_dim=64, block_size=16),
)


def run(report: Report, *, only: re.Pattern[str], quick: bool, mode: str) -> None:
    """Time one layer of each case, in float32 KV."""
    if mode != "time":
        raise SystemExit(f"--{mode} is about the Hopper kernels: add --device")
    for case in CASES[: 1 if quick else None]:
        for name in ("xla", "reference"):
            if only.search(f"{case.name}/{name}"):
                seconds = _seconds(case, name, rounds=3 if quick else 5)
                report.add(f"{case.name}/{name}/time", seconds * 1e6, "us", 3 if quick else 5)


def _seconds(case: SpeedCase, name: str, *, rounds: int) -> float:
    step = make_step(case)
    spec = KVGroupSpec("full", (0,), case.kv_heads, case.head_dim, "float32", case.block_size)
    backend = attention_backend(name, (spec,)).backend
    kv = backend.init_kv(spec, step.kv.k[0].shape[0])
    slots = jnp.arange(kv_slots := step.kv.k[0].shape[0] * case.block_size, dtype=jnp.int32)
    k, v = (pool[0].swapaxes(1, 2).reshape(kv_slots, case.kv_heads, case.head_dim) for pool in step.kv)
    kv = jax.jit(backend.write, static_argnums=1)(kv, 0, k.astype(jnp.float32), v.astype(jnp.float32), slots)
    attend = jax.jit(lambda kv, q, batch: backend.attend(kv, 0, q, batch, scale=step.scale))
    q = step.q.astype(jnp.float32)
    return median_s(lambda: attend(kv, q, step.batch), rounds=rounds)
