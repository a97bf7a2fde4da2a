"""The prefix caches that Octavo's is timed against: designs of other engines, in Python, as fast as those designs allow.

`chains` holds caches that look up one hash per block in a dict, `radix` a token tree, `timing` how a match is timed. The designs are
written anew from what their projects document; no code is theirs.
"""

from octavo_tools.prefix_baselines.chains import (
    HashChain,
    hash_blocks_builtin,
    hash_blocks_numpy,
    hash_blocks_sha256,
    hash_blocks_sha256_pickle,
    hash_blocks_xxh3,
)
from octavo_tools.prefix_baselines.radix import RadixTree, shared_by_loop, shared_by_slice
from octavo_tools.prefix_baselines.timing import PrefixBaseline, baselines, fill, random_prompts, time_all, time_match

__all__ = [
    "HashChain",
    "PrefixBaseline",
    "RadixTree",
    "baselines",
    "fill",
    "hash_blocks_builtin",
    "hash_blocks_numpy",
    "hash_blocks_sha256",
    "hash_blocks_sha256_pickle",
    "hash_blocks_xxh3",
    "random_prompts",
    "shared_by_loop",
    "shared_by_slice",
    "time_all",
    "time_match",
]
