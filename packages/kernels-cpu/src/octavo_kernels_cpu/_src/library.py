"""The compiled kernels: which instruction set this machine has, whether a library may be loaded, and its functions.

Touches the file system and loads native code. Nothing is loaded before the processor's flags and the version of XLA's FFI were checked: a
library that asks for more than is there would end the process, or JAX's whole CPU backend.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from octavo_kernels_cpu._src import build_library

_AVX512: Final = frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})
NEEDS: Final = {
    "scalar": frozenset[str](),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": _AVX512,
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
}
"""Processor flags, as Linux names them."""
ORDER: Final = ("amx", "avx512", "avx2")
"""The better first."""
OPERATIONS: Final = ("project", "finish", "score", "write", "attend")


class Library:
    """One loaded library, its operations registered with JAX.

    Attributes:
        isa: Its instruction set.
    """

    def __init__(self, isa: str, path: Path) -> None:
        self.isa = isa
        self._native = ctypes.CDLL(str(path))
        self._native.octavo_cpu_packed_bytes.restype = ctypes.c_int64
        refused = self._native.octavo_cpu_prepare()
        if refused:
            raise NotImplementedError(f"the operating system does not let this process use {isa} ({os.strerror(refused)})")
        self._native.octavo_cpu_set_threads(num_threads())
        for name in OPERATIONS:
            handler = jax.ffi.pycapsule(getattr(self._native, f"octavo_cpu_{name}"))
            jax.ffi.register_ffi_target(self.target(name), handler, platform="cpu")

    def target(self, operation: str) -> str:
        """The name XLA knows an operation by."""
        return f"octavo_cpu_{operation}_{self.isa}"

    @property
    def threads(self) -> int:
        """Threads that share the work, the caller's included."""
        return int(self._native.octavo_cpu_threads())

    def packed_bytes(self, form: int, source: int, outputs: int, inputs: int) -> int:
        """Bytes of a packed matrix, or −1 where it cannot be packed."""
        return int(self._native.octavo_cpu_packed_bytes(form, source, outputs, inputs))

    def pack(self, form: int, source: int, inputs: int, rows: np.ndarray, order: np.ndarray, out: np.ndarray) -> None:
        """Fill `out`; `order` has 16 row numbers for each panel. All arrays are contiguous."""
        pointers = (ctypes.c_void_p(x.ctypes.data) for x in (rows, order, out))
        self._native.octavo_cpu_pack(form, source, len(order) // 16, inputs, *pointers)

    def stream(self, data: np.ndarray) -> None:
        """Read all of an array with every thread."""
        self._native.octavo_cpu_stream(ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.nbytes))


def num_threads() -> int:
    """`OCTAVO_CPU_THREADS`, or the cores this process may run on."""
    wanted = os.environ.get("OCTAVO_CPU_THREADS", "")
    return max(1, int(wanted)) if wanted.isdecimal() else len(os.sched_getaffinity(0))


def processor_flags() -> frozenset[str]:
    """What Linux says this processor and the operating system can do; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


@functools.cache
def load(isa: str, folder: Path = build_library.LIBRARIES) -> Library:
    """The library of one instruction set.

    Raises:
        NotImplementedError: With the reason it cannot be loaded here.
    """
    _check_api(folder)
    lacking = sorted(NEEDS[isa] - processor_flags())
    if lacking:
        raise NotImplementedError(f"this processor lacks {', '.join(lacking)}")
    path = folder / build_library.file_name(isa)
    if not path.is_file():
        raise NotImplementedError(f"no kernels are built for {isa}")
    return Library(isa, path)


def _check_api(folder: Path) -> None:
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NotImplementedError(f"there are no kernels for {platform.system()} on {platform.machine()}")
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"the device is a {jax.default_backend()}, not a CPU")
    try:
        built = json.loads((folder / "build.json").read_text())["ffi_api"]
    except (OSError, ValueError, KeyError):
        raise NotImplementedError(
            "its kernels are not built: install a wheel of octavo-kernels-cpu, or g++ 11 or newer and sync again"
        ) from None
    try:
        here: Any = build_library.ffi_api(Path(jax.ffi.include_dir()))
    except build_library.CannotBuild as reason:
        raise NotImplementedError(str(reason)) from None
    if built[0] != here[0] or built[1] > here[1]:
        raise NotImplementedError(f"its kernels are built for XLA's FFI {built[0]}.{built[1]}, this jaxlib has {here[0]}.{here[1]}")
