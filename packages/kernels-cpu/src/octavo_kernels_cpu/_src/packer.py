"""Replaces a model's layers and head by ones the kernels serve.

Reads a decoder by the names of its parts (`blocks`, each with `attention`, `mlp` and norms; `embed`; `head`), imports no model package. A model
of another form is declined before anything of it is changed.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from flax import nnx

from octavo_kernels_cpu._src.block import ACTIVATIONS, Block, Head, Norms, gate_up_order
from octavo_kernels_cpu._src.library import Library
from octavo_kernels_cpu._src.matrix import GROUP, PANEL, Format, Matrix, Raw, Source

Quantization = Literal["none", "int8", "q4", "stored"]
NATIVE: Final = {"Q4_0": (Source.Q4_0, Format.Q4), "Q4_1": (Source.Q4_1, Format.Q4), "Q8_0": (Source.Q8_0, Format.Q8)}
"""GGUF codings that are computed with as they are."""


@runtime_checkable
class Stored(Protocol):
    """Weights of an unfilled model by its parameters."""

    def blocks(self, param: Any) -> tuple[str, np.ndarray] | None:
        """GGUF's name of the coding and raw rows, where all of the parameter has one coding."""

    def values(self, param: Any) -> np.ndarray:
        """In bfloat16 where that is what the checkpoint holds, otherwise in float32."""


class Packed(NamedTuple):
    """What became of a model's weights.

    Attributes:
        forms: How many matrices are kept in which format, told as text.
        num_bytes: Of all of them.
        is_quantised: Whether activations are rounded to int8 anywhere.
    """

    forms: str
    num_bytes: int
    is_quantised: bool


class Packer:
    """Packs models for one library.

    Attributes:
        told: Instruction set and threads, for people.
    """

    def __init__(self, library: Library, told: str) -> None:
        self._library, self.told = library, told

    def has_native_blocks(self, model: Any, stored: Stored) -> bool:
        """Whether the checkpoint's own 4- or 8-bit blocks can be computed with as they are."""
        blocks = stored.blocks(model.blocks[0].mlp.down.weight) if hasattr(model.blocks[0].mlp, "down") else None
        return blocks is not None and blocks[0] in NATIVE

    def check(self, model: Any) -> None:
        """Whether every layer has the form the kernels know; nothing is read or changed.

        Raises:
            NotImplementedError: Naming what is different.
        """
        for block in model.blocks:
            check_form(block)

    def pack(self, model: Any, stored: Stored, quantization: Quantization, *, is_exact: bool = False) -> Packed:
        """Replace every layer and the head.

        Args:
            model: Unfilled.
            stored: Its weights.
            quantization: `none`: values as they are, float32 arithmetic. `stored`: 4- and 8-bit blocks of the checkpoint as they are, others
                as `none`. `q4`: the same, refused where there are no 4-bit blocks. `int8`: all weights as int8.
            is_exact: Prompts are not computed in bfloat16 either, where kernels would.

        Raises:
            NotImplementedError: The model has another form, or its weights cannot be packed so; nothing of it is changed.
        """
        self.check(model)
        work = _Work(self._library, stored, quantization, is_exact)
        blocks = [work.block(block) for block in model.blocks]
        head = Head(self._library, work.matrix(model.embed if model.head is None else model.head, is_head=True))
        if quantization == "q4" and not work.forms[Format.Q4]:
            raise NotImplementedError(
                "the checkpoint has no 4-bit blocks (Q4_0 or Q4_1); rounding other weights to 4 bits loses the model"
            )
        for i, block in enumerate(blocks):
            model.blocks[i] = block
        model.head = nnx.data(head)
        forms = ", ".join(f"{count} {form.name.lower()}" for form, count in sorted(work.forms.items()))
        return Packed(forms, work.num_bytes, any(work.forms[form] for form in (Format.Q8, Format.Q8F, Format.Q4)))


def check_form(block: Any) -> None:
    """Whether a layer has the form the kernels know.

    Raises:
        NotImplementedError: Naming what is different.
    """
    attention, mlp = block.attention, block.mlp
    if not (hasattr(attention, "qkv") and hasattr(attention, "out")):
        raise NotImplementedError(f"its attention is a {type(attention).__name__}")
    if getattr(attention, "sinks", None) is not None:
        raise NotImplementedError("its attention has sinks")
    if not (hasattr(mlp, "gate_up") and hasattr(mlp, "down")):
        raise NotImplementedError(f"its MLP is a {type(mlp).__name__}")
    activation = getattr(mlp, "act", "silu")
    if activation not in ACTIVATIONS:
        raise NotImplementedError(f"its activation is {activation}")
    if mlp.down.weight.shape[1] % PANEL or attention.head_dim % 2:
        raise NotImplementedError(f"its MLP is {mlp.down.weight.shape[1]} wide; {PANEL} must divide that")


class _Work:
    """One model's packing."""

    def __init__(self, library: Library, stored: Stored, quantization: Quantization, is_exact: bool) -> None:
        self._library, self._stored, self._quantization, self._is_exact = library, stored, quantization, is_exact
        self.forms: Counter[Format] = Counter()
        self.num_bytes = 0

    def block(self, block: Any) -> Block:
        attention, mlp = block.attention, block.mlp
        width = mlp.down.weight.shape[1]
        return Block(
            self._library,
            self._norms(block),
            self.matrix(attention.qkv),
            self.matrix(attention.out),
            self.matrix(mlp.gate_up, gate_up_order(width)),
            self.matrix(mlp.down),
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            activation=getattr(mlp, "act", "silu"),
            is_local=getattr(block, "is_local", False),
            is_exact=self._is_exact,
        )

    def _norms(self, block: Any) -> Norms:
        before, mlp, attention = block.attention_norm, block.mlp_norm, block.attention
        optional = (
            getattr(block, "attention_post_norm", None),
            getattr(block, "mlp_post_norm", None),
            getattr(attention, "q_norm", None),
            getattr(attention, "k_norm", None),
        )
        if len({norm.eps for norm in (before, mlp, *optional) if norm is not None}) != 1:
            raise NotImplementedError("its norms do not share one epsilon")
        after_attention, after_mlp, q, k = (None if norm is None else self._gain(norm) for norm in optional)
        return Norms(self._gain(before), self._gain(mlp), after_attention, after_mlp, q, k, eps=before.eps)

    def _gain(self, norm: Any) -> np.ndarray:
        gain: np.ndarray = self._stored.values(norm.scale).astype(np.float32) + np.float32(getattr(norm, "offset", 0.0))
        return gain

    def matrix(self, linear: Any, order: np.ndarray | None = None, *, is_head: bool = False) -> Matrix:
        """A projection, or a token table, packed. A head's activations keep 16 bits: with 8 they cost as much accuracy as all of a layer's."""
        raw, form = self._choose(linear.weight)
        if is_head and form is Format.Q8:
            form = Format.Q8F
        bias = getattr(linear, "bias", None)
        values = None if bias is None else self._stored.values(bias).astype(np.float32)
        made = Matrix(self._library, raw, form, order=order, bias=values)
        self.forms[form] += 1
        self.num_bytes += made.data.shape[0]
        return made

    def _choose(self, weight: Any) -> tuple[Raw, Format]:
        inputs = weight.shape[1]
        blocks = self._stored.blocks(weight) if self._quantization != "none" else None
        if blocks is not None and blocks[0] in NATIVE:
            source, form = NATIVE[blocks[0]]
            if self._quantization != "int8" or form is Format.Q8:
                return Raw(source, blocks[1], inputs), form
        values = self._stored.values(weight)
        if values.dtype.itemsize == 2:
            raw, form = Raw(Source.BF16, values.view(np.uint16), inputs), Format.BF16
        else:
            raw, form = Raw(Source.F32, values, inputs), Format.F32
        return raw, Format.Q8 if self._quantization == "int8" and inputs % GROUP == 0 else form
