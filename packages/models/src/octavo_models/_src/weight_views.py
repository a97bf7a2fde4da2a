"""Sources seen through a checkpoint's habits: other names, quantised weights, experts stacked in one tensor.

Each class wraps a `WeightSource` and is one. Knows the habits; knows neither files nor models.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Final

import numpy as np

from octavo_core.errors import CheckpointError
from octavo_models._src.quantisation import QuantisationConfig
from octavo_models._src.weights import READABLE, WeightSource

_SCALES: Final = ("weight_scale", "weight_scale_inv")
_FP4: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_EXPERTS: Final = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_blocks)?")


class Renamed:
    """Every name through `rename`."""

    def __init__(self, source: WeightSource, rename: Callable[[str], str]) -> None:
        self._source = source
        self.rope_divisors = source.rope_divisors
        self._theirs = {rename(name): name for name in source.names()}

    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._source.shape(self._theirs[name])

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor."""
        return self._source.rows(self._theirs[name], index)


class Dequantised:
    """Weights times their scales, in float32.

    A scale is one number, one a row, or a matrix of which each entry covers a block of the weight. A zero point, where there is one, is
    taken away first.
    """

    def __init__(self, source: WeightSource, quantisation: QuantisationConfig) -> None:
        self._source, self._quantisation = source, quantisation
        self.rope_divisors = source.rope_divisors

    def names(self) -> frozenset[str]:
        """All tensors there are, scales included."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._source.shape(name)

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor, plain.

        Raises:
            CheckpointError: When a quantised weight has no scale, or one that does not fit.
        """
        values = self._source.rows(name, index)
        stem, _, kind = name.rpartition(".")
        if values.dtype in READABLE or kind != "weight":
            return values
        scale = next((f"{stem}.{s}" for s in _SCALES if f"{stem}.{s}" in self.names()), None)
        if scale is None:
            raise CheckpointError(f"tensor '{name}' has elements of type {values.dtype}, but there is no '{stem}.{_SCALES[0]}'")
        wide, zero = values.astype(np.float32), f"{stem}.weight_zero_point"
        if zero in self.names():
            wide -= self._spread(zero, name, index)
        return wide * self._spread(scale, name, index)

    def _spread(self, scale: str, name: str, index: slice) -> np.ndarray:
        """Entries of a scale for these rows of a weight, ready to multiply."""
        whole = np.asarray(self._source.rows(scale, slice(None)), np.float32)
        rows, columns = self.shape(name)
        whole = whole.reshape(1, 1) if whole.size == 1 else whole.reshape(whole.shape[0], -1)
        block = self._quantisation.block or (-(-rows // whole.shape[0]), -(-columns // whole.shape[1]))
        if whole.shape[0] in (1, rows):
            block = (-(-rows // whole.shape[0]), block[1])
        if whole.shape[1] == 1:
            block = (block[0], columns)
        if whole.shape[0] * block[0] < rows or whole.shape[1] * block[1] < columns:
            raise CheckpointError(f"scale '{scale}' of shape {whole.shape} does not cover '{name}' of shape {self.shape(name)}")
        at = np.arange(rows)[index] // block[0]
        return whole[at] if whole.shape[1] == 1 else whole[at][:, np.arange(columns) // block[1]]


class StackedExperts:
    """Experts kept in one tensor for a layer, seen as tensors of their own.

    Args:
        source: With `…experts.gate_up_proj` and `…experts.down_proj`, as numbers or in MXFP4 (`…_blocks` and `…_scales`).
        interleaved: gpt-oss: inputs before outputs, and gate and up alternate. Otherwise outputs before inputs, gate above up.
    """

    def __init__(self, source: WeightSource, *, interleaved: bool) -> None:
        self._source, self._interleaved = source, interleaved
        self.rope_divisors = source.rope_divisors
        self._views: dict[str, tuple[str, int, str]] = {}
        for name in source.names():
            if match := _EXPERTS.fullmatch(name):
                self._add(match[1], match[2], source.shape(name)[0])
        self._matrix = functools.lru_cache(maxsize=2)(self._whole)

    def _add(self, stem: str, kind: str, num_experts: int) -> None:
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        has_bias = f"{stem}.{kind}_bias" in self._source.names()
        for expert in range(num_experts):
            for part in parts:
                self._views[f"{stem}.{expert}.{part}.weight"] = (f"{stem}.{kind}", expert, part)
                if has_bias:
                    self._views[f"{stem}.{expert}.{part}.bias"] = (f"{stem}.{kind}_bias", expert, part)

    def names(self) -> frozenset[str]:
        """All tensors there are; stacked ones under both names."""
        return self._source.names() | frozenset(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._matrix(*self._views[name]).shape if name in self._views else self._source.shape(name)

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor."""
        return self._matrix(*self._views[name])[index] if name in self._views else self._source.rows(name, index)

    def used(self, name: str) -> set[str]:
        """The stacked tensors that a name stands for; the name itself where it is no view."""
        base = self._views[name][0] if name in self._views else name
        return {base, base + "_blocks", base + "_scales"} & self._source.names()

    def _whole(self, base: str, expert: int, part: str) -> np.ndarray:
        if base.endswith("_bias"):
            return self._part(self._source.rows(base, slice(expert, expert + 1))[0], part)
        if base in self._source.names():
            per_expert = self._source.shape(base)[1]
            stored = self._source.rows(base, slice(expert * per_expert, (expert + 1) * per_expert))
            return self._part(stored.T if self._interleaved else stored, part)
        return self._part(self._mxfp4(base, expert), part)

    def _part(self, values: np.ndarray, part: str) -> np.ndarray:
        if part == "down_proj":
            return values
        second = part == "up_proj"
        return values[second::2] if self._interleaved else np.split(values, 2)[second]

    def _mxfp4(self, base: str, expert: int) -> np.ndarray:
        """Two elements a byte, the lower one first; 32 share a power of two.

        Source: OCP Microscaling Formats (MX) 1.0, sections 5.3 and 5.4.
        """
        _, outer, groups, half = self._source.shape(base + "_blocks")
        packed = self._source.rows(base + "_blocks", slice(expert * outer * groups, (expert + 1) * outer * groups))
        exponents = self._source.rows(base + "_scales", slice(expert * outer, (expert + 1) * outer)).astype(np.int32) - 127
        pairs = np.stack([_FP4[packed & 15], _FP4[packed >> 4]], axis=-1).reshape(outer, groups, 2 * half)
        return np.ldexp(pairs, exponents[..., None]).reshape(outer, -1)
