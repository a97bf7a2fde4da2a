"""How to reach the CPU kernels, a package of their own that need not be installed. Knows its name and nothing else of it."""

from __future__ import annotations

import pkgutil
from typing import Any, Final

from octavo_core.seams import AttentionBackend

PACKAGE: Final = "octavo_kernels_cpu"


def cpu_attention() -> AttentionBackend[Any]:
    """Paged attention in C++.

    Raises:
        NotImplementedError: With the reason it cannot serve here.
    """
    backend: AttentionBackend[Any] = _from_package("attention")()
    return backend


def cpu_layers() -> Any:
    """What packs a model's layers for the CPU kernels: an `octavo_kernels_cpu.Packer`.

    Raises:
        NotImplementedError: With the reason it cannot serve here.
    """
    return _from_package("layers")()


def _from_package(name: str) -> Any:
    try:
        return pkgutil.resolve_name(f"{PACKAGE}:{name}")
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise NotImplementedError("octavo-kernels-cpu is not installed") from None
