"""Ordered dispatch: who is asked, who declines, and what is said when nobody is left."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import NamedTuple

import jax
import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import KVGroupSpec
from octavo_kernels import BACKENDS, ReferenceAttention, attention_backend

FULL = KVGroupSpec("full", (0, 1), 2, 16, "float32", 16)
STATE = KVGroupSpec("state", (0, 1), 1, 16, "float32", 16)
LATENT = KVGroupSpec("latent", (0, 1), 1, 16, "float32", 16)


@pytest.fixture
def fork(monkeypatch):
    """A module outside the package with a backend that works, one that declines and something that is no backend."""

    class Declines(ReferenceAttention):
        def __init__(self) -> None:
            raise NotImplementedError("needs a GPU, found none")

    module = types.ModuleType("some_fork")
    module.Works, module.Declines, module.number = ReferenceAttention, Declines, 3
    monkeypatch.setitem(sys.modules, "some_fork", module)


def test_auto_takes_the_first_that_serves_and_says_why_not_those_before() -> None:
    choice = attention_backend("auto", (FULL,))
    names = list(BACKENDS)
    assert [p.name for p in choice.passed_over] == names[: names.index(choice.name)]
    assert all(p.reason for p in choice.passed_over)


@pytest.mark.skipif(jax.devices()[0].platform != "cpu", reason="is about machines without a GPU")
def test_without_a_gpu_hopper_says_what_jax_sees() -> None:
    choice = attention_backend("auto", (FULL,))
    assert choice.name in ("cpu", "xla")  # with octavo-kernels-cpu beside it, or without
    assert choice.passed_over[0] == ("hopper", "needs a GPU of compute capability 9.0 (Hopper); JAX sees cpu (cpu)")
    with pytest.raises(ConfigError, match=r"hopper: needs a GPU of compute capability 9\.0"):
        attention_backend("hopper", (FULL,))


class _Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str
    core_count: int = 114


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (dataclasses.replace(FULL, dtype="float32", head_dim=64), "stores bfloat16, float8_e4m3fn, float8_e5m2"),
        (dataclasses.replace(FULL, dtype="bfloat16", head_dim=80), "heads of"),
        (dataclasses.replace(FULL, dtype="bfloat16", head_dim=64, block_size=8), "blocks of"),
        (STATE, "full and window and latent attention"),
        (dataclasses.replace(LATENT, dtype="bfloat16"), "latents of \\(576,\\) elements, these have 16"),
        (dataclasses.replace(LATENT, dtype="bfloat16", head_dim=576, sinks=True), "without windows and sinks"),
    ],
)
def test_on_a_hopper_gpu_what_the_kernels_cannot_serve_falls_back_with_the_reason(monkeypatch, spec, reason) -> None:
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")
    monkeypatch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA H200", "9.0")])
    with pytest.raises(ConfigError, match=f"hopper: .*{reason}"):
        attention_backend("hopper", (spec,))


@pytest.mark.parametrize(
    "spec",
    [
        dataclasses.replace(FULL, dtype="bfloat16", head_dim=256, softcap=50.0),
        dataclasses.replace(FULL, dtype="bfloat16", head_dim=64, kind="window", window=128, sinks=True),
        dataclasses.replace(FULL, dtype="float8_e4m3fn", head_dim=128, block_size=32),
        dataclasses.replace(FULL, dtype="float8_e5m2", head_dim=256, block_size=32),
        dataclasses.replace(LATENT, dtype="bfloat16", head_dim=576, block_size=64),
        dataclasses.replace(LATENT, dtype="float8_e4m3fn", head_dim=576, block_size=32, softcap=30.0),
    ],
    ids=str,
)
def test_on_a_hopper_gpu_windows_caps_sinks_fp8_and_latents_are_hoppers(monkeypatch, spec) -> None:
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")
    monkeypatch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA H200", "9.0")])
    assert attention_backend("auto", (spec,)).name == "hopper"


@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 0)])
def test_fp8_in_blocks_of_16_is_for_a_jax_that_can_copy_their_scales(monkeypatch, version) -> None:
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")
    monkeypatch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA H200", "9.0")])
    monkeypatch.setattr(jax, "__version_info__", version)
    spec = dataclasses.replace(FULL, dtype="float8_e4m3fn", head_dim=128, block_size=16)
    if version < (0, 11):
        with pytest.raises(ConfigError, match="cannot copy the scales of an FP8 block of 16; set --block-size 32"):
            attention_backend("hopper", (spec,))
    else:
        assert attention_backend("hopper", (spec,)).name == "hopper"


def test_on_a_hopper_gpu_hopper_serves(monkeypatch) -> None:
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")
    monkeypatch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA H200", "9.0")])
    choice = attention_backend("auto", (dataclasses.replace(FULL, dtype="bfloat16", head_dim=64),))
    assert choice.name == "hopper"
    assert choice.backend._choices.num_ctas == 114, "one thread block a multiprocessor of this device"


def test_a_jax_without_mosaic_gpu_is_passed_over_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA H200", "9.0")])
    monkeypatch.setitem(sys.modules, "octavo_kernels._src.hopper_attention", None)
    choice = attention_backend("auto", (FULL,))
    assert choice.name in ("cpu", "xla")
    assert choice.passed_over[0].name == "hopper"
    assert "cannot import its Pallas Mosaic GPU" in choice.passed_over[0].reason


def test_another_gpu_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: [_Device("gpu", "NVIDIA B200", "10.0")])
        assert "NVIDIA B200 (gpu, compute capability 10.0)" in attention_backend("auto", (FULL,)).passed_over[0].reason


def test_a_short_name_is_taken_at_its_word() -> None:
    assert isinstance(attention_backend("reference").backend, ReferenceAttention)


@pytest.mark.usefixtures("fork")
def test_a_fork_plugs_in_by_dotted_name() -> None:
    assert attention_backend("some_fork:Works", (FULL,)).name == "some_fork:Works"


@pytest.mark.usefixtures("fork")
def test_those_passed_over_are_reported_with_their_reasons() -> None:
    choice = attention_backend("some_fork:Declines, reference", (FULL,))
    assert choice.name == "reference"
    assert choice.passed_over == (("some_fork:Declines", "needs a GPU, found none"),)


@pytest.mark.usefixtures("fork")
def test_when_nobody_can_serve_every_reason_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"some_fork:Declines: needs a GPU.*xla: .*state.*reference: .*state"):
        attention_backend("some_fork:Declines,auto", (STATE,))


@pytest.mark.parametrize("rule", [{"kind": "window", "window": 8}, {"softcap": 30.0}, {"sinks": True}])
def test_a_backend_for_plain_attention_is_passed_over_where_a_group_needs_more(monkeypatch, rule) -> None:
    class Plain(ReferenceAttention):
        def attend(self, kv, layer, q, batch, *, scale):
            return super().attend(kv, layer, q, batch, scale=scale)

    module = types.ModuleType("plain_fork")
    module.Plain = Plain
    monkeypatch.setitem(sys.modules, "plain_fork", module)
    assert attention_backend("plain_fork:Plain", (FULL,)).name == "plain_fork:Plain"
    choice = attention_backend("plain_fork:Plain,reference", (dataclasses.replace(FULL, **rule),))
    assert choice.name == "reference"
    assert list(rule)[-1] in choice.passed_over[0].reason


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'reference'\?"):
        attention_backend("referense")


@pytest.mark.usefixtures("fork")
@pytest.mark.parametrize("name", ["some_fork:Missing", "no_such_module_here:Thing", "some fork:Works", "some_fork:number"])
def test_a_dotted_name_that_leads_nowhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention backend '{name}'"):
        attention_backend(name)
