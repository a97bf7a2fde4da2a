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

from octavo_kernels import ReferenceAttention  # noqa: E402
from octavo_kernels._src.fp8 import FP8  # noqa: E402
from octavo_kernels._src.hopper_attention import HopperAttention  # noqa: E402
from octavo_kernels._src.hopper_decode import DecodeConfig, partial_results  # noqa: E402
from octavo_kernels._src.hopper_latent import LatentConfig, latent_results  # noqa: E402
from octavo_kernels._src.hopper_latent_step import attend_latents, cut_latents  # noqa: E402
from octavo_kernels._src.hopper_merge import LANES, merge  # noqa: E402
from octavo_kernels._src.hopper_prefill import prefill  # noqa: E402
from octavo_kernels._src.hopper_shares import share_out  # noqa: E402
from octavo_kernels._src.hopper_tiles import PrefillConfig, cut  # noqa: E402
from octavo_kernels._src.hopper_tuning import HopperChoices  # noqa: E402
from octavo_kernels.cases import HOPPER_CASES  # noqa: E402

Parameters = getattr(plgpu, "InterpretParams", None) or getattr(plgpu, "InterpretGPUParams", None)
pytestmark = [
    pytest.mark.skipif(Parameters is None, reason=f"JAX {jax.__version__} cannot interpret Mosaic GPU kernels; 0.11 can"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

SMALL = HopperChoices(num_ctas=3, decode_stages=2, prefill_tile_kv=64, prefill_stages=2)
"""Few thread blocks and stages: shares start and end inside rows, and every buffer is used again."""
POOL = {"kv_heads": 2, "head_dim": 64, "block_size": 16, "scale": 0.125, "num_ctas": 1, "stages": 2, "interpreted": True}


FP8_CASES = [case for case in HOPPER_CASES if case.dtype in FP8]


def short(case: attention.AttentionCase) -> bool:
    return sum(old + new for old, new in case.rows) < 1500


FEW = ("decode, one query head to a KV head", "few tokens of one row")
"""Cases of each kernel that are tried with every change; the rest is slow."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in FEW else pytest.mark.slow) for case in filter(short, HOPPER_CASES)],
)
def test_interpreted_kernels_agree_with_dense_attention(case: attention.AttentionCase) -> None:
    attention.check_parity(HopperAttention(choices=SMALL, interpret=Parameters()), case)


@pytest.mark.slow
def test_blocks_can_be_carried_elsewhere_as_bytes() -> None:
    case = attention.AttentionCase("moved", ((40, 1), (0, 20)), head_dim=64, dtype="bfloat16", q_dtype="bfloat16")
    backend = HopperAttention(choices=SMALL, interpret=Parameters())
    attention.check_moved_blocks(backend, case)
    attention.check_dropped_writes(backend, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_kernels_and_reference_answer_alike_over_the_same_fp8_elements(case: attention.AttentionCase) -> None:
    """Both round alike when they write, so what differs is bfloat16 queries and weights: not the type, and not where scales are applied."""
    problem = attention.make_problem(case)
    backends = HopperAttention(choices=SMALL, interpret=Parameters()), ReferenceAttention()
    got, want = (np.asarray(attention.attend(b, attention.fill(b, problem), problem), np.float64) for b in backends)
    live = sum(new for _, new in case.rows)
    assert np.linalg.norm(got[:live] - want[:live]) < 2**-7 * np.linalg.norm(want[:live])


def _dense(q, k, v, table, position: int, config, sinks=None) -> np.ndarray:
    """One token's answer in float64 under the configuration's window, cap and sinks."""
    first = 0 if config.window is None else max(position + 1 - config.window, 0)
    seen = slice(first, position + 1)
    keys, values = (
        np.asarray(pool, np.float64)[np.asarray(table)[0]].swapaxes(1, 2).reshape(-1, config.kv_heads, config.head_dim)[seen]
        for pool in (k, v)
    )
    scores = np.einsum("hgd,khd->hgk", np.asarray(q, np.float64), keys) * config.scale
    if config.soft_cap is not None:
        scores = config.soft_cap * np.tanh(scores / config.soft_cap)
    weights = np.exp(scores)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)).reshape(scores.shape[:2]))
    return np.einsum("hgk,khd->hgd", weights / total[..., None], values)


def _hide(pool: jax.Array, table: jax.Array, first: int, stop: int) -> jax.Array:
    """NaN in every slot of the row outside [first, stop), and in every block it does not own."""
    slots = np.full(pool.shape[:1] + pool.shape[2:3], True)
    for token in range(first, stop):
        slots[int(table[0, token // pool.shape[2]]), token % pool.shape[2]] = False
    return jnp.where(slots[:, None, :, None], jnp.nan, pool)


VARIANTS = [{"window": 1}, {"window": 70}, {"soft_cap": 2.0}, {"window": 129, "soft_cap": 1.0}]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_decode_keeps_to_its_window_and_cap_and_gives_sinks_their_weight(variant) -> None:
    config = dataclasses.replace(DECODE, num_ctas=3, **variant)
    q, k, v, table = _vectors(1)
    first = 0 if config.window is None else 300 - config.window
    k, v = (_hide(pool, table, first, 300) for pool in (k, v))
    context = jnp.array([300], jnp.int32)
    shares = share_out(context, jnp.int32(1), config)
    partial, lse = partial_results(q, {"k": k, "v": v}, table, context, shares, config, Parameters())
    for sinks in (None, jnp.linspace(-1.0, 6.0, 8)):
        got = np.asarray(merge(partial, lse, shares.rows, sinks, config, Parameters())[0, :, :4], np.float64)
        want = _dense(q[0], k, v, table, 299, config, sinks)
        assert np.abs(got - want).max() < 2**-6 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill_keeps_to_its_window_and_cap(variant) -> None:
    config = dataclasses.replace(PREFILL, num_ctas=2, **variant)
    q, k, v, table = _vectors(40)
    first = 0 if config.window is None else 261 - config.window
    k, v = (_hide(pool, table, first, 300) for pool in (k, v))
    got = np.asarray(_prefill(config, Parameters(), k, v), np.float64)
    for token in range(40):
        want = _dense(q[token], k, v, table, 260 + token, config)
        assert np.abs(got[token] - want).max() < 2**-6 * np.abs(want).max(), token


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
    return partial_results(q, _pools(config, k, v), table, context, share_out(context, jnp.int32(1), config), config, interpret)


def _pools(config: DecodeConfig | PrefillConfig, k: jax.Array, v: jax.Array) -> dict[str, jax.Array]:
    """As a configuration wants them; with scales of 1 where there are some."""
    pools = {"k": k.astype(config.stored), "v": v.astype(config.stored)}
    ones = jnp.ones(k.shape[:3], jnp.float32)
    return pools | ({"k_scale": ones, "v_scale": ones} if config.has_scales else {})


def _chunk(new: int, table: jax.Array) -> AttentionBatch:
    """The last `new` tokens of one row of 300."""
    positions = jnp.arange(300 - new, 300, dtype=jnp.int32)
    starts, context = jnp.array([0, new], jnp.int32), jnp.array([300], jnp.int32)
    return AttentionBatch(positions, starts, context, table, positions, jnp.int32(0), jnp.int32(1))


def _latents(config: LatentConfig, interpret) -> jax.Array:
    """Two tiles over five steps each, so that three thread blocks cut them inside."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((3, 8, 192), (25, 1, 16, 192)))
    pools = {"k": k.astype(config.stored)} | ({"k_scale": jnp.ones(k.shape[:3], jnp.float32)} if config.has_scales else {})
    table = jnp.asarray(1 + rng.permutation(24)[None], jnp.int32)
    return attend_latents(q, pools, _chunk(3, table), config, interpret)


def _prefill(config: PrefillConfig, interpret, *pools: jax.Array) -> jax.Array:
    q, k, v, table = _vectors(40)
    k, v = pools or (k, v)
    batch = _chunk(40, table)
    sinks = jnp.zeros((2, 4)) if config.sinks else None
    return prefill(q, _pools(config, k, v), table, cut(batch, 40, config), sinks, config, interpret)


DECODE = DecodeConfig(group=4, **POOL)
PREFILL = PrefillConfig(group=4, tile_kv=64, **POOL)


FP8_DECODE, FP8_PREFILL = (
    dataclasses.replace(config, stored="float8_e4m3fn", **more)
    for config, more in ((DECODE, {}), (PREFILL, {"take_turns": False, "sinks": True}))
)
LATENT = LatentConfig(heads=8, tile_q=2, head_dim=192, block_size=16, scale=0.1, kv_heads=1, num_ctas=1, interpreted=True)
FP8_LATENT = dataclasses.replace(LATENT, stored="float8_e4m3fn", num_ctas=3)
RUNS = [(_decode, DECODE), (_prefill, PREFILL), (_decode, FP8_DECODE), (_prefill, FP8_PREFILL), (_latents, LATENT)]
NAMES = ["decode", "prefill", "decode of FP8", "prefill of FP8 with sinks", "latents"]
RUNS, NAMES = [*RUNS, (_latents, FP8_LATENT)], [*NAMES, "latents in FP8"]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "config"), RUNS, ids=NAMES)
def test_no_kernel_has_a_race(races, run, config) -> None:
    assert not races(lambda parameters: run(config, parameters))


@pytest.mark.slow
@pytest.mark.parametrize(("run", "config"), RUNS, ids=NAMES)
def test_a_copy_into_a_buffer_still_in_use_is_found(races, run, config) -> None:
    assert races(lambda parameters: run(dataclasses.replace(config, free_too_early=True), parameters))


@pytest.mark.slow
def test_one_step_a_stage_would_not_find_the_planted_fault(races) -> None:
    """Why the tests above have more steps than stages."""
    config = dataclasses.replace(DECODE, free_too_early=True, stages=10)
    assert not races(lambda parameters: _decode(config, parameters))


@pytest.mark.slow
@pytest.mark.parametrize("heads", [5, 16])
def test_of_a_tile_of_latents_only_the_rows_of_its_tokens_are_written(heads: int) -> None:
    """A row decodes beside a chunk whose last tile is short. What nobody writes stays NaN in the interpreter."""
    tile_q, rng = 64 // heads, np.random.default_rng(0)
    config = dataclasses.replace(LATENT, heads=heads, tile_q=tile_q)
    new, old = tile_q + 2, 40
    positions = jnp.asarray([69, *range(old, old + new)], jnp.int32)
    starts, contexts = jnp.array([0, 1, 1 + new], jnp.int32), jnp.array([70, old + new], jnp.int32)
    table = jnp.asarray(1 + rng.permutation(24).reshape(2, 12), jnp.int32)
    batch = AttentionBatch(positions, starts, contexts, table, positions, jnp.int32(1), jnp.int32(2))
    tiles = cut_latents(batch, 1 + new, tile_q)
    q, k = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((len(tiles.about), 1, config.group, 192), (25, 1, 16, 192)))
    shares = share_out(tiles.context_len, tiles.num_tiles, config)
    partial, lse = latent_results(q, {"k": k}, table, tiles.about, tiles.context_len, shares, config, Parameters())
    live = (tiles.context_len - tiles.about[:, 1]) * heads
    merged = merge(partial, lse, shares.rows, None, config, Parameters(), live=live)
    assert int(tiles.num_tiles) == 3
    for tile, rows in enumerate((heads, tile_q * heads, 2 * heads)):
        written = np.arange(config.group_rows) < -(-rows // 8) * 8
        assert (np.isfinite(np.asarray(partial[tile], np.float32)).all(-1) == written).all()
        assert (np.isnan(np.asarray(partial[tile], np.float32)).all(-1) == ~written).all()
        assert (np.isnan(np.asarray(lse[tile])) == ~written).all()
        answers = np.asarray(merged[tile, 0], np.float32).reshape(-1)
        assert (np.isnan(answers) == (np.arange(answers.size) >= -(-rows * 192 // LANES) * LANES)).all()
