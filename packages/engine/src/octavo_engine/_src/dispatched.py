"""A step that was given to the device, and what it gives when it has run. Knows arrays; knows no program."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from octavo_core.plan import Sampled, StepPlan
from octavo_engine._src.sizing import Bucket


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a step gives.

    Attributes:
        stream: Of the last layer, for prompt scores.
        sampled: None when no row samples.
        started_s: When its first program was started.
        ended_s: When the device was done; None where that is known only by waiting for the arrays.
    """

    stream: Any
    sampled: Sampled | None
    started_s: float
    ended_s: float | None


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step on its way: what was asked, and what will hold the answer.

    Attributes:
        ending: Rows that sample, in the order of `Ran.sampled`; the rest of it is padding.
    """

    plan: StepPlan
    bucket: Bucket
    ending: list[int]
    ran: concurrent.futures.Future[Ran]

    def wait(self) -> tuple[list[int], Ran]:
        """Sampled ids of the rows in `ending`, in that order, and the rest; blocks until they are there.

        Raises:
            Exception: What went wrong in this step or in one before it.
        """
        ran = self.ran.result()
        if ran.sampled is None:
            jax.block_until_ready(ran.stream)
            ids = []
        else:
            ids = np.asarray(ran.sampled.token_ids)[: len(self.ending)].tolist()
        return ids, ran if ran.ended_s is not None else dataclasses.replace(ran, ended_s=time.monotonic())
