"""The configurations the Hopper kernels get: they launch, and where a device was measured, nothing measured was faster."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")

from octavo_kernels._src import hopper_tuning
from octavo_kernels._src.fp8 import FP8
from octavo_kernels._src.hopper_attention import BLOCK_SIZES, HEAD_DIMS
from octavo_kernels._src.hopper_tiles import PrefillConfig
from octavo_kernels._src.hopper_tuning import HopperChoices, Rules, _table, candidates, configs, keeps_to_registers
from octavo_kernels._src.mosaic import MAX_SMEM_BYTES
from octavo_kernels.cases import SPEED_CASES, SpeedCase

SWEEP = Path(__file__).parents[1] / "bench_results" / "h200-sweep.json"
NOISE = 1.02
"""Two runs of one configuration differ by as much."""


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("stored", ["bfloat16", *FP8])
@pytest.mark.parametrize("group", [1, 3, 12, 64, 71, 128])
@pytest.mark.parametrize("device", ["", "NVIDIA H200"])
@pytest.mark.parametrize("sinks", [False, True])
def test_every_shipped_configuration_fits_a_multiprocessor(
    head_dim: int, block_size: int, stored: str, group: int, device: str, sinks: bool
) -> None:
    rules = Rules(sinks=sinks)
    for config in configs(group, (1, 8, block_size, head_dim), 1.0, rules=rules, stored=stored, device_kind=device):
        assert (config.kv_heads, config.fold) == (8 * config.fold, -(-group // 64))
        assert group <= config.fold * config.group < group + config.fold
        assert config.smem_bytes() <= MAX_SMEM_BYTES
        assert config.tile_kv % block_size == 0
        assert config.stages % 2 == 0 or isinstance(config, PrefillConfig)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_interpreted_kernels_get_the_configuration_that_ships(head_dim: int) -> None:
    shipped, interpreted = (configs(4, (1, 8, 32, head_dim), 1.0, interpreted=flag) for flag in (False, True))
    assert interpreted == tuple(dataclasses.replace(config, interpreted=True) for config in shipped)


def test_what_is_asked_for_wins_over_the_table_and_the_table_over_the_heuristic() -> None:
    pool = (1, 8, 32, 64)
    assert configs(4, pool, 1.0, HopperChoices(decode_stages=2), device_kind="NVIDIA H200")[0].stages == 2
    assert configs(4, pool, 1.0, device_kind="NVIDIA H200")[0].stages == _table()["NVIDIA H200"][64].decode_stages
    assert configs(4, pool, 1.0, HopperChoices(take_turns=False))[1].take_turns is False
    assert configs(4, (1, 8, 32, 128), 1.0, device_kind="a device nobody measured")[0].stages == 4


def test_nothing_that_cannot_launch_is_proposed() -> None:
    proposed = [choice for _, choice in candidates(4, (1, 8, 32, 128), "decode")]
    assert proposed
    assert all(configs(4, (1, 8, 32, 128), 1.0, choice)[0].smem_bytes() <= MAX_SMEM_BYTES for choice in proposed)
    assert HopperChoices(decode_tile_kv=128, decode_stages=8) not in proposed


def test_nothing_that_spills_or_was_never_compiled_is_proposed_or_chosen(monkeypatch) -> None:
    pool = (1, 8, 32, 128)
    decode, long = configs(4, pool, 1.0, stored="float8_e4m3fn")
    assert (decode.tile_kv, long.tile_kv) == (64, 64)
    assert keeps_to_registers(decode)
    assert not keeps_to_registers(dataclasses.replace(long, tile_kv=128))
    assert {choice.prefill_tile_kv for _, choice in candidates(4, pool, "prefill", "float8_e4m3fn")} == {64}
    assert configs(4, pool, 1.0, HopperChoices(prefill_tile_kv=128), stored="float8_e4m3fn")[1].tile_kv == 64
    monkeypatch.setattr(hopper_tuning, "_compiled", dict)
    with pytest.raises(NotImplementedError, match="--sweep"):
        configs(4, pool, 1.0)
    assert configs(4, pool, 1.0, proven=False)[0].tile_kv == 64


@pytest.mark.skipif(not SWEEP.exists(), reason="bench_results is not part of the installed package")
def test_the_table_of_the_h200_names_the_fastest_of_the_sweep() -> None:
    times = {item["name"]: item["value"] for item in json.loads(SWEEP.read_text()) if item["name"].endswith("/hopper/time")}
    checked = 0
    for case in SPEED_CASES:
        label = re.compile(re.escape(case.name) + r"(/tile_kv=\d+/stages=\d+(/take_turns=(True|False))?)/hopper/time")
        found = {match[1]: value for name, value in times.items() if (match := label.fullmatch(name))}
        if len(found) > 1:
            assert found[_label(case)] <= NOISE * min(found.values()), case.name
            checked += 1
    assert checked == 4


def _label(case: SpeedCase) -> str:
    pool = (1, case.kv_heads, case.block_size, case.head_dim)
    decode, long = configs(case.q_heads // case.kv_heads, pool, 1.0, device_kind="NVIDIA H200")
    if case.name.startswith("decode"):
        return f"/tile_kv={decode.tile_kv}/stages={decode.stages}"
    return f"/tile_kv={long.tile_kv}/stages={long.stages}/take_turns={long.take_turns}"
