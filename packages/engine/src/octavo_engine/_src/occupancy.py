"""How many KV slots of running sequences hold nothing: the live side of `octavo_kvcache.memory`, from the plans alone."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from octavo_core.plan import StepPlan


class Occupancy:
    """Tokens in the blocks of each sequence, as the newest plan left them.

    Args:
        num_sequences: Indices there are.
        block_size: Tokens in a block.
    """

    def __init__(self, num_sequences: int, block_size: int) -> None:
        self._tokens = np.zeros(num_sequences, np.int64)
        self._block_size = block_size

    def follow(self, plan: StepPlan, leaving: Many[int]) -> None:
        """Take in a plan, in which the sequences `leaving` gave their blocks back."""
        rows = int(plan.num_rows)
        self._tokens[plan.sequence[:rows]] = plan.context_len[:rows]
        self._tokens[list(leaving)] = 0
        if int(plan.preempted) >= 0:
            self._tokens[int(plan.preempted)] = 0

    def read(self) -> tuple[int, float]:
        """Wasted slots, and their share of the slots that running sequences hold, 0 to 1."""
        tokens = self._tokens.copy()
        wasted = int(np.sum(-tokens % self._block_size))
        held = int(np.sum(tokens)) + wasted
        return wasted, wasted / held if held else 0.0
