"""The Hopper kernels lowered for CUDA where there is neither a GPU nor NVIDIA's packages: what Mosaic refuses is noticed on any machine."""

from __future__ import annotations

import jax
import pytest

from octavo_kernels._src.hopper import copies_scales
from octavo_kernels.aot import GROUPS

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")

from octavo_kernels._src.aot_compile import Variant, traced

pytestmark = pytest.mark.slow

VARIANTS = [
    Variant(128, 16, GROUPS[16]),
    Variant(64, 32, GROUPS[32], has_rules=True),
    Variant(256, 32, 71),
    Variant(128, 64, GROUPS[64], "float8_e4m3fn"),
    Variant(256, 32, GROUPS[32], "float8_e5m2", has_rules=True),
    Variant(576, 64, 128),
    Variant(576, 16, 16, "float8_e4m3fn", has_rules=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_kind_of_kernel_lowers_to_a_call_each(variant: Variant) -> None:
    if variant.stored.startswith("float8") and not copies_scales(variant.block_size):
        pytest.skip(
            f"JAX {jax.__version__} cannot copy the scales of an FP8 block of {variant.block_size}; the backend declines it"
        )
    attend, args, planned = traced(variant)
    text = jax.jit(attend).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == len(planned) == (2 if variant.head_dim == 576 else 3)
