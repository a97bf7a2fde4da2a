"""Which block goes next: the least recently used, or what ARC says.

Books only: keys and slots, no bytes. Not safe for threads; whoever has the tier's lock calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Literal, Protocol, runtime_checkable

Policy = Literal["lru", "arc"]


@runtime_checkable
class Order(Protocol):
    """Published blocks in the order in which they go."""

    def get(self, key: bytes) -> int | None:
        """The slot of a block; no use of it."""

    def touch(self, key: bytes) -> None:
        """A block that is here was used."""

    def add(self, key: bytes, slot: int) -> None:
        """A block is here from now on."""

    def remove(self, key: bytes) -> int | None:
        """A block is no longer to be found; its slot."""

    def evict(self, wanted: bytes | None, may_go: Callable[[int], bool]) -> tuple[bytes, int] | None:
        """Take out the block that makes room for `wanted` (None: for bytes without a name), of those whose slot may go."""

    def __len__(self) -> int:
        """Blocks that are here."""


class Lru:
    """The least recently used block goes first."""

    def __init__(self) -> None:
        self._slots: OrderedDict[bytes, int] = OrderedDict()

    def get(self, key: bytes) -> int | None:
        """See `Order`."""
        return self._slots.get(key)

    def touch(self, key: bytes) -> None:
        """See `Order`."""
        self._slots.move_to_end(key)

    def add(self, key: bytes, slot: int) -> None:
        """See `Order`."""
        self._slots[key] = slot

    def remove(self, key: bytes) -> int | None:
        """See `Order`."""
        return self._slots.pop(key, None)

    def evict(self, wanted: bytes | None, may_go: Callable[[int], bool]) -> tuple[bytes, int] | None:
        """See `Order`."""
        victim = next((key for key, slot in self._slots.items() if may_go(slot)), None)
        return None if victim is None else (victim, self._slots.pop(victim))

    def __len__(self) -> int:
        """See `Order`."""
        return len(self._slots)


class Arc:
    """Blocks used once and blocks used again in two queues, whose shares follow which of them was cut too short.

    A scan of blocks that are used once cannot push out those used again. Source: Megiddo and Modha, "ARC: A self-tuning, low overhead
    replacement cache", FAST 2003, figure 4; here a block that may not go is passed over.

    Args:
        capacity: Blocks there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._once, self._again = OrderedDict[bytes, int](), OrderedDict[bytes, int]()
        self._gone_once, self._gone_again = OrderedDict[bytes, None](), OrderedDict[bytes, None]()
        self.target = 0.0

    def get(self, key: bytes) -> int | None:
        """See `Order`."""
        slot = self._once.get(key)
        return self._again.get(key) if slot is None else slot

    def touch(self, key: bytes) -> None:
        """See `Order`."""
        slot = self._once.pop(key, None)
        if slot is not None:
            self._again[key] = slot
        self._again.move_to_end(key)

    def add(self, key: bytes, slot: int) -> None:
        """See `Order`."""
        was_here = key in self._gone_once or key in self._gone_again
        self._gone_once.pop(key, None)
        self._gone_again.pop(key, None)
        (self._again if was_here else self._once)[key] = slot

    def remove(self, key: bytes) -> int | None:
        """See `Order`."""
        slot = self._once.pop(key, None)
        return self._again.pop(key, None) if slot is None else slot

    def evict(self, wanted: bytes | None, may_go: Callable[[int], bool]) -> tuple[bytes, int] | None:
        """See `Order`."""
        self._learn(wanted)
        in_second = wanted in self._gone_again
        is_new = wanted not in self._gone_once and not in_second
        remember = True
        if is_new and len(self._once) + len(self._gone_once) >= self._capacity:
            remember = bool(self._gone_once)
            if remember:
                self._gone_once.popitem(last=False)
        elif is_new and len(self) + len(self._gone_once) + len(self._gone_again) >= 2 * self._capacity and self._gone_again:
            self._gone_again.popitem(last=False)
        first = not remember or (
            bool(self._once) and (len(self._once) > self.target or (in_second and len(self._once) == self.target))
        )
        queues = ((self._once, self._gone_once), (self._again, self._gone_again))
        for queue, gone in queues if first else queues[::-1]:
            victim = next((key for key, slot in queue.items() if may_go(slot)), None)
            if victim is not None:
                if remember:
                    gone[victim] = None
                return victim, queue.pop(victim)
        return None

    def _learn(self, wanted: bytes | None) -> None:
        """A block that went too early is wanted: its queue gets more room."""
        once, again = len(self._gone_once), len(self._gone_again)
        if wanted in self._gone_once:
            self.target = min(self._capacity, self.target + max(1.0, again / once))
        elif wanted in self._gone_again:
            self.target = max(0.0, self.target - max(1.0, once / again))

    def __len__(self) -> int:
        """See `Order`."""
        return len(self._once) + len(self._again)


POLICIES: Final[tuple[Policy, ...]] = ("lru", "arc")


def order_of(policy: Policy, capacity: int) -> Order:
    """An empty order."""
    return Arc(capacity) if policy == "arc" else Lru()
