"""Octavo's own cache in the table: the jitted `octavo_kvcache.RadixCache`, driven through its seam as a scheduler drives it.

Unlike the simulated stores it also gives blocks to the answer while a sequence runs, and finds at most all but the last token of a
prompt. The cache knows an answer's length up to the end of its last block, so blocks of 512 tokens say little of it. Needs jax, so it
is imported by its row only.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache
from octavo_kvcache._src.in_place import CPU_OPTIONS
from octavo_tools.hit_rate.trace import Prompt, Trace


class ServedStore:
    """A `PrefixStore` around the cache that serves, one sequence at a time.

    Args:
        num_blocks: Of the pool, the reserved one not counted.
        trace: Whose prompts will come; the longest sets the sizes.
        policy: Name of an eviction policy.
        partial: Reuse parts of blocks.
    """

    def __init__(self, num_blocks: int, trace: Trace, policy: str, *, partial: bool) -> None:
        size = trace.block_size
        longest = max(prompt.prompt_len + prompt.output_len for prompt in trace.prompts)
        self._spec = CacheSpec((num_blocks + 1,), size, 1, min(-(-longest // size), num_blocks))
        cache = RadixCache(self._spec, policy=policy, partial=partial, max_commits=min(256, self._spec.max_blocks), max_events=1)
        self._state: Any = cache.init()
        self._serve = jax.jit(functools.partial(_serve, cache), donate_argnums=0, compiler_options=CPU_OPTIONS)
        self._found = 0

    def match(self, prompt: Prompt) -> int:
        """Tokens found; the sequence runs and ends with it, because admission is what finds them."""
        spec = self._spec
        tokens = np.zeros((1, spec.max_len), np.int32)
        prompt_len = min(prompt.prompt_len, spec.max_len)
        tokens[0, :prompt_len] = prompt.token_ids()[:prompt_len]
        blocks = min(-(-(prompt_len + prompt.output_len) // spec.block_size), spec.max_blocks)
        self._state, found = self._serve(self._state, tokens, np.int32(prompt_len), np.int32(blocks))
        return int(found)

    def insert(self, prompt: Prompt) -> None:
        """Done already."""


def _serve(cache: RadixCache, state: Any, tokens: Any, prompt_len: Any, blocks: Any) -> tuple[Any, Any]:
    one, none = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    space, want = jnp.zeros((1, 2), jnp.uint32), jnp.reshape(blocks, (1, 1))
    state, admitted = cache.admit(state, one, tokens, jnp.reshape(prompt_len, 1), space, none, want, none)
    state, _, _, _ = cache.grow(state, want, one)
    rounds = -(-cache.spec.max_blocks // cache.max_commits)
    state = jax.lax.fori_loop(0, rounds, lambda _, s: cache.commit(s, tokens, jnp.reshape(prompt_len, 1))[0], state)
    state, _ = cache.release(state, jnp.ones(1, bool))
    return state, admitted.cached_len[0]
