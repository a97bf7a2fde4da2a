"""What is replayed: requests with their arrivals, lengths and the names of their prompt's parts; and the formats they are read from.

Knows files and numbers. Has no token ids: a part of a prompt has a name, equal names mean equal parts behind equal beginnings, and the
simulation invents tokens that are equal exactly there.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from jaxtyping import Float64, Int32

from octavo_core.errors import ConfigError
from octavo_core.records import RequestRecord

MOONCAKE_BLOCK: Final = 512
"""Tokens that one of a Mooncake trace's `hash_ids` stands for."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    Attributes:
        name: For titles.
        arrival_s: From the first request on; never falls.
        prompt_len, output_len: Tokens, at least 1 each.
        limit_len: Most tokens of prompt and answer that the client allowed; the answer ends before or at it.
        cached_len: Tokens of the prompt that were found cached when the trace was recorded; 0 where the trace does not say.
        parts: Name of each `span` tokens of the prompt, −1 beyond its end.
        span: Tokens of a part.
        tenant, priority: As the scheduler takes them.
    """

    name: str
    arrival_s: Float64[np.ndarray, " requests"]
    prompt_len: Int32[np.ndarray, " requests"]
    output_len: Int32[np.ndarray, " requests"]
    limit_len: Int32[np.ndarray, " requests"]
    cached_len: Int32[np.ndarray, " requests"]
    parts: Int32[np.ndarray, "requests parts"]
    span: int
    tenant: Int32[np.ndarray, " requests"]
    priority: Int32[np.ndarray, " requests"]

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def names_parts(self) -> bool:
        """Some requests begin alike."""
        return self.parts.shape[1] > 1 or len(np.unique(self.parts)) < len(self)

    def pick(self, which: Any, name: str | None = None) -> Trace:
        """The requests an index or mask selects, the clock beginning with the first of them."""
        fields = {f.name: getattr(self, f.name)[which] for f in dataclasses.fields(self) if f.name not in ("name", "span")}
        arrival_s = fields.pop("arrival_s")
        start_s = arrival_s[0] if len(arrival_s) else 0.0
        return Trace(name=name or self.name, span=self.span, arrival_s=arrival_s - start_s, **fields)

    def at_load(self, load: float) -> Trace:
        """The same requests, arriving `load` times as fast.

        Raises:
            ConfigError: A load that is not above 0.
        """
        if not load > 0:
            raise ConfigError(f"load is above 0, got {load:g}")
        return dataclasses.replace(self, arrival_s=self.arrival_s / load)


def make_trace(
    name: str,
    arrival_s: Sequence[float] | np.ndarray,
    prompt_len: Sequence[int] | np.ndarray,
    output_len: Sequence[int] | np.ndarray,
    *,
    limit_len: Sequence[int] | np.ndarray | None = None,
    cached_len: Sequence[int] | np.ndarray | None = None,
    parts: Sequence[Sequence[int]] | None = None,
    span: int = MOONCAKE_BLOCK,
    tenant: Sequence[int] | np.ndarray | None = None,
    priority: Sequence[int] | np.ndarray | None = None,
) -> Trace:
    """A trace from plain sequences, in any order of arrival; without `parts` no two prompts begin alike.

    Raises:
        ConfigError: Lengths below 1, arrivals that are no times, sequences of different lengths.
    """
    arrivals = np.asarray(arrival_s, np.float64)
    order = np.argsort(arrivals, kind="stable")
    count = len(arrivals)

    def column(what: str, values: Any, default: Any) -> np.ndarray:
        found = np.asarray(default if values is None else values, np.int64)
        if found.shape != (count,):
            raise ConfigError(f"{name}: {what} has an entry for each of the {count} requests, got {found.size}")
        return found[order].astype(np.int32)

    nothing = np.zeros(count, np.int64)
    prompt, output = column("prompt_len", prompt_len, None), column("output_len", output_len, None)
    if not np.isfinite(arrivals).all():
        raise ConfigError(f"{name}: arrivals are times in seconds, got {arrivals[~np.isfinite(arrivals)][0]}")
    if count and min(prompt.min(), output.min()) < 1:
        raise ConfigError(f"{name}: prompts and answers have at least 1 token, got {prompt.min()} and {output.min()}")
    named = [[at] for at in range(count)] if parts is None else [parts[at] for at in order]
    return Trace(
        name=name,
        arrival_s=arrivals[order] - (arrivals.min() if count else 0.0),
        prompt_len=prompt,
        output_len=output,
        limit_len=np.maximum(column("limit_len", limit_len, nothing), prompt + output).astype(np.int32),
        cached_len=np.clip(column("cached_len", cached_len, nothing), 0, prompt - 1).astype(np.int32),
        parts=_table(named),
        span=int(prompt.max(initial=1)) if parts is None else span,
        tenant=column("tenant", tenant, nothing),
        priority=column("priority", priority, nothing),
    )


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    table = np.full((len(rows), max(map(len, rows), default=1)), -1, np.int32)
    for at, row in enumerate(rows):
        table[at, : len(row)] = row
    return table


def read_trace(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read a Mooncake trace (JSONL), an Azure trace (CSV) or a request log of `--request-log`; the first line tells which.

    Args:
        path: The file.
        limit: Read so many requests at most.

    Raises:
        ConfigError: The file cannot be read or is none of these; the message names the line.
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig") as lines:
            first = next((line for line in lines if line.strip()), "")
            lines.seek(0)
            return _reader(path, first)(path, lines, limit)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"wanted a trace to read, got {path}: {error}") from None


_Reader = Callable[[Path, Iterable[str], int | None], Trace]


def _reader(path: Path, first: str) -> _Reader:
    if '"hash_ids"' in first:
        return _read_mooncake
    if '"request_id"' in first:
        return _read_request_log
    if "ContextTokens" in first:
        return _read_azure
    raise ConfigError(
        f"{path}: wanted a Mooncake trace (JSON lines with hash_ids), an Azure trace (CSV with TIMESTAMP, ContextTokens, "
        f"GeneratedTokens) or a request log; the first line is {first.strip()[:80]!r}"
    )


def _numbered(lines: Iterable[str], limit: int | None) -> Iterator[tuple[int, str]]:
    seen = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            if limit is not None and seen >= limit:
                return
            seen += 1
            yield number, line


def _read_mooncake(path: Path, lines: Iterable[str], limit: int | None) -> Trace:
    found: list[tuple[float, int, int, list[int]]] = []
    for number, line in _numbered(lines, limit):
        try:
            row = json.loads(line)
            ids = [int(part) for part in row["hash_ids"]]
            prompt, output = int(row["input_length"]), max(1, int(row["output_length"]))
            found.append((float(row["timestamp"]) / 1e3, prompt, output, ids))
        except (ValueError, KeyError, TypeError) as error:
            fields = "timestamp, input_length, output_length, hash_ids"
            raise ConfigError(f"{path}:{number}: wanted a JSON object with {fields}, got {type(error).__name__}: {error}") from None
        wanted = -(-prompt // MOONCAKE_BLOCK)
        if prompt < 1 or len(ids) != wanted or not all(0 <= part < 2**31 for part in ids):
            raise ConfigError(f"{path}:{number}: wanted {wanted} hash_ids of 0 to 2^31 for {prompt} tokens, got {len(ids)}")
    times, prompts, outputs, parts = (list(column) for column in zip(*found, strict=True)) if found else ([], [], [], [])
    return make_trace(path.stem, times, prompts, outputs, parts=parts)


def _read_azure(path: Path, lines: Iterable[str], limit: int | None) -> Trace:
    found: list[tuple[float, int, int]] = []
    reader = csv.DictReader(lines)
    for row in reader:
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append((_azure_time_s(row["TIMESTAMP"]), int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            columns = "TIMESTAMP, ContextTokens, GeneratedTokens"
            raise ConfigError(f"{path}:{reader.line_num}: wanted {columns}, got {type(error).__name__}: {error}") from None
    times, prompts, outputs = (list(column) for column in zip(*found, strict=True)) if found else ([], [], [])
    return make_trace(path.stem, times, np.maximum(prompts, 1), outputs)


def _azure_time_s(text: str) -> float:
    """Seconds of a time such as `2023-11-16 18:15:46.6805900`: seven digits of a second, with or without a zone."""
    moment, _, zone = text.strip().partition("+")
    whole, _, fraction = moment.partition(".")
    stamp = datetime.datetime.fromisoformat(whole + "+00:00")
    offset = datetime.datetime.fromisoformat(f"{whole}+{zone}").utcoffset() if zone else None
    return stamp.timestamp() - (offset.total_seconds() if offset else 0.0) + float(f"0.{fraction or 0}")


def _read_request_log(path: Path, lines: Iterable[str], limit: int | None) -> Trace:
    """Requests that made a token; one that made none says nothing about how long it would have been."""
    decoder, found = msgspec.json.Decoder(RequestRecord), list[RequestRecord]()
    for number, line in _numbered(lines, limit):
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: wanted a record of --request-log: {error}") from None
        if record.output_tokens:
            found.append(record)
    return make_trace(
        path.stem,
        [r.arrival_s for r in found],
        [r.prompt_tokens for r in found],
        [r.output_tokens for r in found],
        cached_len=[r.cached_tokens for r in found],
    )
