"""Static facts that fix array shapes: KV groups, the cache's and the step's sizes. Hashable, so jit may close over them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from octavo_core.errors import ConfigError

KVKind = Literal["full", "window", "latent", "state"]


@dataclasses.dataclass(frozen=True)
class KVGroupSpec:
    """Layers whose KV is kept, found and freed together.

    Attributes:
        kind: `full` attention, sliding `window`, MLA `latent`, recurrent `state`.
        layers: Model layer numbers in this group, in order.
        kv_heads, head_dim: Of each K and V row.
        dtype: NumPy name of a stored element.
        block_size: Tokens in a block.
        window: Tokens a `window` group looks back; None otherwise.
    """

    kind: KVKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Sizes of a prefix cache.

    Attributes:
        num_blocks: Blocks of each group's pool, the reserved block 0 included: padding points there and it is never handed out.
        block_size: Tokens in a block.
        max_sequences: Sequences that can hold blocks at once.
        max_blocks: Longest sequence, in blocks.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_sequences: int
    max_blocks: int

    def __post_init__(self) -> None:
        if min(self.num_blocks, default=0) < 2:
            raise ConfigError(f"every KV group needs at least 2 blocks (one is reserved), got {self.num_blocks}")
        if min(self.block_size, self.max_sequences, self.max_blocks) < 1:
            raise ConfigError(f"sizes of a cache are at least 1, got {self}")

    @property
    def groups(self) -> int:
        """Number of KV groups."""
        return len(self.num_blocks)

    @property
    def max_len(self) -> int:
        """Longest sequence, in tokens."""
        return self.max_blocks * self.block_size

    @property
    def usable_blocks(self) -> int:
        """Blocks one sequence could hold if alone, in the scarcest group."""
        return min(self.num_blocks) - 1
