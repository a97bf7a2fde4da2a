"""The cache's side of the tiers below the device: blocks that come in, and blocks lent out to be copied, in programs beside the step.

Called by whoever plans, between plans. Knows no bytes and no tier. Where no group keeps every block nothing is lent: blocks out of every
window are evicted first, and copied then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo_core.plan import Loaded
from octavo_core.seams import LoadingCache
from octavo_engine._src.planner import Planner

HIGH: Final = 0.88
"""Share of the pool above which blocks are demoted."""
LOW: Final = 0.8
LENT_AT_ONCE: Final = 16


@dataclasses.dataclass(frozen=True)
class Load:
    """Blocks `first` to `upto` of a prompt that wait on the host; of the `complete` ones the bytes of every group."""

    tokens: Sequence[int]
    first: int
    upto: int
    complete: list[int]
    namespace: bytes
    tenant: int


class Lending:
    """Compiled at start.

    Args:
        planner: Carries the cache.
        cache: With what tiers want of it.
    """

    def __init__(self, planner: Planner, cache: LoadingCache[Any]) -> None:
        spec = planner.spec
        self._max_len, self._max_blocks = spec.max_len, spec.max_blocks
        self._group = min(spec.whole_groups, key=spec.num_blocks.__getitem__, default=None)
        one: Any = np.int32(0)
        flags, space = np.zeros(spec.max_blocks, bool), np.zeros(2, np.uint32)
        self._load = planner.cache_program("load", cache.load, np.zeros(spec.max_len, np.int32), one, one, space, one, flags)
        blocks: Any = np.zeros(spec.max_blocks, np.int32)
        sides: Any = np.zeros((len(spec.side_groups), spec.max_blocks), np.int32)
        like = Loaded(blocks, blocks, one, one, sides, sides, sides > 0)
        self._unload = planner.cache_program("unload", lambda c, loaded: (cache.unload(c, loaded),), like)
        if self._group is None:
            return
        self._usable = spec.num_blocks[self._group] - 1
        self._lend = planner.cache_program(
            f"lend {HIGH} {LOW} {LENT_AT_ONCE}", lambda c: cache.lend(c, high=HIGH, low=LOW, size=LENT_AT_ONCE)
        )
        (self.no_loan,) = self._lend()  # nothing is used yet, so nothing is lent
        stored = np.zeros(LENT_AT_ONCE, bool)
        self._settle = planner.cache_program(
            "settle", lambda c, loan, stored: (cache.settle(c, loan, stored),), self.no_loan, stored
        )

    def load(self, wanted: Load) -> Loaded:
        """Make blocks findable and lease them."""
        tokens = np.zeros(self._max_len, np.int32)
        tokens[: len(wanted.tokens)] = wanted.tokens
        namespace = np.frombuffer(wanted.namespace, np.uint32)
        complete = np.isin(np.arange(self._max_blocks), wanted.complete)
        first, upto, tenant = np.int32(wanted.first), np.int32(wanted.upto), np.int32(wanted.tenant)
        (loaded,) = self._load(tokens, first, upto, namespace, tenant, complete)
        return loaded  # type: ignore[no-any-return]

    def unload(self, loaded: Loaded) -> None:
        """End that lease."""
        self._unload(loaded)

    def is_crowded(self, num_free: Any) -> bool:
        """Whether so few free blocks of each group mean that some are to be demoted. Only groups that keep every block lend."""
        return self._group is not None and self._usable - int(num_free[self._group]) > int(HIGH * self._usable)

    def lend(self) -> Any:
        """Blocks to copy elsewhere, leased."""
        return self._lend()[0]

    def settle(self, loan: Any, stored: list[bool]) -> None:
        """End a loan."""
        self._settle(loan, np.array([*stored, *[False] * (LENT_AT_ONCE - len(stored))], bool))
