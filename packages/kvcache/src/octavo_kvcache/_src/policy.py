"""Eviction policies: what a block's stamp becomes when a lease on its path ends, and in which order stamps go.

A policy owns one int32 per block, the stamp. When a lease ends, every block of its path gets `touch(stamp, use)`. Eviction takes
unleased blocks by `(rank(stamp), -depth)`, smallest first. Blocks must go before their ancestors, or the tree loses the way to
them, and this holds for every policy whose `touch` never lowers a stamp and keeps the order of two stamps, and whose `rank` keeps it too:
a path is touched whole, so an ancestor's stamp is never below its descendant's. Stamps of several parts are ordered part by
part, and combined part by part. `check_policy` tries this.

Time is the cache's clock: leases ended so far.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from octavo_core.errors import ConfigError

LATEST: Final = 1 << 26
"""The clock is set back before it gets here, so that a time fits in 26 bits beside other parts of a stamp."""

_TIME: Final = np.int32(LATEST - 1)
_MOST: Final = 15
"""Largest value of the upper four bits of a stamp."""


class Use(NamedTuple):
    """The end of a lease on a path.

    Attributes:
        clock: Now, from 1 up.
        floor: Stamp of the block evicted last.
        tenant: Whose path it is.
        is_new: The path was extended under this lease.
        path_len: Blocks of the path.
        answer_len: Tokens that were added to the prompt, up to the end of the last block; 0 for a path leased by hand.
    """

    clock: Int32[Array, ""]
    floor: Int32[Array, ""]
    tenant: Int32[Array, ""]
    is_new: Bool[Array, ""]
    path_len: Int32[Array, ""]
    answer_len: Int32[Array, ""]


class Now(NamedTuple):
    """What stamps are compared with: the clock, and the stamp of the block evicted last."""

    clock: Int32[Array, ""]
    floor: Int32[Array, ""]


@runtime_checkable
class EvictionPolicy(Protocol):
    """An order of eviction, in two pure functions. Hashable: jit closes over it."""

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """The stamps of a path after a use of it; at least what they were, in the same order. New blocks have stamp 0."""

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """Place in the order, 0 ≤ rank < 2**bits, smallest evicted first; never decreasing in the stamp."""

    def rewind(self, stamp: Int32[Array, " blocks"], by: int) -> Int32[Array, " blocks"]:
        """The stamps once the clock is set back by `by`, in the same order; those older than that become equally old."""


def _age(time: Int32[Array, " blocks"], clock: Int32[Array, ""], bits: int) -> Int32[Array, " blocks"]:
    """Times as ranks: those too old to be told apart share rank 0."""
    window = (1 << bits) - 1
    return jnp.clip(time - (clock - window), 0, window)


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """The path whose last lease ended longest ago goes first."""

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """Now."""
        return jnp.broadcast_to(use.clock, stamp.shape)

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """By time."""
        return _age(stamp, now.clock, bits)

    def rewind(self, stamp: Int32[Array, " blocks"], by: int) -> Int32[Array, " blocks"]:
        """Earlier; never 0, which is a new block's."""
        return jnp.minimum(stamp, jnp.maximum(stamp - by, 1))


@dataclasses.dataclass(frozen=True)
class FirstInFirstOut(LeastRecentlyUsed):
    """The path that was extended longest ago goes first; using it again does not keep it."""

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """Now, if the path grew."""
        return jnp.where(use.is_new, use.clock, stamp)


@dataclasses.dataclass(frozen=True)
class Packed:
    """Stamps of two parts: a value of 0..15 above a time of 26 bits. Subclasses say what the value is.

    Size of the parts: sign bit left alone, so that stamps are compared as they are.
    """

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """The value's own rule, and now."""
        value = jnp.clip(self.value(stamp >> 26, use), stamp >> 26, _MOST)
        return (value << 26) | use.clock

    def value(self, value: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """What the values of a path become; lower answers than before have no effect."""
        raise NotImplementedError

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """By value, then by time."""
        return ((stamp >> 26) << (bits - 4)) | _age(stamp & _TIME, now.clock, bits - 4)

    def rewind(self, stamp: Int32[Array, " blocks"], by: int) -> Int32[Array, " blocks"]:
        """The same value, an earlier time."""
        time = stamp & _TIME
        return ((stamp >> 26) << 26) | jnp.minimum(time, jnp.maximum(time - by, 1))


@dataclasses.dataclass(frozen=True)
class LeastFrequentlyUsed(Packed):
    """The path with the fewest uses goes first, up to 15 of them; among equals the least recently used.

    A use counts for `lifetime` ticks after the path's last use; without that a once popular path would stay for ever.

    Attributes:
        lifetime: In ends of leases.
    """

    lifetime: int = 1 << 12

    def value(self, value: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """One more."""
        return value + 1

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """By count while it counts, then by time."""
        return _while_fresh(self, stamp, now, bits, self.lifetime)


@dataclasses.dataclass(frozen=True)
class PriorityThenRecency(Packed):
    """Paths of tenants with a lower priority go first; a priority counts for `lifetime` ticks after a path's last use.

    A path keeps the highest priority it was used with.

    Attributes:
        priorities: Of each tenant, 0..15; tenants beyond have 0.
        lifetime: In ends of leases.
    """

    priorities: tuple[int, ...] = (0,)
    lifetime: int = 1 << 12

    def value(self, value: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """The tenant's priority."""
        known = jnp.asarray(np.array((*self.priorities, 0), np.int32))
        return jnp.broadcast_to(known[jnp.clip(use.tenant, 0, len(self.priorities))], value.shape)

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """By priority while it counts, then by time."""
        return _while_fresh(self, stamp, now, bits, self.lifetime)


def _while_fresh(policy: Packed, stamp: Int32[Array, " blocks"], now: Now, bits: int, lifetime: int) -> Int32[Array, " blocks"]:
    """Rank of a packed stamp whose value is 0 once its time is more than `lifetime` ago."""
    fresh = (stamp & _TIME) >= now.clock - lifetime
    return Packed.rank(policy, jnp.where(fresh, stamp, stamp & _TIME), now, bits)


@dataclasses.dataclass(frozen=True)
class TwoLifetimes(LeastRecentlyUsed):
    """What promises to return stays twice as long as the rest, in any pool and at any load.

    A block promises to return when it was in the cache before the sequence that leased it, or when the answer was short: the
    next question of a tool, or to a document. `clock − floor` is how long a block now stays without being used.

    Source: found by replaying traces, see `docs/hit-rate.md`; a second chance as in CLOCK and 2Q, measured in lifetimes.

    Attributes:
        short_answer: Tokens; an answer up to there is short.
    """

    short_answer: int = 64

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """Now, and a lifetime on top for what promises to return."""
        returns = (stamp > 0) | (use.answer_len <= self.short_answer)
        lifetime = jnp.maximum(use.clock - use.floor, 0)
        return jnp.maximum(stamp, use.clock + jnp.where(returns, lifetime, 0))

    def rank(self, stamp: Int32[Array, " blocks"], now: Now, bits: int) -> Int32[Array, " blocks"]:
        """By stamp above the floor; what lies below was spared by a lease and is equally old."""
        return jnp.clip(stamp - now.floor, 0, (1 << bits) - 1)


@dataclasses.dataclass(frozen=True)
class CostAware(TwoLifetimes):
    """Paths that were used again stay longer than their last use alone would keep them, in proportion to what recomputing them costs.

    Greedy-dual: a use sets the stamp to the floor (the stamp of the block evicted last, which rises as blocks go) plus
    the path's worth; what is not used again is overtaken by the floor.

    Source: GreedyDual-Size-Frequency (Cherkasova 1998), with stamps closed upward over a path in place of per-object values.

    Attributes:
        again: Ticks that a path gains for being used without growing, more for longer ones.
    """

    again: int = 256

    def touch(self, stamp: Int32[Array, " ids"], use: Use) -> Int32[Array, " ids"]:
        """Now, or later by the path's worth if all of it was there before."""
        worth = jnp.where(use.is_new, 0, jnp.minimum(self.again + use.path_len, LATEST >> 4))
        return jnp.maximum(stamp, jnp.maximum(use.floor, use.clock) + worth)


def named_policy(name: str) -> EvictionPolicy:
    """The policy that an option names.

    Raises:
        ConfigError: There is none of that name.
    """
    known: dict[str, EvictionPolicy] = {
        "two-lifetimes": TwoLifetimes(),
        "lru": LeastRecentlyUsed(),
        "lfu": LeastFrequentlyUsed(),
        "fifo": FirstInFirstOut(),
        "priority": PriorityThenRecency(),
        "cost": CostAware(),
    }
    if name not in known:
        raise ConfigError(f"an eviction policy is one of {', '.join(known)}, or an object of your own; got {name!r}")
    return known[name]
