"""Which instruction set serves: the best one that this machine has, that is built, and that answers as AVX2 does."""

from __future__ import annotations

import functools
import os
from typing import Final

import jax.numpy as jnp
import numpy as np

from octavo_core.seams import AttentionBatch
from octavo_core.specs import KVGroupSpec
from octavo_kernels_cpu._src.attention import CpuAttention
from octavo_kernels_cpu._src.library import ORDER, Library, load
from octavo_kernels_cpu._src.matrix import Format, Matrix, Raw, Source, score
from octavo_kernels_cpu._src.packer import Packer

ORACLE: Final = "avx2"
CHECKED: Final = (
    (Source.F32, Format.F32),
    (Source.BF16, Format.BF16),
    (Source.Q8_0, Format.Q8),
    (Source.Q8_0, Format.Q8F),
    (Source.Q4_1, Format.Q4),
)


@functools.cache
def best_library() -> Library:
    """The first of `ORDER` that can be loaded and agrees with `ORACLE`.

    Raises:
        NotImplementedError: With every reason.
    """
    reasons: dict[str, str] = {}
    wanted = os.environ.get("OCTAVO_CPU_ISA", "")
    if wanted and wanted not in ORDER:
        raise NotImplementedError(f"OCTAVO_CPU_ISA is {wanted!r}; there are {', '.join(ORDER)}")
    for isa in (wanted,) if wanted else ORDER:
        try:
            library = load(isa)
            if isa != ORACLE:
                check_agreement(library, load(ORACLE))
            return library
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


def check_agreement(library: Library, oracle: Library) -> None:
    """Products of every format to the last bit, and attention up to the order of a sum; of prompts, up to bfloat16 where that is used.

    Raises:
        NotImplementedError: They differ; says in what.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(15, 320)), jnp.float32)
    for source, form in CHECKED:
        raw = _some_rows(rng, source, outputs=40, inputs=320)
        found, wanted = (np.asarray(score(one, Matrix(one, raw, form), x)) for one in (library, oracle))
        if not np.array_equal(found, wanted):
            raise NotImplementedError(f"its {library.isa} products in {form.name} differ from {oracle.isa} ones on this machine")
    found, wanted = (_attended(CpuAttention(one)) for one in (library, oracle))
    prompts = 0.02 if library.isa == "amx" else 1e-6
    if not np.allclose(found[:1], wanted[:1], rtol=1e-5, atol=1e-6) or not np.allclose(
        found[1:], wanted[1:], rtol=1e-5, atol=prompts
    ):
        raise NotImplementedError(f"its {library.isa} attention differs from the {oracle.isa} one on this machine")


def _some_rows(rng: np.random.Generator, source: Source, *, outputs: int, inputs: int) -> Raw:
    if source is Source.F32:
        return Raw(source, rng.normal(size=(outputs, inputs)).astype(np.float32), inputs)
    if source is Source.BF16:
        return Raw(source, rng.integers(0x3F00, 0x4000, (outputs, inputs)).astype(np.uint16), inputs)
    heads = 2 if source is Source.Q4_1 else 1
    scales = rng.uniform(0.01, 0.1, (outputs, inputs // 32, heads)).astype(np.float16).view(np.uint8)
    bodies = rng.integers(0, 256, (outputs, inputs // 32, 32 if source is Source.Q8_0 else 16)).astype(np.uint8)
    return Raw(source, np.concatenate([scales, bodies], axis=-1).reshape(outputs, -1), inputs)


def _attended(backend: CpuAttention) -> np.ndarray:
    """A row of one token after 40 others, and one of 3 after 17."""
    rng = np.random.default_rng(1)
    kv = backend.init_kv(KVGroupSpec("full", (0,), 2, 64, "bfloat16", 32), 4)
    slots = jnp.asarray([*range(32, 73), *range(96, 116)], jnp.int32)
    k, v = (jnp.asarray(rng.normal(size=(len(slots), 2, 64)), jnp.float32) for _ in range(2))
    kv = backend.write(kv, 0, k, v, slots)
    ints = {"query_start": [0, 1, 4], "context_len": [41, 20], "block_table": [[1, 2], [3, 0]], "positions": [40, 17, 18, 19]}
    fields = {name: jnp.asarray(value, jnp.int32) for name, value in ints.items()}
    batch = AttentionBatch(**fields, slot_mapping=jnp.full(4, -1, jnp.int32), num_single=jnp.int32(1), num_rows=jnp.int32(2))
    q = jnp.asarray(rng.normal(size=(4, 6, 64)), jnp.float32)
    return np.asarray(backend.attend(kv, 0, q, batch, scale=0.125))
