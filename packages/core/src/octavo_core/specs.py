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
        window: Tokens a `window` group looks back, the current one included; None otherwise.
        scale: What scores are multiplied by; None: `head_dim ** -0.5`.
        softcap: Scores become `softcap * tanh(scores / softcap)`; None: they stay.
        sinks: Every layer has a score per query head that takes weight and gives nothing.

    A `latent` group stores one vector for each token, which is key and value at once: `kv_heads` is 1.
    """

    kind: KVKind
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.head_dim) ** -0.5 if self.scale is None else self.scale


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Sizes of a prefix cache.

    Attributes:
        num_blocks: Blocks of each group's pool, the reserved block 0 included: padding points there and it is never handed out.
        block_size: Tokens in a block.
        max_sequences: Sequences that can hold blocks at once.
        max_blocks: Longest sequence, in blocks.
        kinds: What each group keeps; every one is `full` where nothing is said.
        windows: Tokens a `window` group looks back, the current one included; 0 for groups of another kind.
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_sequences: int
    max_blocks: int
    kinds: tuple[KVKind, ...] = ()
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", self.kinds or ("full",) * len(self.num_blocks))
        object.__setattr__(self, "windows", self.windows or (0,) * len(self.num_blocks))
        if min(self.num_blocks, default=0) < 2:
            raise ConfigError(f"every KV group needs at least 2 blocks (one is reserved), got {self.num_blocks}")
        if min(self.block_size, self.max_sequences, self.max_blocks) < 1:
            raise ConfigError(f"sizes of a cache are at least 1, got {self}")
        if not len(self.num_blocks) == len(self.kinds) == len(self.windows):
            raise ConfigError(f"num_blocks, kinds and windows have one entry for each KV group, got {self}")
        if any((kind == "window") != (window > 0) for kind, window in zip(self.kinds, self.windows, strict=True)):
            raise ConfigError(f"a window group, and no other, has a window of at least 1 token, got {self}")

    @property
    def groups(self) -> int:
        """Number of KV groups."""
        return len(self.num_blocks)

    @property
    def max_len(self) -> int:
        """Longest sequence, in tokens."""
        return self.max_blocks * self.block_size

    @property
    def whole_groups(self) -> tuple[int, ...]:
        """Groups in which a sequence holds every block from its first on; in the others it holds the last few only."""
        return tuple(g for g, kind in enumerate(self.kinds) if kind in ("full", "latent"))

    @property
    def side_groups(self) -> tuple[int, ...]:
        """The others."""
        return tuple(g for g in range(self.groups) if g not in self.whole_groups)

    @property
    def reaches(self) -> tuple[int, ...]:
        """For each of `side_groups`, blocks before the current one that it looks back to; a recurrent state: to the snapshot it goes on from."""
        return tuple(1 if self.kinds[g] == "state" else -(-(self.windows[g] - 1) // self.block_size) for g in self.side_groups)

    @property
    def usable_blocks(self) -> int:
        """Blocks of tokens one sequence could hold if alone: what the scarcest of the whole groups allows."""
        return min((self.num_blocks[g] - 1 for g in self.whole_groups), default=self.max_blocks)
