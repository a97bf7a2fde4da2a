"""Every backend of the package against the seam's conformance suite."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from octavo_core.testing import attention
from octavo_kernels import BACKENDS, ReferenceAttention, attention_backend

pytestmark = pytest.mark.slow

PORTABLE = ["xla", "reference"]
"""Backends that run anywhere; `test_hopper_interpreted` has the other's conformance."""


@pytest.mark.parametrize("case", attention.CASES + attention.RULE_CASES + attention.LATENT_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", PORTABLE)
def test_a_backend_agrees_with_dense_attention(name: str, case: attention.AttentionCase) -> None:
    attention.check_parity(attention_backend(name).backend, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PORTABLE)
def test_blocks_can_be_carried_elsewhere_as_bytes(name: str, dtype: str) -> None:
    case = attention.AttentionCase("moved", attention.MIXED, dtype=dtype, q_dtype=dtype)
    attention.check_moved_blocks(attention_backend(name).backend, case)


@pytest.mark.parametrize("name", PORTABLE)
def test_blocks_of_latents_can_be_carried_elsewhere(name: str) -> None:
    backend = attention_backend(name).backend
    attention.check_moved_blocks(backend, attention.LATENT_CASES[0])
    attention.check_dropped_writes(backend, attention.LATENT_CASES[0])


@pytest.mark.parametrize("name", PORTABLE)
def test_writes_outside_the_pool_store_nothing(name: str) -> None:
    attention.check_dropped_writes(attention_backend(name).backend, attention.CASES[0])


def test_layouts_of_different_backends_have_different_names() -> None:
    names = [attention_backend(name).backend.layout_id for name in PORTABLE]
    hopper = pytest.importorskip("octavo_kernels._src.hopper_attention", reason="Pallas Mosaic GPU cannot be imported")
    names.append(hopper.HopperAttention.layout_id)
    assert len(set(names)) == len(names) == len(BACKENDS)


class ForgetsCausality(ReferenceAttention):
    def attend(self, kv, layer, q, batch, *, scale):
        row = jnp.searchsorted(batch.query_start[1:], jnp.arange(len(q)), side="right")
        last = batch.context_len[jnp.minimum(row, len(batch.context_len) - 1)] - 1
        return super().attend(kv, layer, q, batch._replace(positions=last), scale=scale)


class SharesTheLastBlock(ReferenceAttention):
    def init_kv(self, spec, num_blocks):
        return super().init_kv(spec, num_blocks - 1)


class ClipsSlots(ReferenceAttention):
    def write(self, kv, layer, k, v, slot_mapping):
        return super().write(kv, layer, k, v, jnp.maximum(slot_mapping, 0))


class WrapsSlots(ReferenceAttention):
    def write(self, kv, layer, k, v, slot_mapping):
        return super().write(kv, layer, k, v, jnp.minimum(slot_mapping, kv.shape[2] * kv.shape[3] - 1))


class MixesLayers(ReferenceAttention):
    def attend(self, kv, layer, q, batch, *, scale):
        return super().attend(kv, 0, q, batch, scale=scale)


class SeesOneTokenTooFew(ReferenceAttention):
    def attend(self, kv, layer, q, batch, *, scale):
        return super().attend(kv, layer, q, batch._replace(positions=jnp.maximum(batch.positions - 1, 0)), scale=scale)


class IgnoresTheWindow(ReferenceAttention):
    def attend(self, kv, layer, q, batch, *, scale, window=None):
        return super().attend(kv, layer, q, batch, scale=scale)


class SeesOneTokenBeyondTheWindow(ReferenceAttention):
    def attend(self, kv, layer, q, batch, *, scale, window):
        return super().attend(kv, layer, q, batch, scale=scale, window=window + 1)


@pytest.mark.parametrize("fault", [IgnoresTheWindow, SeesOneTokenBeyondTheWindow])
def test_the_suite_notices_a_wrong_window(fault: type) -> None:
    with pytest.raises(AssertionError):
        attention.check_attention(fault(), [attention.RULE_CASES[0]])


FAULTS = [ForgetsCausality, SharesTheLastBlock, ClipsSlots, WrapsSlots, MixesLayers, SeesOneTokenTooFew]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_suite_notices_a_faulty_backend(fault: type) -> None:
    case = attention.AttentionCase("mixed", attention.MIXED, dtype="bfloat16", q_dtype="bfloat16")
    with pytest.raises(AssertionError):
        attention.check_attention(fault(), [case])
