"""Conformance of the `AttentionBackend` seam: a table of cases against dense attention in float64, and what blocks promise.

Knows no backend. Memory is filled with NaN before anything is written, so whatever reads an unused block, a stale slot or another
layer is noticed. `check_attention(backend)` runs all of it; a fork may add cases of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.seams import AttentionBackend, AttentionBatch
from octavo_core.specs import KVGroupSpec, KVKind
from octavo_core.testing.device import expect

LAYERS: Final = (3, 5)
"""Model layers of the group under test."""


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One step to attend over.

    Attributes:
        name: A sentence's worth.
        rows: (tokens already in memory, new tokens) of each row; rows with one new token first.
        q_heads, kv_heads, head_dim, block_size: Shapes.
        dtype: Of stored KV.
        q_dtype: Of queries and answers.
        spare_rows, spare_tokens, spare_blocks: Padding beyond the live rows and tokens, and blocks nobody uses.
        kind, window, softcap, sinks: As in `KVGroupSpec`. Blocks out of a window's reach are given up: the table names block 0 there.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    q_dtype: str = "float32"
    spare_rows: int = 2
    spare_tokens: int = 3
    spare_blocks: int = 3
    kind: KVKind = "full"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def spec(self) -> KVGroupSpec:
        """The group whose memory is used."""
        shape = LAYERS, self.kv_heads, self.head_dim, self.dtype, self.block_size
        return KVGroupSpec(self.kind, *shape, window=self.window, softcap=self.softcap, sinks=self.sinks)

    def first_held(self, old: int) -> int:
        """The first token in memory of a row with `old` tokens before the step."""
        return 0 if self.window is None else max(old - self.window + 1, 0) // self.block_size * self.block_size


DECODE: Final = ((0, 1), (15, 1), (16, 1), (90, 1), (31, 1))
CHUNKS: Final = ((32, 33), (7, 20), (0, 18))
MIXED: Final = ((63, 1), (0, 1), (20, 1), (16, 17), (0, 40), (45, 2))

CASES: Final = (
    AttentionCase("decode only", DECODE),
    AttentionCase("decode in bfloat16", DECODE, dtype="bfloat16", q_dtype="bfloat16"),
    AttentionCase("one row alone, no padding", ((70, 1),), spare_rows=0, spare_tokens=0),
    AttentionCase("a whole prompt", ((0, 50),)),
    AttentionCase("chunks of prompts", CHUNKS),
    AttentionCase("chunks of prompts in bfloat16", CHUNKS, dtype="bfloat16", q_dtype="bfloat16"),
    AttentionCase("a chunk longer than the tiles of most kernels", ((100, 300), (3, 5)), spare_tokens=29),
    AttentionCase("mixed step", MIXED),
    AttentionCase("mixed step in bfloat16", MIXED, dtype="bfloat16", q_dtype="bfloat16"),
    AttentionCase("float32 queries over bfloat16 memory", MIXED, dtype="bfloat16"),
    AttentionCase("as many KV heads as query heads", MIXED, q_heads=3, kv_heads=3),
    AttentionCase("3 query heads to a KV head, head size 64", MIXED, q_heads=9, kv_heads=3, head_dim=64),
    AttentionCase("4 query heads to a KV head, head size 128", MIXED, q_heads=8, kv_heads=2, head_dim=128, block_size=32),
    AttentionCase("8 query heads to one KV head, blocks of 64", MIXED, q_heads=8, kv_heads=1, head_dim=64, block_size=64),
    AttentionCase(
        "8 query heads to a KV head in bfloat16, blocks of 32",
        MIXED,
        q_heads=16,
        kv_heads=2,
        head_dim=128,
        block_size=32,
        dtype="bfloat16",
        q_dtype="bfloat16",
    ),
)

RULE_CASES: Final = (
    AttentionCase("window", MIXED, kind="window", window=24),
    AttentionCase("window of one token", MIXED, kind="window", window=1),
    AttentionCase("window wider than every row", MIXED, kind="window", window=500),
    AttentionCase(
        "window in bfloat16, long rows", ((600, 1), (3, 1), (300, 40), (0, 300)), kind="window", window=50, dtype="bfloat16"
    ),
    AttentionCase("window over several tiles", ((900, 1), (1, 1), (400, 200)), kind="window", window=300, block_size=32),
    AttentionCase("soft cap", MIXED, softcap=1.5),
    AttentionCase("sinks", MIXED, sinks=True),
    AttentionCase("window, sinks and cap together", MIXED, kind="window", window=17, sinks=True, softcap=2.0, q_heads=6),
    AttentionCase(
        "sinks with a window in bfloat16", MIXED, kind="window", window=40, sinks=True, dtype="bfloat16", q_dtype="bfloat16"
    ),
)
"""What sliding-window layers, capped scores and sinks need; a backend may decline them."""

LATENT_CASES: Final = (
    AttentionCase("latent, mixed step", MIXED, kind="latent", kv_heads=1, head_dim=40),
    AttentionCase(
        "latent in bfloat16", MIXED, kind="latent", kv_heads=1, q_heads=16, head_dim=72, dtype="bfloat16", q_dtype="bfloat16"
    ),
    AttentionCase("latent, decode only", DECODE, kind="latent", kv_heads=1, head_dim=40, block_size=32),
)
"""One stored vector a token, key and value at once; a backend may decline them."""


class Problem(NamedTuple):
    """A case with numbers in it. Queries, keys and values are already rounded to the case's dtypes.

    `keys` and `values` hold the whole context of each row; `history_slots` are those of the tokens before the step (−1: given up).
    `sinks` is None for cases without.
    """

    case: AttentionCase
    num_blocks: int
    queries: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    history_slots: np.ndarray
    batch: AttentionBatch
    sinks: np.ndarray | None

    @property
    def scale(self) -> float:
        """Usual scale of a head."""
        return float(self.case.head_dim) ** -0.5

    def new_kv(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V of the step's tokens, pads included."""
        width = len(self.queries)
        return tuple(
            _pad(np.concatenate([x[old:] for x, (old, _) in zip(xs, self.case.rows, strict=True)]), width)
            for xs in (self.keys, self.values)
        )  # type: ignore[return-value]

    def old_kv(self) -> tuple[np.ndarray, np.ndarray]:
        """K and V of the tokens before the step."""
        return tuple(
            np.concatenate([x[:old] for x, (old, _) in zip(xs, self.case.rows, strict=True)]) for xs in (self.keys, self.values)
        )  # type: ignore[return-value]


def make_problem(case: AttentionCase, *, seed: int = 0) -> Problem:
    """Numbers for a case: random vectors, block tables out of order, the highest block of the pool in use."""
    rng = np.random.default_rng(seed)
    contexts = [old + new for old, new in case.rows]
    tables, num_blocks = _tables(rng, case, contexts)
    num_tokens = sum(new for _, new in case.rows)

    def rounded(dtype: str, *shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype), np.float64)

    kv = [[rounded(case.dtype, n, case.kv_heads, case.head_dim) for n in contexts] for _ in range(2)]
    if case.kind == "latent":
        kv[1] = kv[0]
    queries = rounded(case.q_dtype, num_tokens + case.spare_tokens, case.q_heads, case.head_dim)
    slots = [
        table[np.arange(n) // case.block_size] * case.block_size + np.arange(n) % case.block_size
        for table, n in zip(tables, contexts, strict=True)
    ]
    new_slots = np.concatenate([s[old:] for s, (old, _) in zip(slots, case.rows, strict=True)])
    old_slots = np.concatenate([s[:old] for s, (old, _) in zip(slots, case.rows, strict=True)])
    held = np.concatenate([np.arange(old) >= case.first_held(old) for old, _ in case.rows])
    for table, (old, _) in zip(tables, case.rows, strict=True):
        table[: case.first_held(old) // case.block_size] = 0
    batch = _batch(case, contexts, tables, _pad(new_slots, len(queries), -1))
    sinks = rng.normal(size=case.q_heads).astype(np.float32) * 2 if case.sinks else None
    return Problem(case, num_blocks, queries, kv[0], kv[1], np.where(held, old_slots, -1).astype(np.int32), batch, sinks)


def _tables(rng: np.random.Generator, case: AttentionCase, contexts: Sequence[int]) -> tuple[list[np.ndarray], int]:
    counts = [-(-n // case.block_size) for n in contexts]
    num_blocks = 1 + sum(counts) + case.spare_blocks
    ids = 1 + rng.permutation(num_blocks - 1)
    highest = int(np.argmax(ids))
    ids[[0, highest]] = ids[[highest, 0]]
    return np.split(ids[: sum(counts)], np.cumsum(counts)[:-1]), num_blocks


def _batch(case: AttentionCase, contexts: Sequence[int], tables: Sequence[np.ndarray], slots: np.ndarray) -> AttentionBatch:
    num_rows = len(case.rows)
    width = num_rows + case.spare_rows
    new = [n for _, n in case.rows]
    positions = np.concatenate([np.arange(old, old + n) for old, n in case.rows])
    starts = np.full(width + 1, sum(new))
    starts[: num_rows + 1] = np.concatenate([[0], np.cumsum(new)])
    table = np.zeros((width, max(map(len, tables)) + 2))
    for row, ids in enumerate(tables):
        table[row, : len(ids)] = ids
    num_single = next((i for i, n in enumerate(new) if n != 1), num_rows)
    fields = _pad(positions, len(slots)), starts, _pad(np.array(contexts), width), table, slots, num_single, num_rows
    return AttentionBatch(*(jnp.asarray(f, jnp.int32) for f in fields))


def dense_attention(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The answer for every live token in float64, and how far a backend may be from it.

    The allowance is six standard deviations of independent roundings: of the scaled query and of the softmax weights to the KV's dtype,
    of the answer to the query's; plus float32 sums over head size and context, at their worst.
    """
    answers, allowances = [], []
    first = 0
    for keys, values, (old, new) in zip(problem.keys, problem.values, problem.case.rows, strict=True):
        answer, allowed = _dense_row(problem, problem.queries[first : first + new], keys, values, old)
        answers.append(answer)
        allowances.append(allowed)
        first += new
    return np.concatenate(answers), np.concatenate(allowances)


def _dense_row(
    problem: Problem, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, old: int
) -> tuple[np.ndarray, np.ndarray]:
    case = problem.case
    group = case.q_heads // case.kv_heads
    keys, values = (np.repeat(x, group, axis=1) for x in (keys, values))
    ahead = np.arange(len(keys))[None] - (old + np.arange(len(queries))[:, None])
    hidden = (ahead > 0) | (False if case.window is None else ahead <= -case.window)
    scores = np.einsum("qhd,khd->hqk", queries, keys) * problem.scale
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    scores[:, hidden] = -np.inf
    sink = np.full(case.q_heads, -np.inf) if problem.sinks is None else np.asarray(problem.sinks, np.float64)
    top = np.maximum(scores.max(-1, keepdims=True), sink[:, None, None])
    weights = np.exp(scores - top)
    weights /= weights.sum(-1, keepdims=True) + np.exp(sink[:, None, None] - top)
    answer = np.einsum("hqk,khd->qhd", weights, values)
    spread = np.sqrt(np.einsum("hqk,khd->qhd", weights**2, values**2))
    size = problem.scale * np.sqrt(np.einsum("qhd,khd->hqk", queries**2, keys**2)).max(-1).T[..., None]
    total = np.einsum("hqk,khd->qhd", weights, np.abs(values))
    sums = 2.0**-22 * (case.head_dim + len(keys)) * total
    return answer, 6 * _unit(case.dtype) * (1 + 2 * size) * spread + _unit(case.q_dtype) * np.abs(answer) + sums


def _unit(dtype: str) -> float:
    """Largest relative error of one rounding."""
    return float(jnp.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]


def check_attention(backend: AttentionBackend[Any], cases: Sequence[AttentionCase] = CASES, *, seed: int = 0) -> None:
    """Run the whole suite.

    Raises:
        AssertionError: Naming the case and what was wrong with it.
    """
    for case in cases:
        check_parity(backend, case, seed=seed)
    check_moved_blocks(backend, cases[-1], seed=seed)
    check_dropped_writes(backend, cases[0])


def check_parity(backend: AttentionBackend[Any], case: AttentionCase, *, seed: int = 0) -> None:
    """Write a history, then a step, into memory full of NaN, attend, and compare with `dense_attention`."""
    problem = make_problem(case, seed=seed)
    kv = fill(backend, problem)
    out = np.asarray(attend(backend, kv, problem), np.float64)
    expect(
        out.shape == problem.queries.shape, f"{case.name}: the answer's shape is {out.shape}, the queries' {problem.queries.shape}"
    )
    expect(
        np.isfinite(out).all(), f"{case.name}: not finite at tokens {np.unique(np.argwhere(~np.isfinite(out))[:, 0])} (pads count)"
    )
    want, allowed = dense_attention(problem)
    error = np.abs(out[: len(want)] - want)
    worst = np.unravel_index(np.argmax(error / allowed), error.shape)
    expect(
        (error <= allowed).all(),
        f"{case.name}: off by {error[worst]:.3g} at token, head, element {tuple(map(int, worst))}; allowed {allowed[worst]:.3g}; "
        f"{(error > allowed).any(axis=(1, 2)).sum()} of {len(want)} tokens differ",
    )


def fill(backend: AttentionBackend[Any], problem: Problem) -> Any:
    """Memory as the step finds it after its own write: NaN wherever nothing was written, the other layer filled with noise."""
    case = problem.case
    kv = poisoned(backend, case.spec(), problem.num_blocks)
    write = jax.jit(backend.write, static_argnums=1)
    rng = np.random.default_rng(1)
    for layer in range(len(LAYERS)):
        for (k, v), slots in ((problem.old_kv(), problem.history_slots), (problem.new_kv(), problem.batch.slot_mapping)):
            if layer == 0:
                k, v = rng.normal(size=k.shape), rng.normal(size=v.shape)
            if len(slots):
                kv = write(kv, layer, jnp.asarray(k, case.q_dtype), jnp.asarray(v, case.q_dtype), jnp.asarray(slots, jnp.int32))
    return kv


def poisoned(backend: AttentionBackend[Any], spec: KVGroupSpec, num_blocks: int) -> Any:
    """Memory in which every element is NaN."""
    kv = backend.init_kv(spec, num_blocks)
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    return backend.scatter(kv, ids, jnp.full_like(backend.gather(kv, ids), 0xFF))


def attend(backend: AttentionBackend[Any], kv: Any, problem: Problem) -> jax.Array:
    """The backend's answer, of the group's last layer, jitted."""
    layer = len(LAYERS) - 1
    case = problem.case
    wanted = {
        "window": case.window,
        "softcap": case.softcap,
        "sinks": None if problem.sinks is None else jnp.asarray(problem.sinks),
    }
    rules = {name: value for name, value in wanted.items() if value is not None}
    run = jax.jit(lambda kv, q, batch: backend.attend(kv, layer, q, batch, scale=problem.scale, **rules))
    return run(kv, jnp.asarray(problem.queries, case.q_dtype), problem.batch)


def check_moved_blocks(backend: AttentionBackend[Any], case: AttentionCase, *, seed: int = 0) -> None:
    """Blocks carried elsewhere as bytes give the same answer to the last bit, and nothing else is touched."""
    problem = make_problem(case, seed=seed)
    kv = fill(backend, problem)
    before = attend(backend, kv, problem)
    ids = jnp.arange(problem.num_blocks, dtype=jnp.int32)
    data = jax.jit(backend.gather)(kv, ids)
    expect(data.dtype == jnp.uint8 and data.ndim == 2, f"gather answers {data.dtype}{data.shape}; wanted uint8[ids, block_bytes]")
    size = (
        len(LAYERS)
        * (1 if case.kind == "latent" else 2)
        * case.block_size
        * case.kv_heads
        * case.head_dim
        * jnp.dtype(case.dtype).itemsize
    )
    expect(data.shape[1] >= size, f"a block is {data.shape[1]} bytes; all its layers need {size}")
    target = jnp.roll(ids, 1)
    moved = jax.jit(backend.scatter)(poisoned(backend, case.spec(), problem.num_blocks), target, data)
    batch = problem.batch._replace(block_table=target[problem.batch.block_table])
    after = attend(backend, moved, problem._replace(batch=batch))
    expect(np.array_equal(before, after), "attention over blocks moved by gather and scatter differs from attention before")
    skipping = jax.jit(backend.scatter)(kv, jnp.where(ids % 2 == 0, -1, ids), jnp.zeros_like(data))
    left = np.asarray(backend.gather(skipping, ids))
    want = np.where((np.asarray(ids) % 2 == 0)[:, None], np.asarray(data), 0)
    expect(np.array_equal(left, want), "scatter with ids of −1 stored something, or left out what it should store")


def check_dropped_writes(backend: AttentionBackend[Any], case: AttentionCase) -> None:
    """Slot −1 and slots beyond the pool store nothing; the first and the last slot of the pool are real."""
    spec, num_blocks = case.spec(), 3
    ids = jnp.arange(num_blocks, dtype=jnp.int32)
    end = num_blocks * case.block_size
    empty = backend.init_kv(spec, num_blocks)
    write = jax.jit(backend.write, static_argnums=1)

    def ones(slots: list[int]) -> np.ndarray:
        rows = jnp.ones((len(slots), case.kv_heads, case.head_dim), case.q_dtype)
        return np.asarray(backend.gather(write(empty, 0, rows, rows, jnp.asarray(slots, jnp.int32)), ids))

    expect(not np.asarray(backend.gather(empty, ids)).any(), "init_kv answers memory that is not zeroed")
    expect(not ones([-1, -1]).any(), "slot −1 stored something")
    expect(not ones([end, end + case.block_size]).any(), "a slot beyond the pool stored something; clipped to the last block?")
    touched = ones([0, end - 1]).any(axis=1)
    expect(
        touched.tolist() == [True, False, True], f"writing the pool's first and last slot touched blocks {np.flatnonzero(touched)}"
    )


def _pad(values: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    rest = [(0, 0)] * (values.ndim - 1)
    return np.pad(values, [(0, width - len(values)), *rest], constant_values=fill)
