"""Compiles the C++ of this package, once for each instruction set, when a wheel is built or the workspace is synced.

Without a C++20 compiler, or on a machine that is not x86-64 Linux, nothing is compiled, one line says so, and the package still installs:
Octavo then serves through XLA.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildKernels(BuildHookInterface):
    """Builds `_lib` before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not."""
        package = Path(self.root) / "src" / "octavo_kernels_cpu"
        sys.path.insert(0, str(package / "_src"))
        import build_library

        if self.target_name != "wheel":
            return
        try:
            import jaxlib

            build_library.build(Path(jaxlib.__file__).parent / "include")
        except build_library.CannotBuild as reason:
            self.app.display_warning(f"octavo-kernels-cpu: no kernels are built: {reason}; Octavo will serve through XLA")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"
