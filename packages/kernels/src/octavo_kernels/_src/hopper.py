"""Whether JAX sees a Hopper GPU. Imports Pallas only where it does: other machines start without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jax

if TYPE_CHECKING:
    from octavo_kernels._src.hopper_attention import HopperAttention

COMPUTE_CAPABILITY: Final = "9.0"
MULTIPROCESSORS: Final = 132
"""Of an H100 SXM or H200."""


def hopper_attention() -> HopperAttention:
    """The backend.

    Raises:
        NotImplementedError: Where JAX sees no Hopper GPU, or lacks what its kernels need.
    """
    require_hopper()
    try:
        from octavo_kernels._src.hopper_attention import HopperAttention
    except ImportError as error:
        raise NotImplementedError(f"JAX {jax.__version__} cannot import its Pallas Mosaic GPU: {error}") from error
    return HopperAttention()


def copies_scales(block_size: int) -> bool:
    """Whether this JAX can copy the scales of an FP8 block, 4 bytes a token: before 0.11 a copy had 128 bytes at least."""
    return 4 * block_size >= 128 or jax.__version_info__ >= (0, 11)


def multiprocessors() -> int:
    """How many JAX's first device has; where it does not say, as many as an H200."""
    return int(getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS)


def require_hopper() -> None:
    """Raises `NotImplementedError`, saying what JAX sees instead, unless its first device is a Hopper GPU."""
    device = jax.devices()[0]
    found = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or str(found) != COMPUTE_CAPABILITY:
        what = f"{device.device_kind} ({device.platform}{f', compute capability {found}' if found else ''})"
        raise NotImplementedError(f"needs a GPU of compute capability {COMPUTE_CAPABILITY} (Hopper); JAX sees {what}")
