"""Ahead-of-time compilation for an H200 that is described, not present, and what the assembler said about the result.

Knows JAX's ahead-of-time interface, Mosaic's dumps and NVIDIA's command-line tools. Imported only with JAX on the CPU and
`MOSAIC_GPU_DUMP_TO` set.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from octavo_core.seams import AttentionBatch
from octavo_kernels._src.hopper_attention import BLOCK_SIZES, LATENT_DIMS
from octavo_kernels._src.hopper_decode import partial_results
from octavo_kernels._src.hopper_latent_step import attend_latents
from octavo_kernels._src.hopper_merge import merge
from octavo_kernels._src.hopper_prefill import prefill
from octavo_kernels._src.hopper_shares import share_out
from octavo_kernels._src.hopper_tiles import cut
from octavo_kernels._src.hopper_tuning import TILES, Rules, configs, latent_config
from octavo_kernels._src.mosaic import MAX_SMEM_BYTES

ARCH: Final = "sm_90a"
OPCODES: Final = ("UTMALDG", "UTMASTG", "UBLKCP", "HGMMA", "QGMMA", "USETMAXREG", "LDL", "STL", "HMMA")
"""Instructions counted: tensor copies, matrix units, register reallocation; spills; matrix units of older GPUs."""
FEWEST_STAGES: Final = 2
ROWS, MAX_BLOCKS, TOKENS, KV_HEADS = 8, 64, 256, 8


class Variant(NamedTuple):
    """What the kernels can be compiled for.

    Attributes:
        head_dim, block_size, group: Shapes; `group` query heads to a KV head.
        stored: Element type of the pool.
        has_rules: With a window, a soft cap and sinks.
    """

    head_dim: int
    block_size: int
    group: int
    stored: str = "bfloat16"
    has_rules: bool = False


class Tried(NamedTuple):
    """A configuration to look at, in as few stages as there can be: their number changes no register."""

    tile_kv: int
    take_turns: bool


def untried(head_dim: int, stored: str, *, has_rules: bool) -> Iterator[Tried]:
    """Every one that fits shared memory, for both kernels."""
    pool = (1, KV_HEADS, min(BLOCK_SIZES), head_dim)
    for tile_kv, take_turns in itertools.product(TILES, (True, False) if stored == "bfloat16" else (False,)):
        chosen = configs(1, pool, 1.0, rules=RULES if has_rules else Rules(), stored=stored, proven=False)
        if all(dataclasses.replace(c, tile_kv=tile_kv, stages=FEWEST_STAGES).smem_bytes() <= MAX_SMEM_BYTES for c in chosen):
            yield Tried(tile_kv, take_turns)


class Kernel(NamedTuple):
    """What was compiled.

    Attributes:
        name, head_dim, block_size, group, stored, has_rules: Which.
        registers: Of a thread when the kernel starts.
        spilled_bytes: Written to memory for want of registers.
        tile_kv, stages, take_turns: Of its configuration; 0, 0 and False for the merge.
        smem_bytes: Shared memory Mosaic asks for, without barriers.
        planned_smem_bytes: What the configuration says it takes, barriers included.
        opcodes: How often each of `OPCODES` occurs.
    """

    name: str
    head_dim: int
    block_size: int
    group: int
    stored: str
    has_rules: bool
    tile_kv: int
    stages: int
    take_turns: bool
    registers: int
    spilled_bytes: int
    smem_bytes: int
    planned_smem_bytes: int
    opcodes: dict[str, int]

    @property
    def can_launch(self) -> bool:
        """Fits a multiprocessor and keeps to registers."""
        return self.spilled_bytes == 0 and max(self.smem_bytes, self.planned_smem_bytes) <= MAX_SMEM_BYTES

    def line(self) -> str:
        """For people."""
        shape = f"head_dim={self.head_dim} block_size={self.block_size} group={self.group} {self.stored}"
        shape += " rules" if self.has_rules else ""
        shape += f" tile_kv={self.tile_kv} stages={self.stages}{' turns' if self.take_turns else ''}" if self.stages else ""
        counts = " ".join(f"{name}={count}" for name, count in self.opcodes.items())
        return f"{self.name:16} {shape:88} registers={self.registers} spilled={self.spilled_bytes} smem={self.smem_bytes} {counts}"


RULES: Final = Rules(window=1000, softcap=30.0, sinks=True)


def traced(variant: Variant, tried: Tried | None = None) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A function that calls the kernels as `HopperAttention` does, the shapes of its arguments, and each kernel's configuration."""
    head_dim, block_size, group, stored, has_rules = variant
    if head_dim in LATENT_DIMS:
        return _traced_latents(variant)
    pool = (KV_HEADS * MAX_BLOCKS, KV_HEADS, block_size, head_dim)
    decode, long = configs(group, pool, head_dim**-0.5, rules=RULES if has_rules else Rules(), stored=stored, proven=tried is None)
    if tried is not None:
        decode = dataclasses.replace(decode, tile_kv=tried.tile_kv, stages=FEWEST_STAGES)
        long = dataclasses.replace(long, tile_kv=tried.tile_kv, stages=FEWEST_STAGES, take_turns=tried.take_turns)

    def attend(
        q: jax.Array, kv: dict[str, jax.Array], batch: AttentionBatch, sinks: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        shares = share_out(batch.context_len, batch.num_single, decode)
        partial, lse = partial_results(q, kv, batch.block_table, batch.context_len, shares, decode)
        flat = None if sinks is None else sinks.reshape(-1)
        answers = prefill(q, kv, batch.block_table, cut(batch, TOKENS, long), sinks, long)
        return merge(partial, lse, shares.rows, flat, decode), answers

    low: Any = jax.ShapeDtypeStruct
    kv = {name: low(pool, stored) for name in ("k", "v")}
    if decode.has_scales:
        kv |= {name: low(pool[:3], jnp.float32) for name in ("k_scale", "v_scale")}
    q = low((TOKENS, decode.kv_heads, decode.group, head_dim), jnp.bfloat16)
    batch = _batch_shapes()
    sinks = low((decode.kv_heads, decode.group), jnp.float32) if has_rules else None
    return attend, (q, kv, batch, sinks), {"octavo_decode": decode, "octavo_merge": None, "octavo_prefill": long}


def _traced_latents(variant: Variant) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same over MLA latents, which `group` query heads share; rules are a soft cap alone."""
    head_dim, block_size, heads, stored, has_rules = variant
    pool = (KV_HEADS * MAX_BLOCKS, 1, block_size, head_dim)
    config = latent_config(heads, pool, head_dim**-0.5, softcap=RULES.softcap if has_rules else None, stored=stored)

    def attend(q: jax.Array, kv: dict[str, jax.Array], batch: AttentionBatch) -> jax.Array:
        return attend_latents(q, kv, batch, config, None)

    low: Any = jax.ShapeDtypeStruct
    kv = {"k": low(pool, stored)} | ({"k_scale": low(pool[:3], jnp.float32)} if config.has_scales else {})
    args = low((TOKENS, heads, head_dim), jnp.bfloat16), kv, _batch_shapes()
    return attend, args, {"octavo_latent": config, "octavo_merge": None}


def _batch_shapes() -> AttentionBatch:
    sizes = (TOKENS,), (ROWS + 1,), (ROWS,), (ROWS, MAX_BLOCKS), (TOKENS,), (), ()
    shapes: Any = (jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)
    return AttentionBatch(*shapes)


def compile_variant(variant: Variant, dump: Path, tried: Tried | None = None) -> list[Kernel]:
    """Compile its kernels; one that this process has compiled before, as two variants may share their merge, is left out.

    Args:
        variant: Which kernels.
        dump: Folder Mosaic writes into.
        tried: Instead of the configurations chosen for it.

    Raises:
        RuntimeError: If nothing was written for a kernel that is new.
    """
    attend, args, planned = traced(variant, tried)
    for old in dump.iterdir():
        if old.suffix != ".ptx":
            old.unlink()
        elif not old.name.startswith("seen"):
            old.rename(dump / f"seen {old.name}")
    _compile(attend, *args)
    fresh = {name: list(dump.glob(f"{name}_*.ptx")) for name in planned}
    lost = [name for name, paths in fresh.items() if not paths and not list(dump.glob(f"seen {name}_*.ptx"))]
    if lost:
        raise RuntimeError(
            f"Mosaic wrote no PTX of {', '.join(lost)} into {dump}; MOSAIC_GPU_DUMP_PTX and MOSAIC_GPU_DUMP_TO must be set"
        )
    return [_kernel(name, variant, planned[name], paths[0]) for name, paths in fresh.items() if paths]


def _compile(function: Any, *args: Any) -> None:
    import jax_plugins.xla_cuda13  # type: ignore[import-not-found]  # noqa: F401 (JAX finds it by itself; its absence is said here)

    jax.devices()
    target = files(__package__).joinpath("h200.txtpb").read_text(encoding="utf-8")
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), args)
    jax.jit(function).trace(*placed).lower().compile()


def _kernel(name: str, variant: Variant, config: Any, ptx: Path) -> Kernel:
    cubin = ptx.with_suffix(".cubin")
    ptxas = subprocess.run([_tool("ptxas"), f"-arch={ARCH}", "-v", ptx, "-o", cubin], capture_output=True, text=True, check=True)
    sass = subprocess.run([_tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    log = ptxas.stdout + ptxas.stderr
    counts = {code: len(re.findall(rf"\b{code}\b", sass)) for code in OPCODES}
    resources = ptx.with_suffix(".resources.txt")
    smem = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
    planned = config.smem_bytes() if config else 0
    return Kernel(
        name,
        *variant,
        tile_kv=config.tile_kv if config else 0,
        stages=config.stages if config else 0,
        take_turns=getattr(config, "take_turns", False),
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
