"""Compiles the kernels: `python -m octavo_kernels_cpu.build`, and what the package's build hook calls.

Knows the compiler's flags of each instruction set. Imports nothing of this package: it runs before that is installed.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent.parent
LIBRARIES: Final = PACKAGE / "_lib"
COMPILERS: Final = ("g++", "clang++", "c++")
_AVX512: Final = ("-mavx2", "-mfma", "-mf16c", *(f"-mavx512{x}" for x in ("f", "bw", "dq", "vl", "vnni")))
FLAGS: Final = {
    "scalar": ("-DOCTAVO_ISA=0", "-O1", "-ffp-contract=off"),
    "avx2": ("-DOCTAVO_ISA=1", "-O3", "-mavx2", "-mfma", "-mf16c"),
    "avx512": ("-DOCTAVO_ISA=2", "-O3", *_AVX512),
    "amx": ("-DOCTAVO_ISA=3", "-O3", *_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
}
"""Instruction sets. `scalar` is for tests and is not built by default."""
SHIPPED: Final = ("avx2", "avx512", "amx")
_COMMON: Final = (
    "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-static-libstdc++", "-static-libgcc", "-pthread", "-w", "-Wl,--exclude-libs,ALL",
)  # fmt: skip


class CannotBuild(Exception):
    """Why nothing can be compiled here."""


def file_name(isa: str) -> str:
    """Of an instruction set's library."""
    return f"octavo_cpu_{isa}.so"


def build(
    include: Path,
    isas: Sequence[str] = SHIPPED,
    *,
    folder: Path = LIBRARIES,
    extra: Sequence[str] = (),
    sources: Path = PACKAGE / "csrc",
) -> Path:
    """Compile libraries into a folder and note beside them what they need.

    Args:
        include: jaxlib's headers.
        isas: Instruction sets.
        folder: Where the libraries go.
        extra: More flags, such as a sanitizer's.
        sources: The C++ files.

    Raises:
        CannotBuild: There is no compiler, it fails, or the machine is of another kind.
    """
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise CannotBuild(f"there are none for {platform.system()} on {platform.machine()}")
    compiler = _compiler()
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(len(isas)) as pool:
        jobs = [pool.submit(_compile, compiler, isa, include, folder, sources, extra) for isa in isas]
        for job in jobs:
            job.result()
    note = {"ffi_api": ffi_api(include), "isas": list(isas), "compiler": compiler}
    (folder / "build.json").write_text(json.dumps(note) + "\n")
    return folder


def ffi_api(include: Path) -> list[int]:
    """Version of XLA's FFI in these headers: major, minor.

    Raises:
        CannotBuild: They are not there.
    """
    try:
        text = (include / "xla" / "ffi" / "api" / "c_api.h").read_text()
    except OSError as error:
        raise CannotBuild(f"jaxlib's FFI headers cannot be read ({error})") from None
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(found):
        raise CannotBuild(f"{include} names no version of XLA's FFI")
    return [int(match[1]) for match in found if match]


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name.split()[0])
        if path and _speaks_cpp20(path):
            return path
    raise CannotBuild(f"no C++20 compiler is found (tried {wanted or ', '.join(COMPILERS)}); install g++ 11 or newer, or set CXX")


def _speaks_cpp20(path: str) -> bool:
    test = "#include <atomic>\nint main() { std::atomic<int> x{0}; x.notify_one(); }\n"
    run = subprocess.run(
        [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], input=test, text=True, capture_output=True, check=False
    )
    return run.returncode == 0


def _compile(compiler: str, isa: str, include: Path, folder: Path, sources: Path, extra: Sequence[str]) -> None:
    """Into a temporary file first: a process that has the old library open keeps it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        out = Path(scratch) / file_name(isa)
        command = [compiler, *_COMMON, *FLAGS[isa], *extra, "-isystem", str(include), str(sources / "library.cc"), "-o", str(out)]
        run = subprocess.run(command, text=True, capture_output=True, check=False)
        if run.returncode:
            first = next((line for line in run.stderr.splitlines() if "error" in line), run.stderr.strip()[:200])
            raise CannotBuild(f"{compiler} fails for {isa}: {first}")
        out.replace(folder / file_name(isa))
