"""FP8 KV: what a token costs, how far rounding goes, and that scales meet logits and weights where they should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.specs import KVGroupSpec
from octavo_core.testing import attention
from octavo_kernels import attention_backend
from octavo_kernels._src import fp8

PORTABLE = ["xla", "reference"]
MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}


def test_a_token_of_llama_3_1_70b_takes_half_the_bytes_and_its_scales() -> None:
    layers, kv_heads, head_dim = 80, 8, 128
    assert layers * fp8.token_bytes(kv_heads, head_dim, "bfloat16") == 327_680
    for dtype in fp8.FP8:
        assert layers * fp8.token_bytes(kv_heads, head_dim, dtype) == 163_840 + layers * 2 * kv_heads * 4


@pytest.mark.parametrize("dtype", fp8.FP8)
@pytest.mark.parametrize("name", PORTABLE)
def test_memory_is_as_large_as_the_arithmetic_says(name: str, dtype: str) -> None:
    spec = KVGroupSpec("full", (0, 1, 2), 2, 64, dtype, 16)
    backend = attention_backend(name).backend
    data = backend.gather(backend.init_kv(spec, 3), jnp.arange(3))
    assert data.shape[1] == 16 * len(spec.layers) * fp8.token_bytes(2, 64, dtype)


def random_vectors(size: float = 1.0, head_dim: int = 64) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(50, 3, head_dim)) * size).astype(np.float32)


def squared_error(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """What rounding with this scale leaves of each vector, in float64."""
    limit = float(jnp.finfo(dtype).max)
    back = np.clip(x / scale[..., None], -limit, limit).astype(dtype).astype(np.float64) * scale[..., None]
    return ((back - x) ** 2).sum(-1)


@pytest.mark.parametrize("dtype", fp8.FP8)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rounding_is_half_a_unit_whatever_the_size_of_a_vector(dtype: str, size: float) -> None:
    x = random_vectors(size)
    elements, scale = (np.asarray(part, np.float32) for part in fp8.quantise(jnp.asarray(x), dtype))
    back, about = elements * scale[..., None], jnp.finfo(dtype)
    ratio = scale * float(about.max) / np.abs(x).max(-1)
    assert (ratio >= 1 - 1e-6).all()
    assert (ratio < 2).all()
    half = 2.0 ** -(MANTISSA_BITS[dtype] + 1)
    assert (np.abs(back - x) <= half * np.maximum(np.abs(x), float(about.tiny) * scale[..., None]) * 1.0001).all()
    assert np.isfinite(back).all()


@pytest.mark.parametrize("dtype", fp8.FP8)
@pytest.mark.parametrize("head_dim", [64, 80, 576])
def test_no_other_scale_tried_would_have_rounded_better(dtype: str, head_dim: int) -> None:
    x = random_vectors(head_dim=head_dim)
    got = squared_error(x, np.asarray(fp8.quantise(jnp.asarray(x), dtype)[1]), dtype)
    smallest = np.abs(x).max(-1) / np.float32(jnp.finfo(dtype).max)
    tried = np.stack([squared_error(x, smallest * np.float32(2 ** (i / fp8.SCALES)), dtype) for i in range(fp8.SCALES)])
    assert (got <= tried.min(0) * 1.01).all()
    assert got.mean() < (0.75 if head_dim == 64 else 0.9) * tried[0].mean()


@pytest.mark.parametrize("dtype", fp8.FP8)
def test_a_vector_is_stored_alike_in_any_company_and_in_any_order_of_its_elements(dtype: str) -> None:
    """Sums of floats would differ in their last bit, and turn a choice between scales that are as good as each other."""
    quantise, x = jax.jit(fp8.quantise, static_argnums=1), random_vectors()
    elements, scale = map(np.asarray, quantise(x, dtype))
    order = np.random.default_rng(1).permutation(x.shape[-1])
    for part, where in ((x[:1], slice(0, 1)), (x[7:20], slice(7, 20)), (x[..., order], slice(None))):
        got, got_scale = map(np.asarray, quantise(part, dtype))
        wanted = elements[..., order] if part.shape == x.shape else elements[where]
        assert (got_scale == scale[where]).all()
        assert (got.view(np.uint8) == wanted.view(np.uint8)).all()


@pytest.mark.parametrize("dtype", fp8.FP8)
def test_a_vector_too_small_for_a_scale_becomes_zeros(dtype: str) -> None:
    elements, scale = fp8.quantise(jnp.full((2, 4), 1e-38), dtype)
    assert not elements.astype(jnp.float32).any()
    assert (scale > 0).all()


def test_a_vector_of_zeros_stays_one() -> None:
    elements, scale = fp8.quantise(jnp.zeros((2, 4)), "float8_e4m3fn")
    assert not elements.astype(jnp.float32).any()
    assert jnp.isfinite(scale).all()


@pytest.mark.parametrize("dtype", [*fp8.BITS, "float32"])
def test_bits_come_back_as_they_went(dtype: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 5)), dtype)
    stored = fp8.to_bits(x, fp8.BITS.get(dtype, dtype))
    assert stored.dtype == fp8.BITS.get(dtype, dtype)
    assert (fp8.from_bits(stored) == x.astype(jnp.float32)).all()


CASES = [attention.AttentionCase(dtype, attention.MIXED, q_heads=6, head_dim=64, dtype=dtype) for dtype in fp8.FP8]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", PORTABLE)
def test_a_backend_agrees_with_dense_attention(name: str, case: attention.AttentionCase) -> None:
    """Rounding of keys and values takes the place of that of queries and weights in the allowance."""
    backend, problem = attention_backend(name).backend, attention.make_problem(case)
    out = np.asarray(attention.attend(backend, attention.fill(backend, problem), problem), np.float64)
    want, allowed = attention.dense_attention(problem)
    assert np.isfinite(out).all()
    assert (np.abs(out[: len(want)] - want) <= allowed).all()
    assert np.linalg.norm(out[: len(want)] - want) < 2.0 ** -MANTISSA_BITS[case.dtype] * np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_portable_attention_agrees_with_the_reference_over_the_same_elements(case: attention.AttentionCase) -> None:
    """Both round alike, so what differs is where scales are applied: nothing but summation, and weights in bfloat16 for long rows."""
    problem = attention.make_problem(case)
    got, want = (
        np.asarray(attention.attend(backend, attention.fill(backend, problem), problem))
        for backend in (attention_backend(name).backend for name in PORTABLE)
    )
    live = sum(new for _, new in case.rows)
    singles = int(problem.batch.num_single)
    assert np.abs(got - want)[:singles].max(initial=0) < 1e-5
    assert np.abs(got - want)[singles:live].max(initial=0) < 2**-6


@pytest.mark.parametrize("name", PORTABLE)
def test_what_is_stored_of_a_token_does_not_depend_on_its_chunk(name: str) -> None:
    spec = KVGroupSpec("full", (0,), 2, 64, "float8_e4m3fn", 16)
    backend = attention_backend(name).backend
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(20, 2, 64)) * np.geomspace(0.01, 100, 20)[:, None, None], jnp.float32) for _ in range(2))
    slots = jnp.arange(16, 36, dtype=jnp.int32)
    write = jax.jit(backend.write, static_argnums=1)
    whole = write(backend.init_kv(spec, 3), 0, k, v, slots)
    parts = backend.init_kv(spec, 3)
    for chunk in (slice(0, 1), slice(1, 9), slice(9, 20)):
        parts = write(parts, 0, k[chunk], v[chunk], slots[chunk])
    assert all(bool((a == b).all()) for a, b in zip(*map(_bits, (whole, parts)), strict=True))


def _bits(kv) -> list[jax.Array]:
    return [jax.lax.bitcast_convert_type(x, f"uint{x.dtype.itemsize * 8}") for x in jax.tree.leaves(kv)]


@pytest.mark.parametrize("dtype", fp8.FP8)
@pytest.mark.parametrize("name", PORTABLE)
def test_blocks_can_be_carried_elsewhere_as_bytes(name: str, dtype: str) -> None:
    case = attention.AttentionCase("moved", attention.MIXED, dtype=dtype)
    attention.check_moved_blocks(attention_backend(name).backend, case)
    attention.check_dropped_writes(attention_backend(name).backend, case)
