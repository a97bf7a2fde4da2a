"""`python -m octavo_kernels_cpu.build`: compile the kernels into the installed package, with the headers of the installed jaxlib."""

from __future__ import annotations

from pathlib import Path

import jax

from octavo_kernels_cpu._src.build_library import CannotBuild, build


def main() -> None:
    """Compile, and say where the result is."""
    try:
        folder = build(Path(jax.ffi.include_dir()))
    except CannotBuild as reason:
        raise SystemExit(f"octavo-kernels-cpu: {reason}") from None
    print(f"octavo-kernels-cpu: built in {folder}")


if __name__ == "__main__":
    main()
