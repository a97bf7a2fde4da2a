"""Products with packed weights: right, and the same for a row whatever rows it comes with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_layers import raw_of, rounding, sums

from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import Format, Matrix, Source, score

PAIRS = [
    (Source.F32, Format.F32),
    (Source.BF16, Format.F32),
    (Source.BF16, Format.BF16),
    (Source.Q8_0, Format.Q8),
    (Source.Q8_0, Format.Q8F),
    (Source.Q4_0, Format.Q4),
    (Source.Q4_1, Format.Q4),
    (Source.Q4_1, Format.BF16),
]


def numbers(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, columns))


def answer(library: Library, matrix: Matrix, x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(lambda x: score(library, matrix, x))(jnp.asarray(x, jnp.float32)))


@pytest.mark.parametrize(("source", "form"), PAIRS, ids=lambda x: x.name)
@pytest.mark.parametrize(("outputs", "inputs"), [(100, 96), (16, 320), (33, 608)])
def test_a_product_is_within_its_rounding(library: Library, source: Source, form: Format, outputs: int, inputs: int) -> None:
    raw, exact = raw_of(numbers(outputs, inputs, 0), source)
    if form is Format.BF16:
        exact = np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64)
    bias = numbers(1, outputs, 1)[0].astype(np.float32)
    matrix = Matrix(library, raw, form, bias=bias)
    for rows in (1, 2, 7, 53):
        x = numbers(rows, inputs, rows).astype(np.float32).astype(np.float64)
        allowed = sums(x, exact) + rounding(x, exact) / {Format.Q8: 1, Format.Q4: 1, Format.Q8F: 254}.get(form, np.inf)
        assert (np.abs(answer(library, matrix, x) - (x @ exact.T + bias)) <= allowed).all()


@pytest.mark.parametrize(("source", "form"), PAIRS, ids=lambda x: x.name)
def test_a_row_has_the_same_result_to_the_last_bit_in_any_company(library: Library, source: Source, form: Format) -> None:
    raw, _ = raw_of(numbers(80, 288, 0), source)
    matrix, x = Matrix(library, raw, form), numbers(101, 288, 1)
    together = answer(library, matrix, x)
    for rows in (1, 2, 3, 5, 6, 8, 13, 49):
        assert np.array_equal(answer(library, matrix, x[:rows]), together[:rows])
        assert np.array_equal(answer(library, matrix, x[-rows:]), together[-rows:])


@pytest.mark.parametrize(("source", "form"), PAIRS, ids=lambda x: x.name)
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_of_zeros_at_the_end_change_no_other_row(library: Library, source: Source, form: Format, with_bias: bool) -> None:
    raw, _ = raw_of(numbers(40, 288, 0), source)
    bias = numbers(1, 40, 1)[0].astype(np.float32) if with_bias else None
    matrix, x = Matrix(library, raw, form, bias=bias), numbers(20, 288, 1)
    x[3] = 0
    together = answer(library, matrix, x)
    for live in (0, 1, 4, 13):
        some = np.where(np.arange(20)[:, None] < live, x, 0)
        found = answer(library, matrix, some)
        assert np.array_equal(found[:live], together[:live])
        assert np.array_equal(found[live:], np.broadcast_to(np.zeros(40) if bias is None else bias, found[live:].shape))


@pytest.mark.parametrize("form", [Format.F32, Format.BF16], ids=lambda x: x.name)
def test_floats_need_no_multiple_of_anything(library: Library, form: Format) -> None:
    raw, exact = raw_of(numbers(5, 37, 0), Source.BF16)
    x = numbers(3, 37, 1).astype(np.float32)
    assert np.allclose(answer(library, Matrix(library, raw, form), x), x @ exact.T, atol=1e-4)


@pytest.mark.parametrize(("source", "form"), PAIRS, ids=lambda x: x.name)
def test_rows_of_zeros_and_of_large_values_pass(library: Library, source: Source, form: Format) -> None:
    raw, exact = raw_of(numbers(20, 64, 0), source)
    x = np.zeros((3, 64))
    x[1] = 1e6
    x[2, 0] = -3e4
    got = answer(library, Matrix(library, raw, form), x)
    assert not got[0].any()
    assert np.allclose(got[1:], x[1:] @ exact.T, rtol=2e-2, atol=2e4)


def test_outputs_come_in_the_order_asked_for_and_zeros_where_none_is(library: Library) -> None:
    raw, exact = raw_of(numbers(20, 32, 0), Source.F32)
    order = np.array([3, -1, 19, 0] * 5)
    matrix = Matrix(library, raw, Format.F32, order=order, bias=np.arange(20.0))
    x = numbers(2, 32, 1).astype(np.float32)
    want = np.where(order >= 0, (x @ exact.T + np.arange(20))[:, order], 0)
    assert np.allclose(answer(library, matrix, x), want, atol=1e-4)


def test_float_weights_are_not_rounded_to_four_bits(library: Library) -> None:
    raw, _ = raw_of(numbers(16, 64, 0), Source.F32)
    with pytest.raises(NotImplementedError, match="16 × 64 in F32 cannot be packed as Q4"):
        Matrix(library, raw, Format.Q4)
    odd, _ = raw_of(numbers(16, 40, 0), Source.F32)
    with pytest.raises(NotImplementedError, match="cannot be packed as Q8"):
        Matrix(library, odd, Format.Q8)


def test_a_packed_matrix_of_another_size_is_an_error_of_the_call(library: Library) -> None:
    raw, _ = raw_of(numbers(16, 64, 0), Source.F32)
    matrix = Matrix(library, raw, Format.F32)
    matrix.inputs = 65
    with pytest.raises(Exception, match=r"head: the packed weight is not \[outputs, inputs\]"):
        answer(library, matrix, numbers(2, 65, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "form"), PAIRS, ids=lambda x: x.name)
def test_vector_units_and_plain_loops_agree_to_the_last_bit(
    library: Library, portable: Library, source: Source, form: Format
) -> None:
    raw, _ = raw_of(numbers(70, 288, 0), source)
    x = numbers(15, 288, 1)
    vector, plain = (answer(one, Matrix(one, raw, form), x) for one in (library, portable))
    assert np.array_equal(vector, plain)
