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
def test_a_token_sees_the_same_to_the_last_bit_alone_and_in_a_chunk(library: Library, dtype: str) -> None:
    backend = CpuAttention(library)
    case = attention.AttentionCase("chunk", ((0, 90),), q_heads=6, kv_heads=2, head_dim=64, block_size=32, dtype=dtype)
    problem = attention.make_problem(case)
    kv = attention.fill(backend, problem)
    chunk = np.asarray(attention.attend(backend, kv, problem))
    for position in (0, 1, 31, 32, 63, 64, 89):
        batch = problem.batch._replace(
            query_start=jnp.minimum(jnp.arange(len(problem.batch.query_start)), 1),
            context_len=problem.batch.context_len.at[0].set(position + 1),
            num_single=jnp.int32(1),
        )
        alone = problem._replace(queries=problem.queries[position : position + 1], batch=batch)
        assert np.array_equal(np.asarray(attention.attend(backend, kv, alone))[0], chunk[position])


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
