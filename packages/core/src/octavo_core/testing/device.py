"""A device without a model: streams, what they must become, and paged memory that notices wrong blocks.

No attention is computed. The memory keeps, addressed exactly as a plan says, each token with a digest of the tokens before it, and
the next token is derived from the digest. A block that is stale, unwritten, handed out twice or shared between different prefixes
changes the tokens, so that comparing with `expected_tokens` finds it. Knows plans; knows neither scheduler nor cache.
"""

from __future__ import annotations

import dataclasses
from typing import Final

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
    tenant: int = 0
    deadline: int = 0
    namespace: tuple[int, int] = (0, 0)
    use_prefix: bool = True

    @property
    def end_len(self) -> int:
        """Tokens it has when it ends unaborted."""
        return min(self.limit_len, self.stops_at or self.limit_len)


def expected_tokens(stream: Stream, vocab_size: int) -> list[int]:
    """Prompt and answer of a stream computed alone, without paging."""
    digest, tokens = int(_ROOT), list(stream.prompt)
    for index in range(stream.end_len):
        if index == len(tokens):
            tokens.append((digest >> 33) % vocab_size)
        digest = (digest * int(_FACTOR) + (tokens[index] + 1) * int(_WEIGHT)) % 2**64
    return tokens


def expect(condition: object, message: str, *values: object) -> None:
    """Raise AssertionError unless the condition holds, also under `python -O`; the message is formatted only then."""
    if not condition:
        raise AssertionError(message.format(*values))


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

    def _fed_ids(self, plan: StepPlan) -> np.ndarray:
        ids = np.array(plan.token_ids, np.int64)
        in_flight = np.flatnonzero(ids[: int(plan.num_tokens)] < 0)
        ids[in_flight] = self._last[plan.sequence[plan.row[in_flight]]]
        expect((ids >= 0).all(), "tokens {} ask for sampled ids of sequences that have none", in_flight)
        return ids

    def _copy(self, group: int, plan: StepPlan) -> None:
        for source, target in np.asarray(plan.copies[group]):
            if source >= 0:
                at, to = (slice(b * self._block_size, (b + 1) * self._block_size) for b in (source, target))
                self._tokens[group][to], self._digests[group][to] = self._tokens[group][at], self._digests[group][at]

    def _write(self, group: int, plan: StepPlan, ids: np.ndarray) -> None:
        """Store the step's tokens, lower positions first: rows may share blocks that are written in this very step."""
        live = np.arange(int(plan.num_tokens))
        before = np.maximum(plan.positions[live] - 1, 0)
        behind = plan.block_table[group, plan.row[live], before // self._block_size] * self._block_size + before % self._block_size
        digests = self._digests[group]
        for t in live[np.argsort(plan.positions[live], kind="stable")].tolist():
            digest = int(digests[behind[t]]) if plan.positions[t] else int(_ROOT)
            slot = plan.slot_mapping[group, t]
            self._tokens[group][slot] = ids[t]
            digests[slot] = (digest * int(_FACTOR) + (int(ids[t]) + 1) * int(_WEIGHT)) % 2**64

    def _read(self, group: int, plan: StepPlan) -> dict[int, int]:
        """Look at all each row sees, and sample."""
        sampled = {}
        for row in range(int(plan.num_rows)):
            at = np.arange(int(plan.context_len[row]))
            slots = plan.block_table[group, row, at // self._block_size] * self._block_size + at % self._block_size
            digests = self._digests[group][slots]
            before = np.concatenate([[_ROOT], digests[:-1]])
            wrong = np.flatnonzero(
                before * _FACTOR + (self._tokens[group][slots].astype(np.uint64) + np.uint64(1)) * _WEIGHT != digests
            )
            if wrong.size:
                raise AssertionError(f"row {row}, sequence {plan.sequence[row]} reads foreign or unwritten KV at positions {wrong}")
            if plan.sample_rows[row] >= 0:
                sampled[int(plan.sequence[row])] = int(digests[-1] >> np.uint64(33)) % self.vocab_size
        return sampled


def check_plan(plan: StepPlan, spec: CacheSpec) -> None:
    """Raise AssertionError where a plan with NumPy arrays breaks a promise of `StepPlan`."""
    _keep(_row_promises(plan), plan)  # the other checks read rows and would stumble over broken ones
    _keep({**_token_promises(plan, spec), **_table_promises(plan, spec)}, plan)


def _keep(promises: dict[str, bool], plan: StepPlan) -> None:
    broken = [promise for promise, holds in promises.items() if not holds]
    if broken:
        raise AssertionError(f"{'; '.join(broken)}: {plan}")


def _row_promises(plan: StepPlan) -> dict[str, bool]:
    rows, tokens = plan.sequence.size, plan.token_ids.size
    num_rows, num_tokens, num_single = int(plan.num_rows), int(plan.num_tokens), int(plan.num_single)
    live, lens = plan.sequence[:num_rows], np.diff(plan.query_start)
    return {
        "num_single ≤ num_rows ≤ rows": 0 <= num_single <= num_rows <= rows,
        "each row is a sequence of its own": len(set(live.tolist())) == num_rows and bool((live >= 0).all()),
        "sequence of pads is −1": bool((plan.sequence[num_rows:] == -1).all()),
        "query_start runs from 0 to num_tokens": bool(plan.query_start[0] == 0 and plan.query_start[-1] == num_tokens <= tokens),
        "rows with one token come first": bool((lens[:num_single] == 1).all() and (lens[num_single:num_rows] > 1).all()),
        "pads have no tokens and no context": not lens[num_rows:].any() and not plan.context_len[num_rows:].any(),
    }


def _token_promises(plan: StepPlan, spec: CacheSpec) -> dict[str, bool]:
    num_tokens, rows, lens = int(plan.num_tokens), plan.sequence.size, np.diff(plan.query_start)
    row, positions = np.repeat(np.arange(rows), lens), plan.positions[:num_tokens]
    offsets = np.arange(num_tokens) - plan.query_start[row]
    blocks, inside = positions // spec.block_size, positions % spec.block_size
    slots = plan.block_table[:, row, blocks] * spec.block_size + inside
    is_last = (plan.sample_rows == plan.query_start[1:] - 1) & (lens > 0)
    return {
        "tokens lie row after row": bool((plan.row[:num_tokens] == row).all()),
        "row of pads is `rows`": bool((plan.row[num_tokens:] == rows).all()),
        "a row's positions end at its context_len": bool((positions == (plan.context_len - lens)[row] + offsets).all()),
        "slots follow from block tables": bool((plan.slot_mapping[:, :num_tokens] == slots).all()),
        "slot of pads is −1": bool((plan.slot_mapping[:, num_tokens:] == -1).all()),
        "rows sample their last token or nothing": bool(((plan.sample_rows == -1) | is_last).all()),
        "only a row's last token may be in flight": bool((plan.token_ids[:num_tokens][offsets < lens[row] - 1] >= 0).all()),
    }


def _table_promises(plan: StepPlan, spec: CacheSpec) -> dict[str, bool]:
    used = -(-plan.context_len // spec.block_size)
    inside = np.broadcast_to(np.arange(plan.block_table.shape[2]) < used[:, None], plan.block_table.shape)
    num_blocks = np.array(spec.num_blocks)[:, None, None]
    in_pool = (plan.block_table > 0) & (plan.block_table < num_blocks)
    return {
        "a block table names blocks of the pool, then the reserved block 0": bool(
            (in_pool == inside).all() and not plan.block_table[~inside].any()
        )
    }
