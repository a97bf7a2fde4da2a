"""Facts and settings of the machine an engine runs on. Touches the allocator, /proc, JAX's settings and devices; knows no model."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Final

import jax
import psutil

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_BF16_FLAGS: Final = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}


def has_bf16_units() -> bool:
    """The CPU multiplies bfloat16 natively. Where the system does not say, it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return bool(_BF16_FLAGS & set(flags.split()))


def keep_freed_memory() -> None:
    """Tell glibc to keep what programs free between steps: mapped anew, every step's scratch space costs its page faults again.

    Measured: 10 to 15 % of a decode step. Elsewhere than on glibc it does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def return_freed_memory() -> None:
    """Hand what is free now back to the system: compiling takes hundreds of megabytes that serving does not need."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def compiled_programs_folder(folder: str | None) -> Path | None:
    """Where compiled programs are kept: as asked for, or JAX's own setting, or the user's cache folder. None for 'off'."""
    if folder == "off":
        return None
    if folder is None:
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        folder = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "octavo" / "compiled")
    return Path(folder).expanduser()


def keep_compiled_programs(folder: str | None) -> None:
    """Point JAX's persistent compilation cache at a folder; 'off' leaves JAX as it is."""
    path = compiled_programs_folder(folder)
    if path is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def run_cpu_programs_in_place() -> None:
    """Run programs of the CPU device in the calling thread. Queued, a plan of 0.3 ms would wait behind the model's whole step.

    Takes effect only before JAX's first use of the CPU.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def device_platform() -> str:
    """`cpu`, `gpu` or another of JAX's names: of the first device."""
    return str(jax.devices()[0].platform)


def free_bytes() -> int:
    """Device memory not in use: of the first accelerator, or of the machine where the device is the CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats["bytes_limit"] - stats["bytes_in_use"])
    return min(int(psutil.virtual_memory().available), _cgroup_free_bytes())


def _cgroup_free_bytes() -> int:
    """What the container this process runs in may still take (cgroup v2), or a huge number."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return 2**62 if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return 2**62
