"""How fast the kernels are in every instruction set this machine has: `python -m octavo_kernels_cpu.bench [--json FILE] [--quick]`.

One layer of the size of SmolLM2-135M's in random 4-bit blocks, without attention, and a head in 8-bit blocks. `decode`: each row alone;
`prompt`: all rows of one prompt. All instruction sets take turns within a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.bench import Report, parse_arguments, summarise, time_call
from octavo_kernels_cpu._src.block import Block, Norms, gate_up_order
from octavo_kernels_cpu._src.library import ORDER, Library, load
from octavo_kernels_cpu._src.matrix import GROUP, Format, Matrix, Raw, Source, score

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 576, 1536, 9, 3, 64, 49_152
DECODE, PROMPT = (1, 8, 32), (16, 64, 512)
LAYERS = 8
"""Of different weights, so that they do not all lie in the first caches."""


class Stream(NamedTuple):
    """What a layer is given and hands on."""

    residual: Any
    cos: Any
    sin: Any


class NoAttention:
    """Hands back the queries; all rows from `singles` on are prompts."""

    def __init__(self, singles: int) -> None:
        self.singles = singles

    def __call__(self, kv: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Queries as they are."""
        return kv, q


def libraries() -> list[Library]:
    """Every instruction set that is built and runs here."""
    found = []
    for isa in ORDER:
        try:
            found.append(load(isa))
        except NotImplementedError as reason:
            print(f"{isa}: {reason}")
    return found


def weight(library: Library, rng: np.random.Generator, outputs: int, inputs: int, *, bits: int, order: Any = None) -> Matrix:
    """Random blocks of 4 or 8 bits."""
    source, form, size = (Source.Q4_1, Format.Q4, 16) if bits == 4 else (Source.Q8_0, Format.Q8F, 32)
    scales = rng.uniform(0.001, 0.01, (outputs, inputs // GROUP, 2 if bits == 4 else 1)).astype(np.float16).view(np.uint8)
    values = rng.integers(0, 256, (outputs, inputs // GROUP, size)).astype(np.uint8)
    rows = np.concatenate([scales, values], axis=-1).reshape(outputs, -1)
    return Matrix(library, Raw(source, rows, inputs), form, order=order)


def layers(library: Library) -> list[Block]:
    """Random layers; the same for every library."""
    rng, made = np.random.default_rng(0), []
    for _ in range(LAYERS):
        gain = np.ones(HIDDEN, np.float32)
        wide = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = weight(library, rng, wide, HIDDEN, bits=4)
        out = weight(library, rng, HIDDEN, HEADS * HEAD_DIM, bits=4)
        gate_up = weight(library, rng, 2 * FFN, HIDDEN, bits=4, order=gate_up_order(FFN))
        down = weight(library, rng, HIDDEN, FFN, bits=4)
        norms = Norms(gain, gain, None, None, None, None, 1e-5)
        block = Block(
            library, norms, qkv, out, gate_up, down, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, activation="silu"
        )  # fmt: skip
        made.append(block)
    return made


def step(blocks: list[Block], rows: int, singles: int) -> Callable[[], object]:
    """A call of all layers."""

    def run(x: Any, cos: Any, sin: Any) -> Any:
        stream = Stream(x, cos, sin)
        for block in blocks:
            _, stream = block(None, stream, NoAttention(singles))
        return stream.residual

    rng, jitted = np.random.default_rng(1), jax.jit(run)
    x = jnp.asarray(rng.normal(size=(rows, HIDDEN)), jnp.float32)
    turn = jnp.ones((rows, 1, HEAD_DIM // 2), jnp.float32)
    return lambda: jax.block_until_ready(jitted(x, turn, turn))


def compare(report: Report, name: str, calls: dict[str, Callable[[], object]], *, each: int, budget_s: float, flops: float) -> None:
    """Time calls in turns; a figure for each, in µs of one of `each` parts."""
    times: dict[str, list[int]] = {isa: [] for isa in calls}
    for _ in range(3):
        for isa, call in calls.items():
            timing = time_call(call, budget_s=budget_s / 3, least=5)
            times[isa].append(round(timing.median_us * 1e3 / each))
    for isa, some in times.items():
        timing = summarise(some)
        rate = f"{flops / timing.median_us / 1e3:.0f} GFLOP/s"
        report.add(f"{name}_{isa}", timing.median_us, "us", len(some), f"{rate}, min {timing.least_us:.1f}")


def main(argv: Sequence[str] | None = None) -> None:
    """Layers, then the head."""
    arguments = parse_arguments("Speed of the kernels, every instruction set in turn.", argv)
    budget_s = 0.05 if arguments.quick else 1.0
    report = Report("octavo_kernels_cpu: a layer of 4-bit weights without attention, and a head of 8-bit ones")
    found = libraries()
    blocks = {library.isa: layers(library) for library in found}
    width = HIDDEN * (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM + 3 * HIDDEN * FFN
    for kind, sizes in (("decode", DECODE), ("prompt", PROMPT)):
        for rows in sizes:
            calls = {isa: step(some, rows, rows if kind == "decode" else 0) for isa, some in blocks.items()}
            compare(report, f"layer_{kind}_{rows}", calls, each=LAYERS, budget_s=budget_s, flops=2 * width * rows)
    rng = np.random.default_rng(2)
    heads = {library.isa: (library, weight(library, rng, VOCAB, HIDDEN, bits=8)) for library in found}
    for rows in DECODE:
        x = jnp.asarray(rng.normal(size=(rows, HIDDEN)), jnp.float32)
        calls = {isa: _scoring(*head, x) for isa, head in heads.items()}
        compare(report, f"head_{rows}", calls, each=1, budget_s=budget_s, flops=2 * VOCAB * HIDDEN * rows)
    report.write(arguments.json)


def _scoring(library: Library, head: Matrix, x: Any) -> Callable[[], object]:
    jitted = jax.jit(lambda x: score(library, head, x))
    return lambda: jax.block_until_ready(jitted(x))


if __name__ == "__main__":
    main()
