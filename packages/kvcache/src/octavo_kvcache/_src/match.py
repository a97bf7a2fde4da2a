"""Finding the longest cached prefix of a prompt, all blocks at once. Reads the cache, leases nothing."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt32

from octavo_kvcache._src import index, keys
from octavo_kvcache._src.state import CacheState


class Match(NamedTuple):
    """A cached prefix.

    Attributes:
        block_ids: Its blocks in order (the same ids in every KV group); 0 pads.
        num_blocks: How many.
        chain: Key after its last block.
    """

    block_ids: Int32[Array, " max_blocks"]
    num_blocks: Int32[Array, ""]
    chain: UInt32[Array, " 2"]


def match(cache: CacheState, tokens: Int32[Array, " max_len"], length: Int32[Array, ""], namespace: UInt32[Array, " 2"]) -> Match:
    """The longest cached prefix of `tokens[:length]` in whole blocks.

    A block counts when its tokens, its namespace and its parent are those of the prompt, whatever its key.
    """
    block_size = cache.tokens.shape[1]
    blocks = tokens.reshape(-1, block_size)
    position = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    root = keys.root_key(namespace)
    key = keys.chain(jnp.zeros_like(position), jnp.broadcast_to(root, (blocks.shape[0], 2)), keys.fingerprint(blocks))
    bucket, tag = keys.address(key, cache.index_tag.shape[0])
    found = index.probe(cache, bucket, tag, blocks, jnp.broadcast_to(namespace, key.shape))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), found.block[:-1]])
    good = found.same & (cache.parent[found.block] == before) & ((position + 1) * block_size <= length)
    count = jnp.where(jnp.all(good), blocks.shape[0], jnp.argmin(good)).astype(jnp.int32)
    chain = jnp.where(count > 0, key[jnp.maximum(count - 1, 0)], root)
    return Match(jnp.where(position < count, found.block, 0), count, chain)
