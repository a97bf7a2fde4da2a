"""Other people's attention on the same GPU in the same run: JAX's paged kernel and cuDNN through JAX, flashinfer and flash-attn through torch
where they can be imported.

Knows their documented interfaces. What torch computed is held against the oracle before it is timed: a figure of a call made wrongly is none.
"""

from __future__ import annotations

import importlib
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo_kernels._src.bench_report import Report
from octavo_kernels._src.bench_steps import ROUND_S, Step, check_sample, make_step, median_s
from octavo_kernels.cases import SpeedCase

LAYERS = 8
"""Attention calls in one program, as in a model: each takes the answer of the one before."""
WORKSPACE_BYTES: Final = 128 << 20
"""What flashinfer's documentation asks for."""


class Rival(NamedTuple):
    """Somebody else's kernel.

    Attributes:
        name: In the report.
        modules: What must be importable.
        serves: Which cases it is timed on.
        seconds: Seconds a layer takes, as the median of so many rounds.
    """

    name: str
    modules: tuple[str, ...]
    serves: Callable[[SpeedCase], bool]
    seconds: Callable[[SpeedCase, int], float]


def importable(report: Report) -> list[Rival]:
    """Those whose modules are here; of each other one line."""
    found = []
    for rival in RIVALS:
        try:
            for module in rival.modules:
                importlib.import_module(module)
        except ImportError as error:
            report.add(f"others/{rival.name}", f"not measured: {error}"[:300], "text", 1)
        else:
            found.append(rival)
    return found


def times(report: Report, present: list[Rival], case: SpeedCase, rounds: int) -> Iterator[tuple[str, float]]:
    """Name and seconds of each that serves a case; one that fails leaves a line that says so."""
    for rival in present:
        if case.window is not None or case.dtype != "bfloat16" or case.is_latent or not rival.serves(case):
            continue
        try:
            found = rival.seconds(case, rounds)
        except Exception as error:
            said = f"not measured: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            report.add(f"{case.name}/{rival.name}", said[:300], "text", 1)
        else:
            yield rival.name, found


def _is_decode(case: SpeedCase) -> bool:
    return case.name.startswith("decode")


def _is_even_decode(case: SpeedCase) -> bool:
    return _is_decode(case) and len(set(case.rows)) == 1


def _is_whole_prompts(case: SpeedCase) -> bool:
    return case.name.startswith("prefill") and len(set(case.rows)) == 1 and case.rows[0][0] == 0


def _jax_paged(case: SpeedCase, rounds: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    step = make_step(case)
    k, v = (pools[0].swapaxes(0, 1) for pools in step.kv)
    splits = 16 if len(case.rows) * case.kv_heads < 1024 else 4
    table = step.batch.block_table
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % (splits * 4))))

    def layers(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            q = q + paged_attention(q, k, v, table, lengths, k_splits=splits, pages_per_compute_block=4, block_h=16, num_warps=4)
        return q

    inputs = (step.q * step.scale, k, v, table, step.batch.context_len)
    program = jax.jit(layers).lower(*inputs).compile()
    return median_s(lambda: program(*inputs), rounds=rounds) / LAYERS


def _cudnn_dense(case: SpeedCase, rounds: int) -> float:
    rows, length = len(case.rows), case.rows[0][1]
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (case.q_heads, case.kv_heads, case.kv_heads)
    inputs = tuple(
        jax.random.normal(key, (rows, length, n, case.head_dim), jnp.bfloat16) for key, n in zip(keys, heads, strict=True)
    )

    def layers(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            q = q + jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return q

    program = jax.jit(layers).lower(*inputs).compile()
    return median_s(lambda: program(*inputs), rounds=rounds) / LAYERS


def _as_torch(x: jax.Array) -> Any:
    """The same memory."""
    import torch

    return torch.from_dlpack(jax.block_until_ready(x))


def _torch_median_s(call: Callable[[], Any], rounds: int) -> float:
    """Median over rounds of about `ROUND_S` of a call's mean time on torch's stream."""
    import torch

    def timed(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    timed(3)
    calls = max(1, round(ROUND_S / timed(3)))
    return statistics.median(timed(calls) for _ in range(rounds))


def _checked_s(step: Step, call: Callable[[], Any], rounds: int) -> float:
    """Time of a call whose answer agrees with the oracle."""
    check_sample(step, jnp.from_dlpack(call().reshape(step.q.shape).contiguous()))
    return _torch_median_s(call, rounds)


def pages(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The block table as flashinfer takes it: where each row's page ids begin in one list, the list, and tokens in each row's last page."""
    size, contexts, table = step.case.block_size, np.asarray(step.batch.context_len), np.asarray(step.batch.block_table)
    counts = -(-contexts // size)
    ids = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    last = contexts - (counts - 1) * size
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), ids.astype(np.int32), last.astype(np.int32)


def _flashinfer(case: SpeedCase, rounds: int) -> float:
    """Pools as they are: its layout `HND` is [pages, kv_heads, page_size, head_dim]."""
    import flashinfer  # type: ignore[import-not-found]
    import torch

    step = make_step(case)
    plan = (torch.from_numpy(x).cuda() for x in pages(step))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        *plan,
        case.q_heads,
        case.kv_heads,
        case.head_dim,
        case.block_size,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        sm_scale=step.scale,
    )
    q, k, v = (_as_torch(x) for x in (step.q, step.kv.k[0], step.kv.v[0]))
    return _checked_s(step, lambda: wrapper.run(q, (k, v)), rounds)


def _flash_attn_paged(case: SpeedCase, rounds: int) -> float:
    """FlashAttention-3 wants [pages, page_size, kv_heads, head_dim]: pools are rearranged before anything is timed."""
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    step = make_step(case)
    q, table, lengths = (_as_torch(x) for x in (step.q[:, None], step.batch.block_table, step.batch.context_len))
    k, v = (_as_torch(pool[0]).transpose(1, 2).contiguous() for pool in (step.kv.k, step.kv.v))
    options = {"cache_seqlens": lengths, "page_table": table, "softmax_scale": step.scale, "causal": True}
    return _checked_s(step, lambda: flash_attn_with_kvcache(q, k, v, **options), rounds)


def _flash_attn_dense(case: SpeedCase, rounds: int) -> float:
    """FlashAttention-3 over the same keys and values, laid out without blocks."""
    from flash_attn_interface import flash_attn_func

    step = make_step(case)
    rows, length = len(case.rows), case.rows[0][1]
    q = _as_torch(step.q).reshape(rows, length, case.q_heads, case.head_dim)
    table = step.batch.block_table
    k, v = (
        _as_torch(pool[0][table].swapaxes(2, 3).reshape(rows, -1, case.kv_heads, case.head_dim)[:, :length])
        for pool in (step.kv.k, step.kv.v)
    )

    def call() -> Any:
        answer = flash_attn_func(q, k, v, softmax_scale=step.scale, causal=True)
        return answer[0] if isinstance(answer, tuple) else answer

    return _checked_s(step, call, rounds)


RIVALS: Final = (
    Rival("jax pallas-triton", (), _is_even_decode, _jax_paged),
    Rival("flashinfer", ("torch", "flashinfer"), _is_decode, _flashinfer),
    Rival("flash-attn 3", ("torch", "flash_attn_interface"), _is_decode, _flash_attn_paged),
    Rival("cudnn dense", (), _is_whole_prompts, _cudnn_dense),
    Rival("flash-attn 3 dense", ("torch", "flash_attn_interface"), _is_whole_prompts, _flash_attn_dense),
)
