"""What tiers below host memory offer to the store that puts them together. Types only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from octavo_core.tiers import Answer, Capacity
from octavo_offload._src.counters import Counters


@runtime_checkable
class LowerTier(Protocol):
    """What a tier below host memory offers beside the seam: single blocks, and calls back instead of tickets."""

    name: str
    told: str
    state: Any
    count: Counters

    @property
    def is_busy(self) -> bool:
        """More writes would soon be dropped."""

    def has(self, key: bytes) -> bool:
        """Whether a block can be found, or will be soon."""

    def find(self, keys: Sequence[bytes]) -> int:
        """How many leading keys could be found now."""

    def write(self, key: bytes, data: memoryview, seal: int, done: Callable[[Answer], None]) -> None:
        """Store a block, given its checksum. The buffer must not change until `done` hears."""

    def read(self, key: bytes, into: memoryview, done: Callable[[Answer, int], None], *, urgent: bool = True) -> None:
        """Read a block and verify it; `done` hears the answer and the checksum."""

    def capacity(self) -> Capacity:
        """How full it is."""

    def close(self) -> None:
        """End it."""


@runtime_checkable
class Lane(Protocol):
    """Work that is under way and can be waited for."""

    def __len__(self) -> int:
        """How much waits or runs."""

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing does."""
