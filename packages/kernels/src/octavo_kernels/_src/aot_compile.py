"""Ahead-of-time compilation for an H200 that is described, not present, and what the assembler said about the result.

Knows JAX's ahead-of-time interface, Mosaic's dumps and NVIDIA's command-line tools. Imported only with JAX on the CPU and
`MOSAIC_GPU_DUMP_TO` set.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import site
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from octavo_core.seams import AttentionBatch
from octavo_kernels._src.hopper_decode import partial_results, share_out
from octavo_kernels._src.hopper_merge import merge
from octavo_kernels._src.hopper_prefill import cut, prefill
from octavo_kernels._src.hopper_tuning import configs
from octavo_kernels._src.mosaic import MAX_SMEM_BYTES

ARCH: Final = "sm_90a"
OPCODES: Final = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA", "QGMMA", "USETMAXREG", "LDL", "STL", "HMMA")
"""Instructions counted: tensor copies, matrix units, register reallocation; spills; matrix units of older GPUs."""
ROWS, MAX_BLOCKS, TOKENS, KV_HEADS = 8, 64, 256, 8


class Kernel(NamedTuple):
    """What was compiled.

    Attributes:
        name, head_dim, block_size, group: Which.
        registers: Of a thread when the kernel starts.
        spilled_bytes: Written to memory for want of registers.
        smem_bytes: Shared memory Mosaic asks for, without barriers.
        planned_smem_bytes: What the configuration says it takes, barriers included.
        opcodes: How often each of `OPCODES` occurs.
    """

    name: str
    head_dim: int
    block_size: int
    group: int
    registers: int
    spilled_bytes: int
    smem_bytes: int
    planned_smem_bytes: int
    opcodes: dict[str, int]

    @property
    def can_launch(self) -> bool:
        """Fits a multiprocessor, and keeps to registers."""
        return self.spilled_bytes == 0 and max(self.smem_bytes, self.planned_smem_bytes) <= MAX_SMEM_BYTES

    def line(self) -> str:
        """For people."""
        shape = f"head_dim={self.head_dim} block_size={self.block_size} group={self.group}"
        counts = " ".join(f"{name}={count}" for name, count in self.opcodes.items())
        return f"{self.name:16} {shape:38} registers={self.registers} spilled={self.spilled_bytes} smem={self.smem_bytes} {counts}"


def compile_configuration(head_dim: int, block_size: int, group: int, dump: Path) -> list[Kernel]:
    """Compile the three kernels as `HopperAttention` would run them."""
    pool = (KV_HEADS * MAX_BLOCKS, KV_HEADS, block_size, head_dim)
    decode, long = configs(group, pool, head_dim**-0.5)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, batch: AttentionBatch) -> tuple[jax.Array, jax.Array]:
        shares = share_out(batch.context_len, batch.num_single, decode)
        partial, lse = partial_results(q, k, v, batch.block_table, batch.context_len, shares, decode)
        tiles = cut(batch, TOKENS, long)
        return merge(partial, lse, shares.rows, None, decode), prefill(q, k, v, batch.block_table, tiles, long)

    for old in dump.iterdir():
        old.unlink()
    low = jax.ShapeDtypeStruct
    vectors = (low((TOKENS, KV_HEADS, group, head_dim), jnp.bfloat16), low(pool, jnp.bfloat16), low(pool, jnp.bfloat16))  # type: ignore[no-untyped-call]
    sizes = AttentionBatch((TOKENS,), (ROWS + 1,), (ROWS,), (ROWS, MAX_BLOCKS), (TOKENS,), (), ())  # type: ignore[arg-type]
    batch = AttentionBatch(*(low(size, jnp.int32) for size in sizes))  # type: ignore[arg-type, call-overload, no-untyped-call]
    _compile(attend, *vectors, batch)
    planned = {"octavo_decode": decode.smem_bytes(), "octavo_merge": 0, "octavo_prefill": long.smem_bytes()}
    return [_kernel(name, (head_dim, block_size, group), bytes_, dump) for name, bytes_ in planned.items()]


def _compile(function: Any, *args: Any) -> None:
    import jax_plugins.xla_cuda13  # type: ignore[import-not-found]  # noqa: F401 (JAX finds it by itself; its absence is said here)

    jax.devices()
    target = files(__package__).joinpath("h200.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
    jax.jit(function).trace(*placed).lower().compile()


def _kernel(name: str, shape: tuple[int, int, int], planned: int, dump: Path) -> Kernel:
    (ptx,) = dump.glob(f"{name}_*.ptx")
    cubin = ptx.with_suffix(".cubin")
    ptxas = subprocess.run([_tool("ptxas"), f"-arch={ARCH}", "-v", ptx, "-o", cubin], capture_output=True, text=True, check=True)
    sass = subprocess.run([_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    log = ptxas.stdout + ptxas.stderr
    counts = {code: len(re.findall(rf"\b{code}\b", sass)) for code in OPCODES}
    resources = ptx.with_suffix(".resources.txt")
    smem = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
    return Kernel(
        name,
        *shape,
        registers=int(re.findall(r"Used (\d+) registers", log)[-1]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", log))),
        smem_bytes=int(smem[1]) if smem else planned,
        planned_smem_bytes=planned,
        opcodes={code: count for code, count in counts.items() if count},
    )


def _tool(name: str) -> str:
    """Path of a CUDA tool: the search path first, then NVIDIA's packages.

    Raises:
        FileNotFoundError: If neither has it.
    """
    if found := shutil.which(name):
        return found
    for root in dict.fromkeys([*site.getsitepackages(), *sys.path]):
        for hit in sorted(glob.glob(os.path.join(root, "nvidia", "*", "bin", name))):
            if os.access(hit, os.X_OK):
                return hit
    raise FileNotFoundError(f"'{name}' is needed and was not found; pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
