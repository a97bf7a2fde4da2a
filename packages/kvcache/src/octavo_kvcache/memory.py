"""What KV memory costs: blocks of a sequence, bytes of a block, slots that are allocated and hold nothing.

Arithmetic on sizes alone. Knows `KVGroupSpec` and no array; an attention backend may pad its layout beyond these bytes.

A slot holds one token's KV of every layer of a group. Waste is *internal*: only the last block of a sequence can be partly empty,
so a sequence wastes `block_size − 1` slots at worst, and `(block_size − 1) / 2` on average when lengths fall anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from octavo_core.errors import ConfigError, nearest_name
from octavo_core.specs import KVGroupSpec

_ELEMENT_BYTES: Final = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SCALE_BYTES: Final = 4
"""One float32."""


def element_bytes(dtype: str) -> int:
    """Bytes of one stored element.

    Raises:
        ConfigError: For a type KV is not stored in.
    """
    if dtype not in _ELEMENT_BYTES:
        raise ConfigError(f"KV is stored as one of {', '.join(_ELEMENT_BYTES)}, got '{dtype}'{nearest_name(dtype, _ELEMENT_BYTES)}")
    return _ELEMENT_BYTES[dtype]


def has_scales(spec: KVGroupSpec) -> bool:
    """Elements are fp8: each row is stored with a scale."""
    return element_bytes(spec.dtype) == 1


def block_rows(spec: KVGroupSpec) -> int:
    """Rows of `head_dim` elements in a block of all layers.

    `full` and `window` keep a K and a V row for each token and KV head; `latent` one row for each token, which every head
    reads; `state` one snapshot for each block, of `kv_heads` rows, whatever the block size.

    Raises:
        ConfigError: For sizes below 1, or a latent group with several heads.
    """
    if min(spec.kv_heads, spec.head_dim, spec.block_size) < 1:
        raise ConfigError(f"kv_heads, head_dim and block_size are at least 1, got {spec}")
    if spec.kind == "latent" and spec.kv_heads != 1:
        raise ConfigError(f"a latent group keeps one row for each token: kv_heads is 1, got {spec.kv_heads}")
    rows = {"full": 2 * spec.block_size, "window": 2 * spec.block_size, "latent": spec.block_size, "state": 1}[spec.kind]
    return len(spec.layers) * spec.kv_heads * rows


def data_bytes(spec: KVGroupSpec) -> int:
    """Bytes of the elements in a block of all layers, without scales."""
    return block_rows(spec) * spec.head_dim * element_bytes(spec.dtype)


def scale_bytes(spec: KVGroupSpec) -> int:
    """Bytes of the scales stored beside a block of all layers: a float32 for each row of an fp8 group, 0 otherwise.

    A row belongs to one token and KV head, and K and V have rows of their own, so a scale does not depend on how a prompt was chunked.

    Raises:
        ConfigError: For a recurrent state in fp8, which has no rows of tokens to scale.
    """
    if not has_scales(spec):
        return 0
    if spec.kind == "state":
        raise ConfigError(f"a recurrent state is not stored as fp8, got '{spec.dtype}'; use float32 or bfloat16")
    return block_rows(spec) * SCALE_BYTES


def block_bytes(spec: KVGroupSpec) -> int:
    """Bytes of one block of a group: all layers, elements and scales."""
    return data_bytes(spec) + scale_bytes(spec)


def token_bytes(spec: KVGroupSpec) -> float:
    """Bytes of a block over its tokens. A state's snapshot is shared by the tokens of its block."""
    return block_bytes(spec) / spec.block_size


def pool_bytes(groups: Iterable[KVGroupSpec], num_blocks: Iterable[int]) -> int:
    """Bytes of the pools of all groups, their reserved block 0 included."""
    return sum(block_bytes(spec) * blocks for spec, blocks in zip(groups, num_blocks, strict=True))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens from the start of a block."""
    return -(-_checked(num_tokens, "num_tokens", least=0) // _checked(block_size, "block_size", least=1))


def sequence_blocks(spec: KVGroupSpec, num_tokens: int, *, chunk_tokens: int = 1) -> int:
    """Most blocks of a group that a sequence of `num_tokens` tokens holds at once.

    `full` and `latent` hold all. `window` and `state` hold what the first token of a step looks back to (`window − 1` tokens; the
    snapshot before it), the block it falls into and the blocks the step adds: window and chunk, in whole blocks. What is out of reach is
    given up as the next step begins.

    Args:
        chunk_tokens: Most tokens of the sequence in one step.

    Raises:
        ConfigError: For a negative length, a chunk below 1 or a window group without a window.
    """
    blocks = blocks_for(num_tokens, spec.block_size)
    if spec.kind in ("full", "latent"):
        return blocks
    back = 1 if spec.kind == "state" else blocks_for(_checked(spec.window or 0, "window", least=1) - 1, spec.block_size)
    return min(blocks, back + 1 + blocks_for(_checked(chunk_tokens, "chunk_tokens", least=1), spec.block_size))


def wasted_slots(lengths: Sequence[int] | np.ndarray, block_size: int) -> int:
    """Slots that sequences of these lengths allocate and do not use, when nothing is shared.

    Args:
        lengths: Tokens stored of each sequence.
    """
    tokens = _lengths(lengths)
    return int(np.sum(-tokens % _checked(block_size, "block_size", least=1)))


def waste(lengths: Sequence[int] | np.ndarray, block_size: int) -> float:
    """The wasted share of the slots that sequences of these lengths allocate, 0 to 1; 0 where nothing is allocated."""
    tokens = _lengths(lengths)
    wasted = wasted_slots(tokens, block_size)
    allocated = int(np.sum(tokens)) + wasted
    return wasted / allocated if allocated else 0.0


def most_wasted_slots(num_sequences: int, block_size: int) -> int:
    """The bound of `wasted_slots`, whatever the lengths: all but one slot of each last block."""
    return _checked(num_sequences, "num_sequences", least=0) * (_checked(block_size, "block_size", least=1) - 1)


def expected_wasted_slots(num_sequences: int, block_size: int) -> float:
    """The mean of `wasted_slots` where lengths are spread evenly over the remainders of `block_size`: half the bound."""
    return most_wasted_slots(num_sequences, block_size) / 2


def _lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    tokens = np.asarray(lengths, np.int64)
    if tokens.size and int(tokens.min()) < 0:
        raise ConfigError(f"lengths are at least 0, got {int(tokens.min())}")
    return tokens


def _checked(value: int, name: str, *, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name} is at least {least}, got {value}")
    return value
