"""Which instruction set serves: the best one that this machine has, that is built, and that answers as the portable one does."""

from __future__ import annotations

import functools

from octavo_kernels_cpu._src.attention import CpuAttention
from octavo_kernels_cpu._src.library import ORDER, Library, load
from octavo_kernels_cpu._src.packer import Packer


@functools.cache
def best_library() -> Library:
    """The first of `ORDER` that can be loaded.

    Raises:
        NotImplementedError: With every reason.
    """
    reasons: dict[str, str] = {}
    for isa in ORDER:
        try:
            return load(isa)
        except NotImplementedError as reason:
            reasons[str(reason)] = isa
    raise NotImplementedError("; ".join(reason for reason in reasons))


def attention() -> CpuAttention:
    """Paged attention on this machine's vector units."""
    return CpuAttention(best_library())


def layers() -> Packer:
    """What packs a model's layers for this machine's vector units."""
    library = best_library()
    return Packer(library, f"{library.isa}, {library.threads} threads")
