"""How long a step takes: a linear model of what is in it, fitted to a step log.

    t = base + decode * N_decode + prefill * prompt tokens + context * KV tokens read + pairs * (query, key) pairs of prompt tokens

Where an engine pads steps to compiled shapes, the base is that of the shape. Knows records and numbers, no scheduler.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from octavo_core.errors import ConfigError, nearest_name
from octavo_core.plan import StepPlan
from octavo_core.records import StepRecord
from octavo_scheduler._src.scheduler import Decided

TERMS: Final = ("decode", "prefill", "context", "pairs")
_ROUNDS: Final = 4
_OUTLIER: Final = 6.0
"""Steps whose relative error is so many times the median one are left out of the next round of a fit."""


class StepSize(NamedTuple):
    """What is in a step.

    Attributes:
        decode: Rows with one token.
        prefill: Prompt tokens.
        context: KV tokens visible to all rows together.
        pairs: For each prompt token, the tokens it sees.
        tokens, rows: All of them, which decide the compiled shape.
    """

    decode: Any
    prefill: Any
    context: Any
    pairs: Any
    tokens: Any
    rows: Any


def size_of(step: StepPlan | Decided) -> StepSize:
    """What is in a planned step; traceable."""
    query_len = jnp.diff(step.query_start) if isinstance(step, StepPlan) else step.query_len
    query, context = query_len.astype(jnp.float32), step.context_len.astype(jnp.float32)
    tokens, decode = jnp.sum(query_len, dtype=jnp.int32), jnp.sum(query_len == 1, dtype=jnp.int32)
    return StepSize(
        decode=decode,
        prefill=tokens - decode,
        context=jnp.sum(context),
        pairs=jnp.sum(jnp.where(query > 1, query * (context - 0.5 * (query - 1)), 0.0)),
        tokens=tokens,
        rows=jnp.sum(query_len > 0, dtype=jnp.int32),
    )


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds of a step.

    Attributes:
        base_s: Of a step with nothing in it; one entry for each of `shapes`.
        decode_s, prefill_s, context_s, pairs_s: For each unit of the term of that name.
        host_s: From the end of a step to the start of the next one.
        shapes: Tokens and rows of each compiled shape, from small to large; a step takes the first that holds it. One shape of (0, 0)
            where steps are not padded.
    """

    base_s: tuple[float, ...]
    decode_s: float = 0.0
    prefill_s: float = 0.0
    context_s: float = 0.0
    pairs_s: float = 0.0
    host_s: float = 0.0
    shapes: tuple[tuple[int, int], ...] = ((0, 0),)

    def __post_init__(self) -> None:
        numbers = (*self.base_s, self.decode_s, self.prefill_s, self.context_s, self.pairs_s, self.host_s)
        if len(self.base_s) != len(self.shapes) or not self.base_s:
            raise ConfigError(f"a cost model has one base for each shape, got {len(self.base_s)} for {len(self.shapes)}")
        if not all(np.isfinite(x) and x >= 0 for x in numbers) or not sum(numbers) > 0:
            raise ConfigError(f"times of a cost model are at least 0 and not all 0, got {self}")

    def step_s(self, size: StepSize) -> Float[Array, ""]:
        """Seconds of a step of this size; traceable."""
        parts = [getattr(self, f"{term}_s") * jnp.asarray(getattr(size, term), jnp.float32) for term in TERMS]
        return sum(parts, jnp.asarray(self.base_s, jnp.float32)[self._shape_of(size)])

    def _shape_of(self, size: StepSize) -> Int32[Array, ""]:
        """The first shape that holds a step, or the largest."""
        tokens, rows = (jnp.array(column, jnp.int32) for column in zip(*self.shapes, strict=True))
        holds = (tokens >= size.tokens) & (rows >= size.rows)
        return jnp.where(jnp.any(holds), jnp.argmax(holds), len(self.shapes) - 1).astype(jnp.int32)

    @classmethod
    def roofline(
        cls,
        *,
        parameters: float = 8e9,
        flops: float = 4e14,
        bandwidth: float = 2.5e12,
        kv_bytes: float = 131072.0,
        hidden: float = 131072.0,
        overhead_s: float = 0.002,
    ) -> CostModel:
        """What arithmetic and memory alone would take, for designs that cannot be measured.

        Args:
            parameters: Of the model, two bytes each.
            flops: A second, as reached rather than as printed on the box.
            bandwidth: Bytes a second, likewise.
            kv_bytes: Of a token in all layers.
            hidden: Query width times layers.
            overhead_s: Of a step, beside reading the weights.
        """
        return cls(
            base_s=(overhead_s + 2 * parameters / bandwidth,),
            decode_s=2 * parameters / flops,
            prefill_s=2 * parameters / flops,
            context_s=kv_bytes / bandwidth,
            pairs_s=4 * hidden / flops,
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote.

        Raises:
            ConfigError: The file cannot be read or is no cost model.
        """
        try:
            values = json.loads(Path(path).read_text())
            values["base_s"] = tuple(map(float, values["base_s"]))
            values["shapes"] = tuple((int(t), int(r)) for t, r in values.get("shapes", ((0, 0),)))
            return cls(**values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"wanted a cost model as `octavo simulate fit` writes it, got {path}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> CostModel:
        """A file of `save`, or its terms in seconds, such as `base=8e-3,decode=2e-5,prefill=4e-5`, or `roofline:parameters=70e9,flops=8e14`.

        Raises:
            ConfigError: It is none of these.
        """
        if text.startswith("roofline"):
            return cls.roofline(**_numbers(text.partition(":")[2], _ROOFLINE))
        if "=" not in text:
            return cls.load(text)
        found: dict[str, Any] = {f"{name}_s": value for name, value in _numbers(text, ("base", *TERMS, "host")).items()}
        return cls(base_s=(found.pop("base_s", 0.0),), **found)


_ROOFLINE: Final = ("parameters", "flops", "bandwidth", "kv_bytes", "hidden", "overhead_s")


def _numbers(text: str, names: Sequence[str]) -> dict[str, float]:
    """`a=1,b=2` as numbers by name."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(f"a cost has the terms {', '.join(names)}, got '{name}'{nearest_name(name, names)}")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"wanted a number for {name}, got '{value}'") from None
    return found


@dataclasses.dataclass(frozen=True)
class Fit:
    """A fitted model and how well it fits.

    Attributes:
        model: What was fitted.
        num_steps: Steps it was fitted to.
        num_left_out: Steps that were left out as outliers.
        median_error: Median of |predicted − measured| / measured over all steps.
        total_error: Error of the sum of all steps not left out, as a share of it.
    """

    model: CostModel
    num_steps: int
    num_left_out: int
    median_error: float
    total_error: float


def fit(records: Iterable[StepRecord], *, padded: bool | None = None) -> Fit:
    """Fit a cost model by non-negative least squares, leaving out outliers.

    Args:
        records: Of a step log.
        padded: Give each compiled shape that ran a base of its own; by default, if steps ran in at most twelve shapes.

    Raises:
        ConfigError: Fewer than ten steps.
    """
    steps = [r for r in records if r.device_s > 0]
    if len(steps) < 10:
        raise ConfigError(f"a cost model is fitted to at least 10 steps, got {len(steps)}; log more with --step-log")
    shapes = _shapes(steps, padded)
    matrix, times = _matrix(steps, shapes), np.array([r.device_s for r in steps])
    kept, weights = np.ones(len(steps), bool), np.zeros(matrix.shape[1])
    for _ in range(_ROUNDS):
        weights = _solve(matrix[kept], times[kept])
        error = np.abs(matrix @ weights / times - 1)
        bound = max(_OUTLIER * float(np.median(error[kept])), 1e-3)
        kept = error <= bound if (error <= bound).sum() >= max(10, len(steps) // 2) else kept
    bases, terms = weights[: len(shapes)], weights[len(shapes) :]
    model = CostModel(
        base_s=tuple(map(float, bases)),
        **{f"{t}_s": float(w) for t, w in zip(TERMS, terms, strict=True)},
        host_s=_host_s(steps),
        shapes=shapes,
    )
    predicted = matrix @ weights
    return Fit(
        model=model,
        num_steps=int(kept.sum()),
        num_left_out=int((~kept).sum()),
        median_error=float(np.median(np.abs(predicted - times) / times)),
        total_error=float(predicted[kept].sum() / times[kept].sum() - 1),
    )


def _shapes(steps: Sequence[StepRecord], padded: bool | None) -> tuple[tuple[int, int], ...]:
    """Shapes that ran at least three times, from small to large."""
    found, counts = np.unique([(r.bucket_tokens, r.bucket_rows) for r in steps], axis=0, return_counts=True)
    if padded is False or (padded is None and len(found) > 12):
        return ((0, 0),)
    often = [(int(t), int(r)) for (t, r), n in zip(found, counts, strict=True) if n >= 3]
    return tuple(often) or ((0, 0),)


def _matrix(steps: Sequence[StepRecord], shapes: tuple[tuple[int, int], ...]) -> Float[np.ndarray, "steps terms"]:
    """A column for the base of each shape, then one for each term."""
    ran = np.array([(r.bucket_tokens, r.bucket_rows) for r in steps])
    holds = (np.array(shapes)[:, 0] >= ran[:, :1]) & (np.array(shapes)[:, 1] >= ran[:, 1:])
    shape = np.where(holds.any(axis=1), holds.argmax(axis=1), len(shapes) - 1)
    terms = [(r.num_decodes, r.prefill_tokens, r.context_tokens, r.prefill_pairs) for r in steps]
    return np.concatenate([np.eye(len(shapes))[shape], np.array(terms, float)], axis=1)


def _solve(matrix: Float[np.ndarray, "steps terms"], times: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " terms"]:
    """Non-negative least squares of relative errors, columns brought to one scale first."""
    weighted = matrix / times[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    scale[scale == 0] = 1.0
    return _nnls(weighted / scale, np.ones(len(times))) / scale


def _nnls(matrix: Float[np.ndarray, "steps terms"], wanted: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " terms"]:
    """Weights of at least 0 that come closest to what is wanted.

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    weights, free = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], bool)
    for _ in range(3 * free.size):
        slope = np.where(free, -np.inf, matrix.T @ (wanted - matrix @ weights))
        if slope.max() <= 1e-10 * len(wanted):
            break
        free[slope.argmax()] = True
        while True:
            best = np.zeros_like(weights)
            best[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
            blocked = free & (best <= 0)
            if not blocked.any():
                weights = best
                break
            reach = np.min(weights[blocked] / np.maximum(weights[blocked] - best[blocked], 1e-300))
            weights = weights + reach * (best - weights)
            free &= weights > 1e-14
    return weights


def _host_s(steps: Sequence[StepRecord]) -> float:
    return float(np.median([r.host_s for r in steps]))
