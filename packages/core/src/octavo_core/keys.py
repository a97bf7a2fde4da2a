"""Names of KV blocks outside the process, and the namespaces that keep tenants apart.

Inside the jitted cache blocks have 64-bit keys that are always verified against tokens. What leaves the process (events, tiers,
a gateway) uses the SHA-256 chain here, where a collision cannot be constructed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

TIER_FORMAT = 1
"""Version of what blocks outside the device consist of; part of every key under which one leaves."""

NAMESPACE_BYTES = 8
"""Bytes of a namespace: two uint32 lanes in the jitted cache."""


def namespace_of(tenant: str = "", cache_salt: str = "", adapter: str = "") -> bytes:
    """The root under which a request's prefixes are cached.

    Args:
        tenant: Name derived from the API key; empty where there are no keys.
        cache_salt: The request's own salt; empty for none.
        adapter: Name of a weight adapter; empty for the base model.

    Returns:
        `NAMESPACE_BYTES` bytes; equal only for equal arguments, up to a 64-bit collision.
    """
    parts = [p.encode() for p in (tenant, cache_salt, adapter)]
    framed = b"".join(struct.pack("<I", len(p)) + p for p in parts)
    return hashlib.sha256(b"octavo-namespace" + framed).digest()[:NAMESPACE_BYTES]


def block_keys(tokens: Sequence[int], namespace: bytes, block_size: int, *, parent: bytes | None = None) -> list[bytes]:
    """The 32-byte key of every full block of a token sequence; each names the block and all before it.

    Args:
        tokens: Token ids from the start of the sequence, or from the end of the block `parent` names.
        namespace: What `namespace_of` answered.
        block_size: Tokens in a block.
        parent: Key of the block before `tokens`, to continue a chain without its tokens.
    """
    parent = hashlib.sha256(namespace).digest() if parent is None else parent
    keys = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = struct.pack(f"<{block_size}i", *tokens[start : start + block_size])
        parent = hashlib.sha256(parent + block).digest()
        keys.append(parent)
    return keys


def partial_key(key: bytes) -> bytes:
    """Name of a block outside the device when only the groups that keep every block have KV of it; `key` names it with that of all groups.

    A reader that needs all of a block looks under `key` alone, so that it cannot take a part for the whole.
    """
    return hashlib.sha256(b"octavo-partial" + key).digest()


def tier_root(namespace: bytes, **facts: str | int) -> bytes:
    """Where the key chain of a namespace begins in tiers below the device: hand it to `block_keys` as `parent`.

    Args:
        namespace: What `namespace_of` answered: tenant, salt and adapter.
        facts: All else that changes the bytes of a block: digest of model and weights, layout, types, ranks, block size.

    Equal in every process and on every machine for equal arguments, whatever their order.
    """
    told = {"format": TIER_FORMAT, **facts}
    parts = [namespace, *(f"{name}={told[name]!r}".encode() for name in sorted(told))]
    return hashlib.sha256(b"octavo-tier" + b"".join(struct.pack("<I", len(p)) + p for p in parts)).digest()
