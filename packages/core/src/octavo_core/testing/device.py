"""A device without a model: streams, what they must become, and paged memory that notices wrong blocks.

No attention is computed. The memory keeps, addressed exactly as a plan says, each token with a digest of the tokens before it, and
the next token is derived from the digest. A block that is stale, unwritten, handed out twice or shared between different prefixes
changes the tokens, so that comparing with `expected_tokens` finds it. Knows plans; knows neither scheduler nor cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from octavo_core.plan import StepPlan
from octavo_core.specs import CacheSpec

_FACTOR: Final = np.uint64(6364136223846793005)
_WEIGHT: Final = np.uint64(1442695040888963407)
_ROOT: Final = np.uint64(88172645463325252)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One sequence of a workload.

    Attributes:
        prompt: Token ids.
        limit_len: Most tokens of prompt and answer together.
        arrives_at: Step before which it reaches the host.
        stops_at: Length at which the host ends it, as a stop token would; None: at the limit.
        aborts_at: Step before which the host ends it, wherever it is.
    """

    prompt: tuple[int, ...]
    limit_len: int
    arrives_at: int = 0
    stops_at: int | None = None
    aborts_at: int | None = None
    priority: int = 0
    namespace: tuple[int, int] = (0, 0)
    use_prefix: bool = True

    @property
    def end_len(self) -> int:
        """Tokens it has when it ends unaborted."""
        return min(self.limit_len, self.stops_at or self.limit_len)


def expected_tokens(stream: Stream, vocab_size: int) -> list[int]:
    """Prompt and answer of a stream computed alone, without paging."""
    digest = _ROOT
    tokens = list(stream.prompt)
    for token in tokens:
        digest = _digest(digest, token)
    while len(tokens) < stream.end_len:
        tokens.append(_next_token(digest, vocab_size))
        digest = _digest(digest, tokens[-1])
    return tokens


def _digest(before: Any, token: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.uint64(before) * _FACTOR + (np.uint64(token) + np.uint64(1)) * _WEIGHT


def _next_token(digest: Any, vocab_size: int) -> int:
    return int(digest >> np.uint64(33)) % vocab_size


def expect(condition: object, message: str) -> None:
    """Raise AssertionError unless the condition holds; unlike the statement, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


class SimulatedDevice:
    """Paged memory and the sampled ids that have not left the device. Owns both.

    Args:
        spec: Sizes of the cache whose blocks it holds.
        vocab_size: Sampled ids are below it.
    """

    def __init__(self, spec: CacheSpec, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        slots = [n * spec.block_size for n in spec.num_blocks]
        self._block_size = spec.block_size
        self._tokens = [np.full(n, -1, np.int64) for n in slots]
        self._digests = [np.zeros(n, np.uint64) for n in slots]
        self._last = np.full(spec.max_sequences, -1, np.int64)

    def run(self, plan: StepPlan) -> dict[int, int]:
        """Execute a plan with NumPy arrays. Answers the sampled id of each sequence that samples."""
        ids = self._fed_ids(plan)
        sampled: dict[int, int] = {}
        for group in range(plan.block_table.shape[0]):
            self._copy(group, plan)
            self._write(group, plan, ids)
            sampled = self._read(group, plan)
        for sequence, token in sampled.items():
            self._last[sequence] = token
        return sampled

    def _fed_ids(self, plan: StepPlan) -> np.ndarray[Any, Any]:
        ids = np.array(plan.token_ids, np.int64)
        for t in np.flatnonzero(ids[: int(plan.num_tokens)] < 0):
            ids[t] = self._last[plan.sequence[plan.row[t]]]
            expect(ids[t] >= 0, f"token {t} asks for a sampled id, but its sequence {plan.sequence[plan.row[t]]} has sampled none")
        return ids

    def _copy(self, group: int, plan: StepPlan) -> None:
        for source, target in np.asarray(plan.copies[group]):
            if source >= 0:
                at, to = (slice(b * self._block_size, (b + 1) * self._block_size) for b in (source, target))
                self._tokens[group][to], self._digests[group][to] = self._tokens[group][at], self._digests[group][at]

    def _write(self, group: int, plan: StepPlan, ids: np.ndarray[Any, Any]) -> None:
        """Store the step's tokens, lower positions first: rows may share blocks that are written in this very step."""
        live = np.arange(int(plan.num_tokens))
        for t in live[np.argsort(plan.positions[live], kind="stable")]:
            row, position = int(plan.row[t]), int(plan.positions[t])
            before = self._digests[group][self._slots(group, plan, row, [position - 1])[0]] if position else _ROOT
            slot = int(plan.slot_mapping[group, t])
            self._tokens[group][slot], self._digests[group][slot] = ids[t], _digest(before, ids[t])

    def _read(self, group: int, plan: StepPlan) -> dict[int, int]:
        """Look at all each row sees, and sample."""
        sampled = {}
        for row in range(int(plan.num_rows)):
            slots = self._slots(group, plan, row, range(int(plan.context_len[row])))
            digests = self._digests[group][slots]
            before = np.concatenate([[_ROOT], digests[:-1]])
            wrong = np.flatnonzero(_digest(before, self._tokens[group][slots].astype(np.uint64)) != digests)
            where = f"row {row}, sequence {plan.sequence[row]}"
            expect(not wrong.size, f"{where} reads foreign or unwritten KV at positions {wrong.tolist()}")
            if plan.sample_rows[row] >= 0:
                sampled[int(plan.sequence[row])] = _next_token(digests[-1], self.vocab_size)
        return sampled

    def _slots(self, group: int, plan: StepPlan, row: int, positions: Sequence[int]) -> np.ndarray[Any, Any]:
        at = np.asarray(positions, np.int64)
        return np.asarray(plan.block_table[group, row])[at // self._block_size] * self._block_size + at % self._block_size


def check_plan(plan: StepPlan, spec: CacheSpec) -> None:
    """Raise AssertionError where a plan with NumPy arrays breaks a promise of `StepPlan`."""
    rows, tokens = plan.sequence.size, plan.token_ids.size
    num_rows, num_tokens, num_single = int(plan.num_rows), int(plan.num_tokens), int(plan.num_single)
    expect(0 <= num_single <= num_rows <= rows, f"{num_single} single of {num_rows} of {rows} rows")
    live = plan.sequence[:num_rows]
    expect(len(set(live.tolist())) == num_rows and (live >= 0).all(), f"rows name sequences {live}")
    expect((plan.sequence[num_rows:] == -1).all(), "sequence of pads is −1")
    lens = np.diff(plan.query_start)
    expect(plan.query_start[0] == 0 and plan.query_start[-1] == num_tokens <= tokens, f"query_start {plan.query_start}")
    expect((lens[:num_single] == 1).all() and (lens[num_single:num_rows] > 1).all(), f"single rows come first, got {lens}")
    expect((lens[num_rows:] == 0).all() and (plan.context_len[num_rows:] == 0).all(), "pads have no tokens and no context")
    _check_tokens(plan, spec, lens)
    _check_tables(plan, spec)


def _check_tokens(plan: StepPlan, spec: CacheSpec, lens: np.ndarray[Any, Any]) -> None:
    num_tokens, rows = int(plan.num_tokens), plan.sequence.size
    expect((plan.row[:num_tokens] == np.repeat(np.arange(rows), lens)).all(), f"row of tokens {plan.row}")
    expect((plan.row[num_tokens:] == rows).all(), "row of pads is `rows`")
    expect((plan.slot_mapping[:, num_tokens:] == -1).all(), "slot of pads is −1")
    row = plan.row[:num_tokens]
    offsets = np.arange(num_tokens) - plan.query_start[row]
    positions = plan.positions[:num_tokens]
    expect((positions == (plan.context_len - lens)[row] + offsets).all(), f"positions {positions}")
    blocks, inside = positions // spec.block_size, positions % spec.block_size
    expect((plan.slot_mapping[:, :num_tokens] == plan.block_table[:, row, blocks] * spec.block_size + inside).all(), "slot_mapping")
    last = plan.query_start[1:] - 1
    expect(((plan.sample_rows == -1) | ((plan.sample_rows == last) & (lens > 0))).all(), f"sample_rows {plan.sample_rows}")
    expect((plan.token_ids[:num_tokens][offsets < lens[row] - 1] >= 0).all(), "only the last token of a row may be in flight")


def _check_tables(plan: StepPlan, spec: CacheSpec) -> None:
    used = -(-plan.context_len // spec.block_size)
    inside = np.arange(plan.block_table.shape[2]) < used[:, None]
    for table, num_blocks in zip(plan.block_table, spec.num_blocks, strict=True):
        expect((table[~inside] == 0).all(), "block tables are padded with the reserved block 0")
        expect(((table[inside] > 0) & (table[inside] < num_blocks)).all(), f"block ids are 1..{num_blocks - 1}")
