"""Block caches by chained hash: one hash per block over its parent's hash and its tokens, one dict from hash to block id.

Knows how tokens become hashes and which block goes next. Verifies no tokens: equal hashes are taken for equal prefixes. The hashes of
a prompt are all computed before the first lookup, as engines of this design do, once per request; so an early miss costs
as much as a full hit.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import xxhash

BlockHasher = Callable[[Sequence[int], int, Hashable], Sequence[Hashable]]
"""From tokens, block size and what else decides identity (adapter, salt) to one chained hash per full block."""

_ROOT = bytes(32)


class HashChain:
    """A dict from chained block hash to block id; least recently used blocks go first, of one path the deepest.

    Args:
        block_size: In tokens.
        hasher: How blocks are hashed.
        extra_keys: What else decides identity, equal for all prompts of this cache.

    Source: the design of vLLM's automatic prefix caching. Its free queue is the order of the dict here; reference counts and
    block objects are left out, which can only make this faster.
    """

    def __init__(self, block_size: int, hasher: BlockHasher, extra_keys: Hashable = None) -> None:
        self.block_size = block_size
        self._hasher = hasher
        self._extra_keys = extra_keys
        self._blocks: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Ids of the leading full blocks that are held. Changes nothing."""
        find, found = self._blocks.get, []
        for key in self._hasher(tokens, self.block_size, self._extra_keys):
            block = find(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, tokens: Sequence[int], block_ids: Sequence[int]) -> int:
        """File the full blocks of a prompt, one id each; answers how many leading ones were held already and kept their ids."""
        keys = self._hasher(tokens, self.block_size, self._extra_keys)
        if len(block_ids) != len(keys):
            raise ValueError(f"wanted {len(keys)} block ids, one for each full block, got {len(block_ids)}")
        held = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key, block in zip(reversed(keys), reversed(block_ids), strict=True):
            self._blocks.setdefault(key, block)
            self._blocks.move_to_end(key)
        return held

    def evict(self, count: int) -> list[int]:
        """Drop `count` blocks, or all if there are fewer; answers their ids."""
        return [self._blocks.popitem(last=False)[1] for _ in range(min(count, len(self._blocks)))]


def hash_blocks_sha256(tokens: Sequence[int], block_size: int, extra_keys: Hashable = None) -> list[bytes]:
    """SHA-256 over the parent's digest and the tokens as packed int32, one call per block; extra keys enter at the root."""
    packed, step, sha256 = _packed(tokens, block_size), 4 * block_size, hashlib.sha256
    parent = _ROOT if extra_keys is None else sha256(repr(extra_keys).encode()).digest()
    return [parent := sha256(parent + packed[at : at + step]).digest() for at in range(0, len(packed), step)]


def hash_blocks_sha256_pickle(tokens: Sequence[int], block_size: int, extra_keys: Hashable = None) -> list[bytes]:
    """SHA-256 over the pickle of (parent's digest, tuple of tokens, extra keys): vLLM's default encoding."""
    parent, sha256, dumps = _ROOT, hashlib.sha256, pickle.dumps
    return [
        parent := sha256(dumps((parent, tuple(tokens[at : at + block_size]), extra_keys), pickle.HIGHEST_PROTOCOL)).digest()
        for at in range(0, len(tokens) - block_size + 1, block_size)
    ]


def hash_blocks_builtin(tokens: Sequence[int], block_size: int, extra_keys: Hashable = None) -> list[int]:
    """Python's own hash of (parent, tuple of tokens). Easily collided on purpose, so no cache between tenants may use it."""
    parent = hash(extra_keys)
    ends = range(0, len(tokens) - block_size + 1, block_size)
    return [parent := hash((parent, tuple(tokens[at : at + block_size]))) for at in ends]


def hash_blocks_xxh3(tokens: Sequence[int], block_size: int, extra_keys: Hashable = None) -> list[int]:
    """XXH3 of 64 bits over the tokens as packed int32, seeded with the parent. Not collision resistant either."""
    packed, step, xxh3 = _packed(tokens, block_size), 4 * block_size, xxhash.xxh3_64_intdigest
    parent = xxh3(repr(extra_keys).encode())
    return [parent := xxh3(packed[at : at + step], parent) for at in range(0, len(packed), step)]


def hash_blocks_numpy(tokens: Sequence[int], block_size: int, extra_keys: Hashable = None) -> list[int]:
    """A polynomial chain of 64 bits for all blocks at once: h_i = a^i (salt + sum over j <= i of f_j a^-j), f_j a block's fingerprint."""
    packed = np.frombuffer(_packed(tokens, block_size), np.int32).reshape(-1, block_size)
    weights, powers, inverses = _tables(block_size, len(packed))
    mixed = (packed.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    salt = np.uint64(hash(extra_keys) & 0xFFFFFFFF)
    chain: list[int] = ((np.cumsum(mixed * inverses) + salt) * powers).tolist()
    return chain


def _packed(tokens: Sequence[int], block_size: int) -> memoryview:
    """The tokens of full blocks as int32."""
    full = len(tokens) // block_size * block_size
    return memoryview(struct.pack(f"{full}i", *(tokens if full == len(tokens) else tokens[:full])))


_TABLES: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}


def _tables(block_size: int, blocks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Odd weights of a block's tokens, powers of the base and of its inverse; made once and grown by doubling."""
    if block_size not in _TABLES or len(_TABLES[block_size][1]) < blocks:
        size = max(1024, 1 << blocks.bit_length())
        weights = np.random.default_rng(block_size).integers(0, 1 << 63, block_size).astype(np.uint64) * np.uint64(2) + np.uint64(1)
        base, modulus = 0x9E3779B97F4A7C15, 1 << 64
        rows = [[pow(root, i, modulus) for i in range(size)] for root in (base, pow(base, -1, modulus))]
        _TABLES[block_size] = (weights, *(np.array(row, np.uint64) for row in rows))  # type: ignore[assignment]
    weights, powers, inverses = _TABLES[block_size]
    return weights, powers[:blocks], inverses[:blocks]
