"""How many KV blocks, which step shapes: arithmetic on sizes, each choice with its reason. Touches no device."""

from __future__ import annotations

import dataclasses
from typing import Final

from octavo_core.errors import ConfigError
from octavo_engine.config import EngineConfig

MAX_BUCKETS: Final = 10
PROBE_TOKENS: Final = (32, 128)
"""Steps timed at start on a CPU."""
CPU_STEP_S: Final = 0.25
"""A full step on a CPU should take no longer."""
CPU_BUDGETS: Final = (128, 256, 512)
CPU_POOL_BYTES: Final = 4 * 2**30
CPU_SEQUENCES: Final = 64
DEVICE_SEQUENCES: Final = 256
ROW_LANES: Final = 8
"""Rows are padded to a multiple of this."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A compiled step shape: `tokens` flat tokens of at most `rows` rows."""

    tokens: int
    rows: int


def num_sequences(config: EngineConfig, *, on_cpu: bool) -> tuple[int, str]:
    """Most sequences in a step, and why that many."""
    if config.max_num_seqs:
        return config.max_num_seqs, "--max-num-seqs"
    return (CPU_SEQUENCES if on_cpu else DEVICE_SEQUENCES), "default of this device"


def num_blocks(config: EngineConfig, bytes_per_block: int, free_bytes: int, *, on_cpu: bool) -> tuple[int, str]:
    """Blocks of the pool, the reserved one included, and why that many.

    Args:
        config: The operator's wishes.
        bytes_per_block: Of all KV groups together.
        free_bytes: Device memory that is free after the weights are loaded.
        on_cpu: The device shares memory with everything else: take a quarter of the share, at most `CPU_POOL_BYTES`.

    Raises:
        ConfigError: When not even two blocks fit.
    """
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes:
        size, why = config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    else:
        size, why = int(free_bytes * config.gpu_memory_utilization), f"{config.gpu_memory_utilization:g} of free memory"
        if on_cpu:
            size, why = min(size // 4, CPU_POOL_BYTES), f"a quarter of {why}, at most {CPU_POOL_BYTES >> 30} GiB"
    blocks = size // bytes_per_block
    if blocks < 2:
        raise ConfigError(
            f"a KV pool of {size} bytes ({why}) holds {blocks} blocks of {bytes_per_block} bytes; at least 2 are needed: "
            "raise --kv-cache-memory-bytes or lower --block-size"
        )
    return blocks, why


def buckets(token_budget: int, max_num_seqs: int, *, alone: bool = False) -> tuple[Bucket, ...]:
    """Step shapes from small to large: fourfold steps up to the budget, plus one for a full batch of single tokens.

    At most `MAX_BUCKETS`; each holds mixed batches, so a step takes the smallest that fits its tokens and rows.

    Args:
        token_budget: Most tokens in a step.
        max_num_seqs: Most rows in a step.
        alone: Add a shape for one token by itself, where one row is not as dear as eight.
    """
    sizes = {token_budget}
    size = ROW_LANES
    while size < token_budget:
        sizes.add(size)
        size *= 4
    sizes.add(min(max_num_seqs, token_budget))
    padded = sorted({-(-s // ROW_LANES) * ROW_LANES for s in sizes})
    if alone:
        padded.insert(0, 1)
    while len(padded) > MAX_BUCKETS:
        padded.pop(2)
    return tuple(Bucket(tokens, min(tokens, -(-max_num_seqs // ROW_LANES) * ROW_LANES)) for tokens in padded)


def few_shapes(token_budget: int, max_num_seqs: int) -> tuple[Bucket, ...]:
    """Step shapes where pads cost little: one for few single tokens, one for a full batch of them, one for everything."""
    rows, tokens = (-(-size // ROW_LANES) * ROW_LANES for size in (max_num_seqs, token_budget))
    return tuple(Bucket(size, min(size, rows)) for size in sorted({ROW_LANES, min(rows, tokens), tokens}))


def pick(shapes: tuple[Bucket, ...], num_tokens: int, num_rows: int) -> Bucket:
    """The smallest shape that holds a step. The largest one holds every step the scheduler can plan."""
    return next(b for b in shapes if b.tokens >= num_tokens and b.rows >= num_rows)


def cpu_budget(small_s: float, large_s: float, max_num_seqs: int) -> tuple[int, str]:
    """The token budget of a CPU and why, from the times of steps of `PROBE_TOKENS` tokens, taken as a straight line.

    However slow the CPU, a full batch of single tokens leaves as many tokens again for prompts.
    """
    small, large = PROBE_TOKENS
    per_token_s = max((large_s - small_s) / (large - small), 1e-9)
    base_s = max(small_s - small * per_token_s, 0.0)
    fits = [b for b in CPU_BUDGETS if base_s + b * per_token_s <= CPU_STEP_S]
    budget = max([CPU_BUDGETS[0], 2 * max_num_seqs, *fits])
    return (
        budget,
        f"timed: {base_s * 1e3:.0f} ms + {per_token_s * 1e3:.2f} ms a token, a full step should take {CPU_STEP_S * 1e3:.0f} ms",
    )
