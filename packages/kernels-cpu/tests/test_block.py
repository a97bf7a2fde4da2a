"""A packed layer against the same layer in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_layers import Layer, stream

from octavo_kernels_cpu._src.block import Block
from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import Format, Source

FORMS = [
    (Source.F32, Format.F32, 2e-5),
    (Source.BF16, Format.BF16, 2e-5),
    (Source.Q8_0, Format.Q8, 5e-2),
    (Source.Q4_1, Format.Q4, 8e-2),
]
LAYERS = {
    "plain": {},
    "everything": {"optional": True, "activation": "gelu_tanh"},
    "wide": {"heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 160, "hidden": 96},
}


class Attention:
    """Hands back a mixture of what it was given, and keeps it."""

    def __init__(self, live: Any = None, singles: Any = None) -> None:
        if live is not None:
            self.live = live
        if singles is not None:
            self.singles = singles

    def __call__(self, kv: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return (q, k, v), q * 0.5 + jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)


def run(
    block: Block, tokens: int, live: int | None = None, singles: int | None = None, *, first: int = 0, of: int | None = None
) -> tuple[Any, np.ndarray, list[np.ndarray]]:
    """Some tokens of a stream `of` so many."""
    given, exact = stream(of or tokens, block.out.outputs, block.head_dim)
    step = jax.jit(lambda *parts: _call(block, *parts))
    some, counts = slice(first, first + tokens), [None if n is None else jnp.int32(n) for n in (live, singles)]
    kv, y = step(given.residual[some], given.cos[some], given.sin[some], *counts)
    return [np.asarray(x) for x in kv], np.asarray(y), [x[some] for x in exact]


def _call(block: Block, residual: Any, cos: Any, sin: Any, live: Any, singles: Any = None) -> Any:
    from packed_layers import Stream

    kv, after = block(None, Stream(residual, cos, sin), Attention(live, singles))
    return kv, after.residual


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("source", "form", "tolerance"), FORMS, ids=lambda x: getattr(x, "name", None))
def test_a_layer_agrees_with_float64(library: Library, layer: str, source: Source, form: Format, tolerance: float) -> None:
    values = Layer(**LAYERS[layer])
    block = values.make(library, source, form)
    for tokens in (1, 5, 50):
        (q, k, v), y, (x, cos, sin) = run(block, tokens)
        for got, want in zip((q, k, v), values.project(x, cos, sin), strict=True):
            assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max())
        attended = q.astype(np.float64) * 0.5 + np.repeat(v, q.shape[1] // v.shape[1], axis=1)
        want = values.finish(x, attended)
        assert np.abs(y - want).max() <= tolerance * max(1, np.abs(want).max())


@pytest.mark.parametrize(("source", "form", "tolerance"), FORMS, ids=lambda x: getattr(x, "name", None))
def test_a_token_has_the_same_result_to_the_last_bit_in_any_step(
    library: Library, source: Source, form: Format, tolerance: float
) -> None:
    block = Layer(optional=True).make(library, source, form)
    _, together, _ = run(block, 50)
    for tokens, live in ((1, None), (2, None), (9, None), (60, 7), (60, 50)):
        given, _ = stream(50, block.out.outputs, block.head_dim)
        parts = [
            jnp.pad(x[:tokens], ((0, max(0, tokens - 50)), *[(0, 0)] * (x.ndim - 1)))
            for x in (given.residual, given.cos, given.sin)
        ]
        _, y = jax.jit(lambda *p: _call(block, *p))(*parts, None if live is None else jnp.int32(live))
        upto = min(tokens, live or tokens)
        assert np.array_equal(np.asarray(y)[:upto], together[:upto])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("source", "form", "tolerance"), FORMS, ids=lambda x: getattr(x, "name", None))
def test_prompts_agree_with_float64_and_do_not_depend_on_their_chunk(
    library: Library, layer: str, source: Source, form: Format, tolerance: float
) -> None:
    values = Layer(**LAYERS[layer])
    block = values.make(library, source, form)
    tolerance = max(tolerance, 5e-2)
    (q, k, v), y, (x, cos, sin) = run(block, 150, singles=3)
    for got, want in zip((q, k, v), values.project(x, cos, sin), strict=True):
        assert np.abs(got - want).max() <= tolerance * max(1, np.abs(want).max())
    attended = q.astype(np.float64) * 0.5 + np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    want = values.finish(x, attended)
    assert np.abs(y - want).max() <= tolerance * max(1, np.abs(want).max())
    _, alone, _ = run(block, 3, of=150)
    assert np.array_equal(y[:3], alone)
    for first, tokens in ((3, 2), (5, 17), (20, 64), (3, 147)):
        _, chunk, _ = run(block, tokens, singles=0, first=first, of=150)
        assert np.array_equal(y[first : first + tokens], chunk)


def test_pads_are_not_computed_and_stay_finite(library: Library) -> None:
    block = Layer().make(library, Source.Q4_1, Format.Q4)
    kv, y, (x, _, _) = run(block, 12, live=5)
    assert all(not part[5:].any() for part in kv)
    assert np.array_equal(y[5:], x[5:].astype(np.float32))
    assert not np.array_equal(y[:5], x[:5].astype(np.float32))
