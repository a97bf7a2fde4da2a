"""Requests of a trace in Mooncake's format, as block keys of any size that divides the trace's.

Knows the format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id per 512 tokens
of the prompt, the last one perhaps of fewer. The trace has no token ids; `Prompt.token_ids` invents them so that equal
prefixes get equal tokens and different blocks different ones.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TRACE_BLOCK = 512
"""Tokens per id of a trace."""


class TraceError(ValueError):
    """A file that is no trace, or cannot be cut as asked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One request.

    Attributes:
        keys: Of each full block; equal keys mean equal blocks behind equal prefixes.
        tail_key: The key that the last, partial block would have if it were full; -1 without one.
        tail_len: Tokens of the partial block.
        prompt_len: Tokens of the prompt.
        output_len: Tokens generated after it.
        time_s: Arrival, from the start of the trace.
        path: The trace's own blocks by position in the tree of prompts, the partial one included.
    """

    keys: Sequence[int]
    tail_key: int
    tail_len: int
    prompt_len: int
    output_len: int
    time_s: float
    path: Sequence[int]

    def token_ids(self, vocab_size: int = 32_000) -> np.ndarray:
        """Invented token ids, int32[prompt_len]: a mixed function of the block and the offset in it."""
        at: np.ndarray = np.add.outer(
            np.array(self.path, np.uint64) * np.uint64(TRACE_BLOCK), np.arange(TRACE_BLOCK, dtype=np.uint64)
        )
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            at = (at ^ (at >> np.uint64(shift))) * np.uint64(factor)
        ids: np.ndarray = ((at >> np.uint64(31)) % np.uint64(vocab_size)).astype(np.int32).reshape(-1)[: self.prompt_len]
        return ids


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: Of the file.
        block_size: Tokens per key.
    """

    name: str
    block_size: int
    prompts: Sequence[Prompt]

    @property
    def working_set(self) -> int:
        """Different full blocks."""
        return len({key for prompt in self.prompts for key in prompt.keys})

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(prompt.prompt_len for prompt in self.prompts)


def read_trace(path: Path, block_size: int = TRACE_BLOCK) -> Trace:
    """Read a trace and cut its prompts into blocks of `block_size` tokens.

    Raises:
        TraceError: The file is absent or not in the format, or `block_size` does not divide 512.
    """
    if block_size < 1 or TRACE_BLOCK % block_size:
        raise TraceError(f"wanted a block size that divides {TRACE_BLOCK}, the trace's own, got {block_size}")
    try:
        with path.open() as lines:
            return cut(path.stem, _requests(path, lines), block_size)
    except OSError as error:
        raise TraceError(f"wanted a trace to read: {error}") from None


def cut(name: str, requests: Iterable[dict[str, Any]], block_size: int = TRACE_BLOCK) -> Trace:
    """A trace of requests given as the format's objects."""
    tree: dict[tuple[int, int], int] = {}
    return Trace(name, block_size, [_prompt(request, tree, block_size) for request in requests])


def _requests(path: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            request = json.loads(line)
            blocks, wanted = len(request["hash_ids"]), -(-request["input_length"] // TRACE_BLOCK)
            request["timestamp"] + request["output_length"] + sum(request["hash_ids"])
        except (ValueError, KeyError, TypeError) as error:
            fields = "timestamp, input_length, output_length, hash_ids"
            raise TraceError(f"{path}:{number}: wanted a JSON object with {fields}, got {type(error).__name__}: {error}") from None
        if blocks != wanted:
            raise TraceError(f"{path}:{number}: wanted {wanted} hash_ids for input_length {request['input_length']}, got {blocks}")
        yield request


def _prompt(request: dict[str, Any], tree: dict[tuple[int, int], int], block_size: int) -> Prompt:
    """Name the blocks of a request by their places in the tree of all prompts, which grows."""
    path, parent = [], -1
    for hash_id in request["hash_ids"]:
        parent = tree.setdefault((parent, hash_id), len(tree))
        path.append(parent)
    parts, prompt_len = TRACE_BLOCK // block_size, request["input_length"]
    keys = [at * parts + part for at in path for part in range(parts)] if parts > 1 else path
    full, tail_len = divmod(prompt_len, block_size)
    return Prompt(
        keys=keys[:full],
        tail_key=keys[full] if tail_len else -1,
        tail_len=tail_len,
        prompt_len=prompt_len,
        output_len=request["output_length"],
        time_s=request["timestamp"] / 1e3,
        path=path,
    )
