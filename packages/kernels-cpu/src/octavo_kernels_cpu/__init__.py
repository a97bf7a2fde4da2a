"""Decoder layers and paged attention in C++ for the vector units of CPUs, called through XLA's FFI.

`attention` makes an `octavo_core.seams.AttentionBackend`; `layers` makes a `Packer`, which replaces a model's layers and head. Both raise
`NotImplementedError` with the reason where this machine or installation cannot serve.
"""

from octavo_kernels_cpu._src.attention import CpuAttention
from octavo_kernels_cpu._src.choose import attention, best_library, layers
from octavo_kernels_cpu._src.packer import Packed, Packer

__version__ = "0.1.0"

__all__ = ["CpuAttention", "Packed", "Packer", "attention", "best_library", "layers"]
