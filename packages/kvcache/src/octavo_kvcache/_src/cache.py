"""`RadixCache`: the operations behind the `PrefixCache` seam, with sizes fixed and arguments checked.

Knows which shapes it was built for. Deliberately does not know what blocks contain, what a scheduler is, or any clock but
its own count of ended leases.
"""

from __future__ import annotations

import functools
from typing import Final

import jax
from jaxtyping import Array, Bool, Int32, UInt32

from octavo_core.errors import ConfigError
from octavo_core.plan import Admitted, CacheEvents, Loaded
from octavo_core.specs import CacheSpec
from octavo_kvcache._src.admit import admit, look_up
from octavo_kvcache._src.checks import check_array, check_like
from octavo_kvcache._src.commit import commit
from octavo_kvcache._src.grow import grow
from octavo_kvcache._src.lease import Loan, settle
from octavo_kvcache._src.load import lend_surplus, load, unload
from octavo_kvcache._src.policy import EvictionPolicy, named_policy
from octavo_kvcache._src.release import release
from octavo_kvcache._src.state import CacheState, empty, layout_of

_TOKENS_PER_STEP: Final = 2048


class RadixCache:
    """A `PrefixCache` over pools of blocks: a prefix tree, evicted leaf first in the order of a policy.

    Size: a method for each operation of the seams, each with its checks.

    In whole groups (full attention, MLA latent) a sequence holds the same number of blocks, with the same ids. In side groups
    (sliding window, recurrent state) it holds the last few, and a prefix is found only as far as they are there. Methods are pure;
    jit them, alone or together, with the cache donated.

    Args:
        spec: Sizes and kinds of the groups.
        policy: Order of eviction: `two-lifetimes`, `lru`, `lfu`, `fifo`, `priority`, `cost`, or an `EvictionPolicy`.
        quotas: Blocks of each tenant that others may not evict; empty: there are no tenants. Tenants share no prefixes.
        partial: Reuse cached blocks of which only the first tokens are wanted, by copying them.
        max_commits: Blocks that one `commit` files at most; enough for 2,048 tokens unless given.
        max_events: Events of each kind kept between two releases; beyond it `CacheEvents.overflow` is set.

    Raises:
        ConfigError: A size below 1, an unknown policy, quotas beyond the pool, or quotas with side groups.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        policy: str | EvictionPolicy = "two-lifetimes",
        quotas: tuple[int, ...] = (),
        partial: bool = True,
        max_commits: int | None = None,
        max_events: int | None = None,
    ) -> None:
        self.spec = spec
        self.quotas = _checked_quotas(spec, quotas)
        self.policy = named_policy(policy) if isinstance(policy, str) else policy
        self.partial = partial and "state" not in spec.kinds
        most = spec.max_sequences * spec.max_blocks
        self.max_commits = min(-(-_TOKENS_PER_STEP // spec.block_size), most) if max_commits is None else max_commits
        self.max_events = 2 * self.max_commits * (1 + len(layout_of(spec).side)) if max_events is None else max_events
        if min(self.max_commits, self.max_events) < 1:
            raise ConfigError(f"max_commits and max_events are at least 1, got {max_commits} and {max_events}")

    def init(self) -> CacheState:
        """The empty cache."""
        return empty(self.spec, self.max_events, len(self.quotas))

    def admit(
        self,
        cache: CacheState,
        sequence: Int32[Array, " arrivals"],
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
        want: Int32[Array, "arrivals groups"],
        reserve: Int32[Array, " groups"],
    ) -> tuple[CacheState, Admitted]:
        """Find the longest cached prefix of each and lease it to `sequence` (−1, or any other index that is none, skips an entry).

        Entries are served in order; what earlier entries of the call still want counts as taken. Refused with `OUT_OF_BLOCKS` are
        also a sequence that holds blocks already and a `want` beyond `max_blocks`. Lengths ≤ 1 match nothing. Tenants beyond the last
        count as the last.
        """
        arrivals, spec = (*getattr(sequence, "shape", ()), 1)[0], self.spec
        self._check_state(cache)
        self._check("sequence", sequence, (arrivals,))
        self._check("tokens", tokens, (arrivals, spec.max_len))
        self._check("lengths", lengths, (arrivals,))
        self._check("namespace", namespace, (arrivals, 2), "uint32")
        self._check("tenant", tenant, (arrivals,))
        self._check("want", want, (arrivals, spec.groups))
        self._check("reserve", reserve, (spec.groups,))
        given = (sequence, tokens, lengths, namespace, tenant, want, reserve)
        return admit(spec, cache, *given, quotas=self.quotas, step_blocks=self.max_commits, partial=self.partial)

    def match(
        self,
        cache: CacheState,
        tokens: Int32[Array, "arrivals max_len"],
        lengths: Int32[Array, " arrivals"],
        namespace: UInt32[Array, "arrivals 2"],
        tenant: Int32[Array, " arrivals"],
    ) -> Int32[Array, " arrivals"]:
        """Leading tokens of each that `admit` would find now, without leasing them; `octavo_core.seams.MatchingCache`."""
        arrivals, spec = (*getattr(tokens, "shape", ()), 1)[0], self.spec
        self._check_state(cache)
        self._check("tokens", tokens, (arrivals, spec.max_len))
        self._check("lengths", lengths, (arrivals,))
        self._check("namespace", namespace, (arrivals, 2), "uint32")
        self._check("tenant", tenant, (arrivals,))
        return look_up(spec, cache, tokens, lengths, namespace, tenant, quotas=self.quotas, partial=self.partial)

    def grow(
        self, cache: CacheState, need: Int32[Array, "sequences groups"], rank: Int32[Array, " sequences"]
    ) -> tuple[
        CacheState,
        Int32[Array, "groups sequences max_blocks"],
        Int32[Array, "groups sequences 2"],
        Int32[Array, " sequences"],
    ]:
        """Let each sequence hold `need` blocks, evicting cached blocks in the policy's order when the free list is short.

        Groups grow together, to the largest need among them. Equal ranks are served by index. A need beyond `max_blocks` is refused.
        Copies: the cached block of a tail found at admission, and in groups of recurrent state the state before each first new block.
        """
        self._check_state(cache)
        self._check("need", need, (self.spec.max_sequences, self.spec.groups))
        self._check("rank", rank, (self.spec.max_sequences,))
        cache, copies, status = grow(self.spec, cache, need, rank, policy=self.policy, quotas=self.quotas)
        return cache, self._tables(cache), copies, status

    def commit(
        self, cache: CacheState, tokens: Int32[Array, "sequences max_len"], upto: Int32[Array, " sequences"]
    ) -> tuple[CacheState, Int32[Array, "groups sequences max_blocks"]]:
        """Make the full blocks below `upto` tokens findable, at most `max_commits` of them in this call, low sequences first.

        Only blocks the sequence holds are committed. Where an equal prefix is cached already, the sequence's own block is
        freed and its table points at the cached one.
        """
        self._check_state(cache)
        self._check("tokens", tokens, (self.spec.max_sequences, self.spec.max_len))
        self._check("upto", upto, (self.spec.max_sequences,))
        cache = commit(layout_of(self.spec), cache, tokens, upto, self.max_commits)
        return cache, self._tables(cache)

    def release(self, cache: CacheState, done: Bool[Array, " sequences"]) -> tuple[CacheState, CacheEvents]:
        """End the leases of these sequences; committed blocks stay cached, the rest become free. Drains the events."""
        self._check_state(cache)
        self._check("done", done, (self.spec.max_sequences,), "bool")
        return release(self.spec, cache, done, policy=self.policy)

    def load(
        self,
        cache: CacheState,
        tokens: Int32[Array, " max_len"],
        first: Int32[Array, ""],
        upto: Int32[Array, ""],
        namespace: UInt32[Array, " 2"],
        tenant: Int32[Array, ""],
        complete: Bool[Array, " max_blocks"],
    ) -> tuple[CacheState, Loaded]:
        """Make blocks of a prompt findable that come from outside, and lease them; `octavo_core.seams.LoadingCache`."""
        self._check_state(cache)
        self._check("tokens", tokens, (self.spec.max_len,))
        self._check("complete", complete, (self.spec.max_blocks,), "bool")
        given = (tokens, first, upto, namespace, tenant, complete)
        radix, loaded = load(self.spec, cache.radix, *given, policy=self.policy, quotas=self.quotas)
        return cache._replace(radix=radix), loaded

    def unload(self, cache: CacheState, loaded: Loaded) -> CacheState:
        """End that lease."""
        return cache._replace(radix=unload(cache.radix, loaded, policy=self.policy))

    def lend(self, cache: CacheState, *, high: float, low: float, size: int) -> tuple[CacheState, Loan]:
        """Where more than the share `high` is in use, lend at most `size` blocks of what is above `low`, those evicted next."""
        radix, loan = lend_surplus(self.spec, cache.radix, high=high, low=low, size=size, policy=self.policy)
        return cache._replace(radix=radix), loan

    def settle(self, cache: CacheState, loan: Loan, stored: Bool[Array, " size"]) -> CacheState:
        """End a loan; what was stored and nobody uses is free."""
        return cache._replace(radix=settle(cache.radix, loan, stored)[0])

    def _tables(self, cache: CacheState) -> Int32[Array, "groups sequences max_blocks"]:
        return cache.sequences.block_table[layout_of(self.spec).offset :]

    @functools.cached_property
    def _shapes(self) -> CacheState:
        return jax.eval_shape(self.init)

    def _check_state(self, cache: CacheState) -> None:
        check_like("cache", cache, self._shapes, f"a state from `init` of this cache, see its spec {self.spec}")

    def _check(self, name: str, array: Array, shape: tuple[int, ...], dtype: str = "int32") -> None:
        check_array(name, array, shape, dtype, f"this cache, see its spec {self.spec}")


def _checked_quotas(spec: CacheSpec, quotas: tuple[int, ...]) -> tuple[int, ...]:
    if any(quotas) and len(spec.whole_groups) < spec.groups:
        raise ConfigError(f"quotas are kept in groups that keep every block only, got quotas {quotas} and groups {spec.kinds}")
    if min(quotas, default=0) < 0 or sum(quotas) > spec.usable_blocks:
        raise ConfigError(f"quotas are at least 0 and together at most the {spec.usable_blocks} blocks there are, got {quotas}")
    return quotas or (0,)
