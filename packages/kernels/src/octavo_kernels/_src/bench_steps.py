"""Steps with numbers in them, as large as serving is, and what a sample of their tokens must answer."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.seams import AttentionBatch
from octavo_kernels._src.fp8 import FP8, quantise
from octavo_kernels._src.pools import Pools
from octavo_kernels._src.reference_attention import ReferenceAttention, ScaledKV
from octavo_kernels.cases import SpeedCase

ROUND_S = 0.1
"""Length of a round of measurements."""
SAMPLE = 16
"""Tokens checked against the reference."""
ALLOWED = 1e-2
"""Relative error in the 2-norm: weights and answers are rounded to bfloat16, half a unit of 2^-8 each."""


class Step(NamedTuple):
    """Inputs of one layer of one step."""

    case: SpeedCase
    q: jax.Array
    kv: Pools
    batch: AttentionBatch

    @property
    def scale(self) -> float:
        """Usual scale of a head."""
        return float(self.case.head_dim) ** -0.5

    @property
    def rules(self) -> dict[str, Any]:
        """What attention is told beside it."""
        return {} if self.case.window is None else {"window": self.case.window}


def make_step(case: SpeedCase, *, seed: int = 0) -> Step:
    """Random vectors, block tables out of order, as many rows as live ones, no padding."""
    rng = np.random.default_rng(seed)
    contexts = np.array([old + new for old, new in case.rows])
    counts = -(-contexts // case.block_size)
    num_blocks = int(counts.sum()) + 1
    ids = np.split(1 + rng.permutation(num_blocks - 1), np.cumsum(counts)[:-1])
    table = np.zeros((len(contexts), int(counts.max())), np.int32)
    for row, own in enumerate(ids):
        table[row, : len(own)] = own
    new = np.array([n for _, n in case.rows])
    positions = np.concatenate([np.arange(old, old + n) for old, n in case.rows])
    starts = np.concatenate([[0], np.cumsum(new)])
    single = int(np.argmax(new != 1)) if (new != 1).any() else len(new)
    fields = positions, starts, contexts, table, np.full(len(positions), -1), single, len(new)
    batch = AttentionBatch(*(jnp.asarray(f, jnp.int32) for f in fields))
    return Step(case, *_vectors(case, num_blocks, seed), batch)


def _vectors(case: SpeedCase, num_blocks: int, seed: int) -> tuple[jax.Array, Pools]:
    keys = jax.random.split(jax.random.key(seed), 3)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    pool = (num_blocks, case.kv_heads, case.block_size, case.head_dim)
    k, v = (normal(key, pool, jnp.bfloat16) for key in keys[:2])
    if case.is_latent:
        return normal(keys[2], (case.num_tokens, case.q_heads, case.head_dim), jnp.bfloat16), _latent_pools(case, k)
    q = normal(keys[2], (case.num_tokens, case.q_heads, case.head_dim), jnp.bfloat16)
    if case.dtype not in FP8:
        return q, Pools((k,), (v,))
    (k, k_scale), (v, v_scale) = (jax.jit(quantise, static_argnums=1)(x, case.dtype) for x in (k, v))
    return q, Pools((k,), (v,), (k_scale,), (v_scale,))


def _latent_pools(case: SpeedCase, k: jax.Array) -> Pools:
    if case.dtype not in FP8:
        return Pools((k,), ())
    elements, scale = jax.jit(quantise, static_argnums=1)(k, case.dtype)
    return Pools((elements,), (), (scale,), ())


def _as_oracle(kv: Pools) -> Any:
    """The same memory as `ReferenceAttention` keeps it."""

    def stacked(*kinds: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.stack([kind[0] for kind in kinds if kind])[None].swapaxes(3, 4)

    elements = stacked(kv.k, kv.v)
    return ScaledKV(elements, stacked(kv.k_scale, kv.v_scale)) if kv.k_scale else elements


def check_sample(step: Step, answers: jax.Array, *, seed: int = 0) -> float:
    """Compare a sample of tokens with the float32 reference; answers the relative error.

    Raises:
        AssertionError: When it is more than roundings explain, or not a number.
    """
    case = step.case
    rng = np.random.default_rng(seed)
    tokens = np.unique(np.concatenate([rng.integers(0, case.num_tokens, SAMPLE), [0, case.num_tokens - 1]]))
    rows = np.searchsorted(np.asarray(step.batch.query_start)[1:], tokens, side="right")
    oracle = ReferenceAttention()
    memory = _as_oracle(step.kv)
    positions = step.batch.positions[tokens]
    count = jnp.int32(len(tokens))
    batch = AttentionBatch(
        positions,
        jnp.arange(len(tokens) + 1, dtype=jnp.int32),
        positions + 1,
        step.batch.block_table[rows],
        positions,
        count,
        count,
    )
    want = jax.jit(functools.partial(oracle.attend, layer=0, scale=step.scale, **step.rules))(
        memory, q=step.q[tokens].astype(jnp.float32), batch=batch
    )
    got = answers[tokens].astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    if not error < ALLOWED:
        raise AssertionError(f"{case.name}: relative error {error:.3g} at {len(tokens)} sampled tokens, allowed {ALLOWED}")
    return error


def median_s(run: Callable[[], Any], *, rounds: int, round_s: float = ROUND_S) -> float:
    """Median over `rounds` of the mean time of a call, in rounds of about `round_s`, after one that warms up.

    Calls of a round are queued before the first ends, so that a round pays the host once.
    """
    jax.block_until_ready(run())
    begin = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(1, round(round_s / (time.perf_counter() - begin)))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)][-1])
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)
