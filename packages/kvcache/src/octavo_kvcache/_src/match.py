"""Finding the longest cached prefix of a prompt, all blocks at once. Reads the tree, leases nothing."""

from __future__ import annotations

from typing import Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt32

from octavo_kvcache._src import index, keys
from octavo_kvcache._src.checks import check_array, check_prompt
from octavo_kvcache._src.scan import first_true, some_set
from octavo_kvcache._src.state import RadixState

_CHILDREN: Final = 64
"""Children compared when the tail of a prompt is looked for: of those that begin with its next token."""


class Match(NamedTuple):
    """A cached prefix.

    Attributes:
        block_ids: Its blocks in order (the same ids in every whole group); 0 pads.
        generations: Of each; with the id, a handle that says when it has gone stale.
        num_blocks: How many.
        chain: Key after its last block.
    """

    block_ids: Int32[Array, " max_blocks"]
    generations: Int32[Array, " max_blocks"]
    num_blocks: Int32[Array, ""]
    chain: UInt32[Array, " 2"]


class Tail(NamedTuple):
    """A block of which only the first tokens are wanted; 0 and 0 where there is none."""

    block_id: Int32[Array, ""]
    length: Int32[Array, ""]


def match(
    radix: RadixState,
    tokens: Int32[Array, " max_len"],
    length: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
    *,
    reach: tuple[int, ...] = (),
) -> Match:
    """The longest cached prefix of `tokens[:length]` in whole blocks.

    A block counts when its tokens, its namespace and its parent are those of the prompt, whatever its key. Where there are side groups
    the prefix ends where each of them has the blocks that the next token looks back to.

    Args:
        radix: The tree.
        tokens: Of the prompt; what stands from `length` on does not matter.
        length: In tokens; negative ones match nothing.
        namespace: Tree to look in.
        reach: Blocks that each side group looks back to, see `Layout`; empty: the tree's own blocks are enough.

    Cost: hashes and compares `max_len` tokens and reads as many from the tree, whatever is found.
    Source: prefix caching by chained block hashes as in vLLM, by a radix tree over tokens as in SGLang; here the chain is an associative
    scan and the look-up one gather, so that depth does not count.
    """
    check_prompt(radix, tokens, namespace)
    check_array("length", length, (), "int32", "one prompt")
    block_size = radix.tokens.shape[1]
    blocks = tokens.reshape(-1, block_size)
    position = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    root = keys.root_key(namespace)
    key = keys.prefix_keys(namespace, keys.fingerprint(blocks))
    bucket, tag = keys.address(key, radix.index_tag.shape[0])
    found = index.probe(radix, bucket, tag, blocks, jnp.broadcast_to(namespace, key.shape))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), found.block[:-1]])
    good = found.same & (radix.parent[found.block] == before) & ((position + 1) * block_size <= length)
    count = first_true(~good)
    count = _end_in_reach(radix, count, found.block, reach) if reach else count
    block = jnp.where(position < count, found.block, 0)
    chain = jnp.where(count > 0, key[jnp.maximum(count - 1, 0)], root)
    return Match(block, jnp.where(block > 0, radix.generation[block], 0), count, chain)


def _end_in_reach(
    radix: RadixState, count: Int32[Array, ""], block: Int32[Array, " max_blocks"], reach: tuple[int, ...]
) -> Int32[Array, ""]:
    """The longest prefix, at most `count` blocks, at whose end every side group has all it looks back to."""
    end = jnp.arange(block.shape[0] + 1, dtype=jnp.int32)
    good = end <= count
    for side, back in zip(radix.sides, reach, strict=True):
        absent = (side.node_block[block] == 0).astype(jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(absent, dtype=jnp.int32)])
        good &= before == before[jnp.maximum(end - back, 0)]
    return jnp.max(jnp.where(good, end, 0))


def match_tail(
    radix: RadixState,
    found: Match,
    tokens: Int32[Array, " max_len"],
    length: Int32[Array, ""],
    namespace: UInt32[Array, " 2"],
) -> Tail:
    """The cached block that goes on from a match with most of the tokens that follow it, if not with all of a block's.

    Its KV is right for those tokens, because KV depends on what comes before only: copied, it saves computing them.

    Cost: one pass over three arrays of the pool.
    """
    check_prompt(radix, tokens, namespace)
    check_array("length", length, (), "int32", "one prompt")
    block_size = radix.tokens.shape[1]
    start = found.num_blocks * block_size
    wanted = jnp.pad(tokens, (0, block_size), constant_values=-1)[start + jnp.arange(block_size, dtype=jnp.int32)]
    last = found.block_ids[jnp.maximum(found.num_blocks - 1, 0)]
    last = jnp.where(found.num_blocks > 0, last, 0)
    child = radix.is_indexed & (radix.parent == last) & (radix.first == keys.first_mark(wanted[0], namespace))
    candidate, count = some_set(child & (start < length), min(_CHILDREN, child.shape[0]))
    differs = (radix.tokens[candidate] != wanted) | (start + np.arange(block_size) >= length)
    differs |= jnp.any(radix.namespace[candidate] != namespace, axis=1)[:, None]
    common = jnp.minimum(first_true(differs), block_size - 1)
    common = jnp.where(jnp.arange(candidate.shape[0]) < count, common, 0)
    best = jnp.argmax(common)
    return Tail(jnp.where(common[best] > 0, candidate[best], 0), common[best])
