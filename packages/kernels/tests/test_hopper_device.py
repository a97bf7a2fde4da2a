"""The Hopper kernels on a Hopper GPU, over the shared table of cases. Elsewhere these tests are skipped and counted."""

from __future__ import annotations

import pytest

from octavo_core.testing import attention
from octavo_kernels import attention_backend
from octavo_kernels._src.hopper import require_hopper
from octavo_kernels.cases import HOPPER_CASES


def _why_not() -> str:
    try:
        require_hopper()
    except NotImplementedError as reason:
        return str(reason)
    return ""


pytestmark = [pytest.mark.hopper, pytest.mark.slow, pytest.mark.skipif(bool(_why_not()), reason=_why_not())]


@pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
def test_the_kernels_agree_with_dense_attention(case: attention.AttentionCase) -> None:
    name, backend, _ = attention_backend("auto", (case.spec(),))
    assert name == "hopper"
    attention.check_parity(backend, case)


def test_blocks_can_be_carried_elsewhere_as_bytes() -> None:
    attention.check_moved_blocks(attention_backend("hopper").backend, HOPPER_CASES[-1])
