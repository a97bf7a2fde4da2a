"""Compiles the Hopper kernels for an H200 on a machine without a GPU: `python -m octavo_kernels.aot [--head-dim 64 128 256 576] [--json FILE]`.

Prints registers, spilled bytes, shared memory and the instructions that matter of each shipped configuration. Static figures: they say
that a kernel can launch and uses the units it should, and nothing about its speed.

Needs, beside JAX, the packages of `PACKAGES`; see the README for an environment of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from octavo_kernels._src.aot_compile import Kernel

PACKAGES: Final = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-nvdisasm")
"""What compiling for a GPU takes where there is none; the first two at JAX's own version."""

HEAD_DIMS: Final = (64, 128, 256)
"""Of heads, whose kernels have configurations to choose between; MLA latents have one."""
GROUPS: Final = {16: 3, 32: 8, 64: 4}
"""Query heads to a KV head that each block size is compiled with."""
SHIPPED: Final = (
    *((head_dim, block_size, "bfloat16", False) for head_dim in (64, 128, 256) for block_size in (16, 32, 64)),
    *((head_dim, 32, stored, False) for stored in ("float8_e4m3fn", "float8_e5m2") for head_dim in (64, 128, 256)),
    *((head_dim, 32, stored, True) for stored in ("bfloat16", "float8_e4m3fn") for head_dim in (64, 128, 256)),
    *((576, block_size, "bfloat16", False) for block_size in (16, 32, 64)),
    *((576, 16, stored, False) for stored in ("float8_e4m3fn", "float8_e5m2")),
    (576, 32, "float8_e4m3fn", True),
)
"""Head size (576: MLA latents), block size, element type, and whether with a window, a soft cap and sinks: what is compiled for one, the kernels serve."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, and answer 1 if a configuration cannot launch or spills."""
    parser = argparse.ArgumentParser(prog="octavo_kernels.aot", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256, 576])
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--stored", nargs="+", default=["bfloat16", "float8_e4m3fn", "float8_e5m2"])
    parser.add_argument("--rules", choices=("all", "with", "without"), default="all", help="a window, a soft cap and sinks")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="compile each tile that fits shared memory, not the chosen one, and note it in compiled.json",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list with one object a kernel")
    args = parser.parse_args(argv)
    if os.environ.get("JAX_PLATFORMS") != "cpu" or "MOSAIC_GPU_DUMP_TO" not in os.environ:
        return _again_without_gpu(argv)
    found = [kernel for kernels in _compiled(args, Path(os.environ["MOSAIC_GPU_DUMP_TO"])) for kernel in kernels]
    if args.sweep:
        _note(found)
    if args.json:
        args.json.write_text(json.dumps([kernel._asdict() for kernel in found], indent=1) + "\n", encoding="utf-8")
    return int(not args.sweep and not all(kernel.can_launch for kernel in found))


def _compiled(args: argparse.Namespace, dump: Path) -> Iterator[list[Kernel]]:
    """The kernels of each variant asked for, printed as they come."""
    from octavo_kernels._src.aot_compile import Variant, compile_variant, untried

    wanted = {"all": (True, False), "with": (True,), "without": (False,)}["all" if args.sweep else args.rules]
    shapes = product(HEAD_DIMS, (32,), args.stored, (False, True)) if args.sweep else SHIPPED
    for head_dim, block_size, stored, has_rules in shapes:
        if head_dim in args.head_dim and block_size in args.block_size and stored in args.stored and has_rules in wanted:
            variant = Variant(head_dim, block_size, GROUPS[block_size], stored, has_rules)
            for tried in untried(head_dim, stored, has_rules=has_rules) if args.sweep else (None,):
                kernels = compile_variant(variant, dump, tried)
                for kernel in kernels:
                    print(kernel.line(), flush=True)
                yield kernels


def _note(found: list[Kernel]) -> None:
    """Write what was found into `compiled.json`, over what it said of the same configurations; of several compiled for one, the worst."""
    path = Path(__file__).parent / "_src" / "compiled.json"
    known = {_key(item): item for item in json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}
    fresh: dict[str, dict[str, object]] = {}
    for kernel in sorted((k for k in found if k.stages), key=lambda k: k.spilled_bytes):
        item = {
            "kernel": kernel.name.removeprefix("octavo_"),
            "head_dim": kernel.head_dim,
            "stored": kernel.stored,
            "tile_kv": kernel.tile_kv,
        }
        item |= {"take_turns": kernel.take_turns, "registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes}
        fresh[_key(item)] = item
    lines = (json.dumps(item) for _, item in sorted((known | fresh).items()))
    path.write_text("[\n " + ",\n ".join(lines) + "\n]\n", encoding="utf-8")


def _key(item: dict[str, object]) -> str:
    return "{kernel} {head_dim:4} {stored} {tile_kv:4} {take_turns}".format(**item)


def _again_without_gpu(argv: Sequence[str] | None) -> int:
    """JAX and Mosaic read their environment when they are imported: run anew with it set."""
    with tempfile.TemporaryDirectory(prefix="octavo-aot-") as folder:
        dump = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        command = [sys.executable, "-m", "octavo_kernels.aot", *(sys.argv[1:] if argv is None else argv)]
        return os.spawnve(os.P_WAIT, sys.executable, command, {**os.environ, **dump, "JAX_PLATFORMS": "cpu"})


if __name__ == "__main__":
    raise SystemExit(main())
