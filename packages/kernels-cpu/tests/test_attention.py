"""Attention in C++ against the seam's conformance suite, and bit for bit against itself in other steps."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.specs import KVGroupSpec
from octavo_core.testing import attention
from octavo_kernels_cpu import CpuAttention
from octavo_kernels_cpu._src.library import Library

FEW = [attention.CASES[i] for i in (0, 7, 8)]
"""The others take longer: most of a case's time goes to compiling what surrounds it."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in FEW else pytest.mark.slow) for case in attention.CASES],
    ids=lambda case: case.name,
)
def test_it_agrees_with_dense_attention(library: Library, case: attention.AttentionCase) -> None:
    attention.check_parity(CpuAttention(library), case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_can_be_carried_elsewhere_as_bytes(library: Library, dtype: str) -> None:
    attention.check_moved_blocks(
        CpuAttention(library), attention.AttentionCase("moved", attention.MIXED, dtype=dtype, q_dtype=dtype)
    )


def test_writes_outside_the_pool_store_nothing(library: Library) -> None:
    attention.check_dropped_writes(CpuAttention(library), attention.CASES[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_a_token_sees_the_same_to_the_last_bit_in_any_chunk(library: Library, dtype: str, tokens: int) -> None:
    """Tiles round queries and weights to bfloat16; a token alone in its row is not computed by them."""
    backend = CpuAttention(library)
    case = attention.AttentionCase("chunk", ((0, 290),), q_heads=6, kv_heads=2, head_dim=64, block_size=32, dtype=dtype)
    problem = attention.make_problem(case)
    kv = attention.fill(backend, problem)
    whole = np.asarray(attention.attend(backend, kv, problem))
    for end in (1, 2, 32, 33, 64, 65, 128, 129, 160, 290):
        first = max(0, end - tokens)
        batch = problem.batch._replace(
            query_start=jnp.minimum(jnp.arange(len(problem.batch.query_start)) * tokens, end - first),
            context_len=problem.batch.context_len.at[0].set(end),
            num_single=jnp.int32(end - first == 1),
        )
        chunk = np.asarray(attention.attend(backend, kv, problem._replace(queries=problem.queries[first:end], batch=batch)))
        if library.isa == "amx" and dtype == "bfloat16" and end - first == 1:
            assert np.allclose(chunk, whole[first:end], atol=2e-2)
        else:
            assert np.array_equal(chunk, whole[first:end])


def test_values_beyond_the_context_are_not_looked_at(library: Library) -> None:
    backend = CpuAttention(library)
    case = attention.AttentionCase("poison", ((0, 45),), q_heads=6, kv_heads=2, head_dim=64, block_size=32, dtype="bfloat16")
    problem = attention.make_problem(case)
    kv = attention.fill(backend, problem)
    clean = np.asarray(attention.attend(backend, kv, problem))
    slots = np.asarray(problem.batch.slot_mapping)
    behind = jnp.asarray(slots[slots >= 0].max() + 1 + np.arange(19), jnp.int32)
    nothing = jnp.full((19, 2, 64), jnp.nan, jnp.float32)
    kv = backend.write(kv, 0, nothing, nothing, behind)
    assert np.array_equal(np.asarray(attention.attend(backend, kv, problem)), clean)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "window", "window": 64}, "serves full attention, this group is 'window'"),
        ({"dtype": "float8_e4m3fn"}, "stores float32 and bfloat16"),
        ({"head_dim": 24}, "a multiple of 16"),
        ({"head_dim": 512}, "at most 256"),
        ({"block_size": 8}, "blocks of a multiple of 16"),
    ],
)
def test_what_it_cannot_serve_is_declined_with_the_reason(library: Library, change: dict, reason: str) -> None:
    spec = dataclasses.replace(KVGroupSpec("full", (0,), 2, 64, "float32", 32), **change)
    with pytest.raises(NotImplementedError, match=reason):
        CpuAttention(library).init_kv(spec, 2)


@pytest.mark.slow
def test_plain_loops_agree_with_dense_attention(portable: Library) -> None:
    for case in attention.CASES[-4:]:
        attention.check_parity(CpuAttention(portable), case)
