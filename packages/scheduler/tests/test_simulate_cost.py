"""The cost model: what it says of a step, and that a fit finds what was planted."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_core.records import StepRecord
from octavo_scheduler.simulate import CostModel, StepSize, fit


def step(rng, number, cost, noise=0.0, shapes=((0, 0),)):
    decode, chunks = int(rng.integers(0, 64)), int(rng.integers(0, 3))
    query = rng.integers(2, 512, chunks)
    context = query + rng.integers(0, 8_000, chunks)
    prefill = int(query.sum())
    pairs = int((query * context - query * (query - 1) // 2).sum())
    context_tokens = int(rng.integers(1, 4_000, decode).sum() + context.sum())
    shape = next((s for s in shapes if s[0] >= prefill + decode and s[1] >= decode + chunks), shapes[-1])
    base = cost.base_s[cost.shapes.index(shape)]
    terms = cost.decode_s * decode + cost.prefill_s * prefill + cost.context_s * context_tokens + cost.pairs_s * pairs
    return StepRecord(
        step=number,
        time_s=0.0,
        num_decodes=decode,
        num_prefills=chunks,
        prefill_tokens=prefill,
        context_tokens=context_tokens,
        bucket_tokens=shape[0],
        bucket_rows=shape[1],
        device_s=float((base + terms) * np.exp(rng.normal(0, noise))),
        host_s=cost.host_s,
        plan_s=0.0,
        output_s=0.0,
        num_running=decode + chunks,
        num_waiting=0,
        num_free_blocks=1,
        prefill_pairs=pairs,
    )


def planted(draw):
    number = st.floats(0.2, 5)
    return CostModel(
        (draw(number) * 5e-3,),
        decode_s=draw(number) * 2e-5,
        prefill_s=draw(number) * 2e-5,
        context_s=draw(number) * 1e-7,
        pairs_s=draw(number) * 5e-9,
        host_s=draw(number) * 1e-3,
    )


@given(data=st.data())
def test_a_fit_recovers_planted_constants(data):
    cost, rng = planted(data.draw), np.random.default_rng(0)
    found = fit([step(rng, i, cost) for i in range(120)])
    assert (found.num_steps, found.num_left_out) == (120, 0)
    assert found.median_error < 1e-6
    for name in ("decode_s", "prefill_s", "context_s", "pairs_s", "host_s"):
        assert getattr(found.model, name) == pytest.approx(getattr(cost, name), rel=1e-4), name
    assert found.model.base_s == pytest.approx(cost.base_s, rel=1e-4)


def test_a_fit_survives_noise_and_steps_that_waited_for_something_else():
    cost, rng = (
        CostModel((8e-3,), decode_s=3e-5, prefill_s=4e-5, context_s=2e-7, pairs_s=4e-9, host_s=5e-4),
        np.random.default_rng(1),
    )
    steps = [step(rng, i, cost, noise=0.02) for i in range(2_000)]
    late = [i % 20 == 0 for i in range(2_000)]
    steps = [
        StepRecord(**{name: getattr(s, name) for name in s.__struct_fields__} | {"device_s": s.device_s + 0.5 * is_late})
        for s, is_late in zip(steps, late, strict=True)
    ]
    found = fit(steps)
    assert found.num_left_out >= 100
    assert found.total_error == pytest.approx(0, abs=0.01)
    for name in ("prefill_s", "context_s", "pairs_s"):
        assert getattr(found.model, name) == pytest.approx(getattr(cost, name), rel=0.1), name
    assert found.model.base_s[0] == pytest.approx(8e-3, rel=0.1)


def test_each_compiled_shape_has_a_base_of_its_own():
    shapes = ((128, 64), (512, 64), (2_048, 64))
    cost = CostModel((2e-3, 5e-3, 2e-2), decode_s=1e-6, prefill_s=2e-6, context_s=1e-8, pairs_s=1e-10, shapes=shapes)
    rng = np.random.default_rng(2)
    found = fit([step(rng, i, cost, shapes=shapes) for i in range(400)])
    assert found.model.shapes == shapes
    assert found.model.base_s == pytest.approx(cost.base_s, rel=1e-3)
    assert found.model.host_s == 0


def test_a_log_without_a_term_gives_it_no_cost():
    cost, rng = CostModel((8e-3,), decode_s=3e-5, prefill_s=4e-5), np.random.default_rng(3)
    found = fit([step(rng, i, cost) for i in range(200)])
    assert found.model.context_s * 8_000 < 1e-8
    assert found.model.pairs_s * 1e6 < 1e-8


def test_too_short_a_log_is_refused():
    with pytest.raises(ConfigError, match="fitted to at least 10 steps, got 0"):
        fit([])


def test_a_step_takes_the_first_shape_that_holds_it_or_the_largest():
    cost = CostModel((1.0, 2.0, 4.0), shapes=((8, 8), (32, 8), (32, 32)))

    def seconds(tokens, rows):
        return float(jax.jit(cost.step_s)(StepSize(0, 0, 0, 0, np.int32(tokens), np.int32(rows))))

    assert [seconds(*size) for size in [(1, 1), (8, 8), (9, 8), (9, 9), (32, 32), (33, 1)]] == [1, 1, 2, 4, 4, 4]


def test_a_cost_model_is_read_as_it_was_written(tmp_path):
    cost = CostModel((1e-3, 2e-3), decode_s=1e-5, host_s=1e-4, shapes=((8, 8), (32, 8)))
    cost.save(tmp_path / "cost.json")
    assert CostModel.parse(str(tmp_path / "cost.json")) == cost
    assert CostModel.parse("base=8e-3, decode=2e-5,host=1e-4") == CostModel((8e-3,), decode_s=2e-5, host_s=1e-4)
    assert CostModel.parse("roofline:parameters=4e9,overhead_s=0").base_s[0] == pytest.approx(8e9 / 2.5e12)


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("absent.json", "wanted a cost model as `octavo simulate fit` writes it, got absent.json"),
        ("base=8e-3,deocde=1", "got 'deocde'; did you mean 'decode'"),
        ("base=fast", "wanted a number for base, got 'fast'"),
        ("base=-1", "at least 0"),
        ("decode=0", "at least 0 and not all 0"),
        ("roofline:speed=1", "got 'speed'"),
    ],
)
def test_a_cost_that_is_none_is_refused(text, finding):
    with pytest.raises(ConfigError, match=finding):
        CostModel.parse(text)


def test_bases_and_shapes_belong_together():
    with pytest.raises(ConfigError, match="one base for each shape, got 2 for 1"):
        CostModel((1.0, 2.0))
