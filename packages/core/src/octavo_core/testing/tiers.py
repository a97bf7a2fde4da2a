"""Conformance of a `Tier`: every promise of the seam's docstrings, tried through its methods alone; and the smallest legal tier.

`check_tier(make)` runs all of it and raises `AssertionError` naming the promise that was broken. A tier need not keep anything: one that
always misses conforms. What it does answer as a hit is compared with what was put.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from octavo_core.testing.patience import PATIENCE_S
from octavo_core.tiers import Answer, Capacity, Done, Tier

BLOCK_BYTES = 4096 + 512
"""Of the blocks of the suite."""


def check_tier(make: Callable[[], Tier], *, steps: int = 60, seed: int = 0) -> None:
    """Try every promise of `Tier`.

    Args:
        make: Builds an empty tier for blocks of `BLOCK_BYTES`.
        steps: Calls of the random history.
        seed: Of it.

    Raises:
        AssertionError: A promise is broken; the message says which.
    """
    for check in (_check_empty, _check_round_trip, _check_sizes):
        check(make())
    _check_random_history(make(), steps, random.Random(seed))


def key_of(number: int) -> bytes:
    """A key."""
    return number.to_bytes(32, "little")


def block_of(number: int, size: int = BLOCK_BYTES) -> bytes:
    """The bytes the suite puts under `key_of(number)`, unlike those of any other."""
    return random.Random(number).randbytes(size)


def wait_for(tier: Tier, tickets: Sequence[int]) -> dict[int, tuple[Answer, ...]]:
    """Poll until these tickets are answered."""
    answers: dict[int, tuple[Answer, ...]] = {}
    end = time.monotonic() + PATIENCE_S
    while not set(tickets) <= set(answers):
        for done in tier.poll():
            _expect(done.ticket not in answers, "a ticket is answered once")
            answers[done.ticket] = done.answers
        _expect(time.monotonic() < end, f"every ticket is answered; after {PATIENCE_S:.0f} s some of {tickets} are not")
        time.sleep(0.001)
    return answers


def put(tier: Tier, numbers: Sequence[int]) -> tuple[Answer, ...]:
    """Put blocks and wait."""
    ticket = tier.put([key_of(n) for n in numbers], [memoryview(block_of(n)) for n in numbers])
    return wait_for(tier, [ticket])[ticket]


def get(tier: Tier, numbers: Sequence[int]) -> tuple[Answer, ...]:
    """Get blocks, wait, and compare every hit with what was put."""
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in numbers]
    ticket = tier.get([key_of(n) for n in numbers], into)
    answers = wait_for(tier, [ticket])[ticket]
    _expect(len(answers) == len(numbers), "one answer for each key")
    for n, answer, data in zip(numbers, answers, into, strict=True):
        _expect(answer in (Answer.MISS, Answer.HIT_VERIFIED), f"answers are MISS or HIT_VERIFIED, not {answer}")
        _expect(answer is Answer.MISS or bytes(data) == block_of(n), f"a hit gives the bytes that were put under key {n}")
    return answers


def _check_empty(tier: Tier) -> None:
    _expect(isinstance(tier, Tier), "a tier has the methods of the seam")
    _expect(tier.find([key_of(1)]) == 0, "an empty tier finds nothing")
    _expect(get(tier, [1, 2]) == (Answer.MISS, Answer.MISS), "an empty tier misses")
    _expect(put(tier, []) == () and get(tier, []) == (), "calls without keys are answered too")
    _expect(tier.capacity().num_blocks == 0, "an empty tier holds nothing")


def _check_round_trip(tier: Tier) -> None:
    kept = put(tier, [1, 2, 3])
    _expect(get(tier, [1, 2, 3, 4]) == (*kept, Answer.MISS), "what was stored and not evicted is found, and nothing else")
    _expect(tier.find([key_of(n) for n in (1, 2, 3, 4)]) <= 3, "what was never put is not found")
    _expect(put(tier, [1]) >= kept[:1], "what can be found already need not be stored again")
    _expect(tier.capacity().used_bytes <= max(tier.capacity().total_bytes, 1), "no more is used than there is")


def _check_sizes(tier: Tier) -> None:
    short = memoryview(bytearray(16))
    tickets = [tier.put([key_of(9)], [short]), tier.get([key_of(9)], [short])]
    _expect(set(wait_for(tier, tickets).values()) == {(Answer.MISS,)}, "a block of another size is a miss")


def _check_random_history(tier: Tier, steps: int, rng: random.Random) -> None:
    ever: set[int] = set()
    for _ in range(steps):
        numbers = rng.sample(range(24), rng.randint(1, 4))
        if rng.random() < 0.5:
            ever |= set(numbers)
            put(tier, numbers)
        else:
            answers = get(tier, numbers)
            found = {n for n, answer in zip(numbers, answers, strict=True) if answer is Answer.HIT_VERIFIED}
            _expect(found <= ever, "only what was put is found")


def _expect(promise: bool, what: str) -> None:
    if not promise:
        raise AssertionError(f"Tier promise broken: {what}")


class SmallTier:
    """The smallest `Tier` that keeps anything: a dictionary, without bound, done before the call returns."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: dict[bytes, bytes] = {}
        self._done: list[Done] = []
        self._next = 0

    def _answer(self, answers: list[Answer]) -> int:
        self._next += 1
        self._done.append(Done(self._next, tuple(answers)))
        return self._next

    def put(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        """Keep copies."""
        fits = [len(block) == self._block_bytes for block in blocks]
        self._blocks |= {k: bytes(b) for k, b, ok in zip(keys, blocks, fits, strict=True) if ok}
        return self._answer([Answer(ok) for ok in fits])

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        """Copy back."""
        answers = []
        for key, view in zip(keys, into, strict=True):
            block = self._blocks.get(key) if len(view) == self._block_bytes else None
            if block is not None:
                view[:] = block
            answers.append(Answer(block is not None))
        return self._answer(answers)

    def poll(self) -> list[Done]:
        """All that was asked since."""
        done, self._done = self._done, []
        return done

    def find(self, keys: Sequence[bytes]) -> int:
        """Exact."""
        return next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))

    def capacity(self) -> Capacity:
        """Without bound."""
        used = len(self._blocks) * self._block_bytes
        return Capacity(used, used, len(self._blocks))
