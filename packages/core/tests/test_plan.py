import contextlib
import typing

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import FrameError
from octavo_core.plan import Admitted, Arrivals, CacheEvents, Sampled, SamplingArrivals, StepPlan, StepResult, from_bytes, to_bytes

KINDS = [Admitted, Arrivals, CacheEvents, Sampled, SamplingArrivals, StepPlan, StepResult]


def example(kind, seed: int = 0, default: int = 3, **sizes: int):
    """A value with random contents whose arrays have the shapes and dtypes the annotations ask for."""
    rng = np.random.default_rng(seed)

    def array(hint) -> np.ndarray:
        shape = tuple(int(dim) if dim.isdigit() else sizes.get(dim, default) for dim in hint.dim_str.split())
        return np.asarray(rng.integers(0, 2**31, shape)).astype(hint.dtypes[0])

    hints = typing.get_type_hints(kind).values()
    return kind(*(example(hint, seed, default, **sizes) if hint in KINDS else array(hint) for hint in hints))


def assert_same(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (np.shape(a), np.result_type(a)) == (np.shape(b), np.result_type(b))


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 99), rows=st.integers(0, 5), tokens=st.integers(0, 9), groups=st.integers(0, 2))
def test_every_value_comes_back_as_it_was_written(kind, seed: int, rows: int, tokens: int, groups: int) -> None:
    value = example(kind, seed, rows=rows, tokens=tokens, groups=groups)
    assert_same(from_bytes(kind, to_bytes(value)), value)


def test_arrays_of_jax_are_written_like_those_of_numpy() -> None:
    value = example(StepPlan)
    assert to_bytes(jax.tree.map(jnp.asarray, value)) == to_bytes(value)


def test_big_endian_arrays_are_written_little_endian() -> None:
    value = example(Admitted)
    assert to_bytes(jax.tree.map(lambda a: a.astype(">i4"), value)) == to_bytes(value)


def test_a_value_of_another_kind_is_refused() -> None:
    with pytest.raises(FrameError, match="wanted the 19 fields of StepPlan"):
        from_bytes(StepPlan, to_bytes(example(CacheEvents)))


def test_a_foreign_dtype_or_rank_is_refused() -> None:
    value = example(StepPlan)
    with pytest.raises(FrameError, match="num_rows: wanted <i4 of rank 0, got <i8"):
        from_bytes(StepPlan, to_bytes(value._replace(num_rows=np.int64(1))))
    with pytest.raises(FrameError, match="num_rows: wanted <i4 of rank 0, got <i4 of shape \\[1\\]"):
        from_bytes(StepPlan, to_bytes(value._replace(num_rows=np.ones(1, np.int32))))


def test_one_axis_with_two_sizes_is_refused_across_nested_values() -> None:
    value = example(StepPlan, groups=2)
    with pytest.raises(FrameError, match="num_free: axis 'groups' is 2, got 3"):
        from_bytes(StepPlan, to_bytes(value._replace(events=value.events._replace(num_free=np.zeros(3, np.int32)))))
    with pytest.raises(FrameError, match="copies: axis '2' is 2, got 1"):
        from_bytes(StepPlan, to_bytes(value._replace(copies=np.zeros((2, 3, 1), np.int32))))


@pytest.mark.parametrize("shape", [[-1], [4], [1.0], ["x"], None, [2**62]])
def test_a_shape_that_does_not_fit_its_bytes_is_refused(shape) -> None:
    array = {"d": "<i4", "s": shape, "b": bytes(12)}
    with pytest.raises(FrameError):
        from_bytes(Admitted, msgspec.msgpack.encode([array, array]))


@given(st.data())
def test_corrupt_bytes_are_refused_or_decode_never_anything_else(data) -> None:
    raw = bytearray(to_bytes(example(StepResult)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for attempt in (raw, raw[:cut]):
        with contextlib.suppress(FrameError):
            from_bytes(StepResult, bytes(attempt))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(FrameError):
        from_bytes(StepPlan, b"\x91" * 5000)
