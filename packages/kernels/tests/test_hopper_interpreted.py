"""The Hopper kernels in Pallas's GPU interpreter on a CPU: parity over the shared table of cases, no races, and planted faults found.

JAX 0.11 is the first that can interpret them; with an older one these tests are skipped and counted. What the interpreter cannot run, and
therefore does not prove, is in docs/kernels.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.seams import AttentionBatch
from octavo_core.testing import attention

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")

from octavo_kernels._src.hopper_attention import HopperAttention, HopperChoices  # noqa: E402
from octavo_kernels._src.hopper_decode import DecodeConfig, partial_results, share_out  # noqa: E402
from octavo_kernels._src.hopper_prefill import PrefillConfig, cut, prefill  # noqa: E402
from octavo_kernels.cases import HOPPER_CASES  # noqa: E402

Parameters = getattr(plgpu, "InterpretParams", None) or getattr(plgpu, "InterpretGPUParams", None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(Parameters is None, reason=f"JAX {jax.__version__} cannot interpret Mosaic GPU kernels; 0.11 can"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

SMALL = HopperChoices(num_ctas=3, decode_stages=2, prefill_tile_kv=64, prefill_stages=2)
"""Few thread blocks and stages: shares start and end inside rows, and every buffer is used again."""
POOL = {"kv_heads": 2, "head_dim": 64, "block_size": 16, "scale": 0.125, "num_ctas": 1, "stages": 2, "interpreted": True}


def short(case: attention.AttentionCase) -> bool:
    return sum(old + new for old, new in case.rows) < 1500


@pytest.mark.parametrize("case", list(filter(short, HOPPER_CASES)), ids=lambda case: case.name)
def test_interpreted_kernels_agree_with_dense_attention(case: attention.AttentionCase) -> None:
    attention.check_parity(HopperAttention(choices=SMALL, interpret=Parameters()), case)


def test_blocks_can_be_carried_elsewhere_as_bytes() -> None:
    case = attention.AttentionCase("moved", ((40, 1), (0, 20)), head_dim=64, dtype="bfloat16", q_dtype="bfloat16")
    backend = HopperAttention(choices=SMALL, interpret=Parameters())
    attention.check_moved_blocks(backend, case)
    attention.check_dropped_writes(backend, case)


def test_more_query_heads_than_a_tile_has_rows_are_refused_with_the_number() -> None:
    backend = HopperAttention(interpret=Parameters())
    case = attention.AttentionCase("many", ((3, 1),), q_heads=65, kv_heads=1, head_dim=64, dtype="bfloat16", q_dtype="bfloat16")
    problem = attention.make_problem(case)
    with pytest.raises(NotImplementedError, match="at most 64 query heads to a KV head, these are 65"):
        attention.attend(backend, attention.fill(backend, problem), problem)


@pytest.fixture
def races():
    """Runs something with race detection and says whether a race was found, by its flag or by its exception."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    def found(run) -> bool:
        try:
            jax.block_until_ready(run(Parameters(detect_races=True)))
        except Exception as error:
            if "race" not in str(error).lower():
                raise
            return True
        return gpu_callbacks.get_races().races_found

    yield found
    gpu_callbacks.reset_gpu_interpret_mode_state()


def _vectors(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((tokens, 2, 4, 64), (25, 2, 16, 64), (25, 2, 16, 64)))
    return q, k, v, jnp.asarray(1 + rng.permutation(24)[None], jnp.int32)


def _decode(config: DecodeConfig, interpret) -> tuple[jax.Array, jax.Array]:
    q, k, v, table = _vectors(1)
    context = jnp.array([300], jnp.int32)
    return partial_results(q, k, v, table, context, share_out(context, jnp.int32(1), config), config, interpret)


def _prefill(config: PrefillConfig, interpret) -> jax.Array:
    q, k, v, table = _vectors(40)
    positions = jnp.arange(260, 300, dtype=jnp.int32)
    one = jnp.int32(1)
    batch = AttentionBatch(
        positions, jnp.array([0, 40], jnp.int32), jnp.array([300], jnp.int32), table, positions, jnp.int32(0), one
    )
    return prefill(q, k, v, table, cut(batch, 40, config), config, interpret)


DECODE = DecodeConfig(group=4, **POOL)
PREFILL = PrefillConfig(group=4, tile_kv=64, **POOL)


@pytest.mark.parametrize(("run", "config"), [(_decode, DECODE), (_prefill, PREFILL)], ids=["decode", "prefill"])
def test_no_kernel_has_a_race(races, run, config) -> None:
    assert not races(lambda parameters: run(config, parameters))


@pytest.mark.parametrize(("run", "config"), [(_decode, DECODE), (_prefill, PREFILL)], ids=["decode", "prefill"])
def test_a_copy_into_a_buffer_still_in_use_is_found(races, run, config) -> None:
    assert races(lambda parameters: run(dataclasses.replace(config, free_too_early=True), parameters))


def test_one_step_a_stage_would_not_find_the_planted_fault(races) -> None:
    """Why the tests above have more steps than stages."""
    config = dataclasses.replace(DECODE, free_too_early=True, stages=10)
    assert not races(lambda parameters: _decode(config, parameters))
