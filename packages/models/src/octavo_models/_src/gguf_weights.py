"""Weights from a GGUF file, under their Hugging Face names and in Hugging Face order.

Knows how llama.cpp names tensors and reorders the rows of Q and K; leaves the header to `gguf_meta` and the arithmetic of each
quantisation to the `gguf` package. The weights of a quantised checkpoint are bfloat16 values whatever dtype they are kept in:
dequantised in float32, rounded once, so that float32 and bfloat16 runs compute with one and the same model.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import gguf
import numpy as np

from octavo_core.errors import CheckpointError, UnsupportedModelError
from octavo_models._src.gguf_meta import GgufHeader, GgufTensor, read_gguf
from octavo_models._src.weights import BFLOAT16

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_AROUND_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of blocks with norms after attention and MLP too."""

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(?:_exps|\.(\d+))\.weight")
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"
_PLAIN = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)


def hugging_face_name(name: str, *, norms_around: bool = False) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; names not known are returned as they are.

    Args:
        name: As the file has it.
        norms_around: The blocks have norms after attention and MLP too.
    """
    inside = {**_IN_BLOCK, **_AROUND_NORMS} if norms_around else _IN_BLOCK
    if (match := _BLOCK_NAME.fullmatch(name)) and match[2] in inside:
        return f"model.layers.{match[1]}.{inside[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _experts(name: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """A tensor of all experts as one for each, and one of a single expert under its name; empty for any other.

    GGUF stacks experts along the slowest axis.
    """
    match = _EXPERTS.fullmatch(name)
    if match is None:
        return {}
    prefix = f"model.layers.{match[1]}.mlp.experts"
    if match[3] is not None:
        return {f"{prefix}.{match[3]}.{match[2]}_proj.weight": tensor}
    each = tensor._replace(shape=tensor.shape[:-1])
    _, per_block, block_bytes = _coding(tensor)
    size = math.prod(each.shape) // per_block * block_bytes
    return {f"{prefix}.{e}.{match[2]}_proj.weight": each._replace(offset=tensor.offset + e * size) for e in range(tensor.shape[-1])}


def half_split_order(num_rows: int, num_heads: int) -> np.ndarray:
    """For each row of Q or K as Hugging Face has it, the row of a GGUF file that holds it.

    llama.cpp rotates neighbouring pairs (2i, 2i+1), Hugging Face the pairs (i, i + head_dim/2).
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


class GGUFWeights:
    """A `WeightSource` over a memory-mapped GGUF file.

    Attributes:
        is_quantised: Whether any tensor's elements share scales in blocks.

    Args:
        path: The file.
        num_heads, num_kv_heads: Of the model, to undo the reordering of Q and K.

    Raises:
        CheckpointError: When the file is missing, truncated or not GGUF.
        UnsupportedModelError: For a quantisation that the `gguf` package does not know.
    """

    def __init__(self, path: Path, *, num_heads: int, num_kv_heads: int) -> None:
        header = read_gguf(path)
        # As a plain array: slices of `np.memmap` carry bookkeeping that costs a fifth of the loading time.
        self._raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
        norms_around = "blk.0.post_ffw_norm.weight" in header.tensors
        found: dict[str, GgufTensor] = {}
        for name, tensor in header.tensors.items():
            found |= _experts(name, tensor) or {hugging_face_name(name, norms_around=norms_around): tensor}
        self._tensors = {name: _Tensor(header, tensor) for name, tensor in found.items()}
        # llama.cpp turns neighbouring pairs in its `llama` only; elsewhere it turns halves, as Hugging Face does.
        is_llama = header.metadata.get("general.architecture", "llama") == "llama"
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if is_llama else {}
        self.is_quantised = any(t.kind not in _PLAIN for t in self._tensors.values())
        divisors = self._tensors.get(_ROPE_DIVISORS)
        self.rope_divisors = None if divisors is None else tuple(divisors.rows(self._raw, slice(None)).ravel().tolist())

    def names(self) -> frozenset[str]:
        """All tensors there are."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that `names` lists."""
        return self._tensors[name].shape

    def rows(self, name: str, index: slice) -> np.ndarray:
        """Rows of a tensor in Hugging Face's order; bfloat16 where the checkpoint is quantised."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            order, whole = self._order(name, tensor.shape[0]), tensor.rows(self._raw, slice(None)).ravel()
            return self._rounded((whole if order is None else whole[order])[index])
        order = self._order(name, tensor.num_rows)
        return self._rounded(tensor.rows(self._raw, index if order is None else order[index]))

    def kind(self, name: str) -> str:
        """How a tensor is coded, by GGUF's name."""
        return self._tensors[name].kind.name

    def blocks(self, name: str) -> tuple[str, np.ndarray]:
        """How a tensor is coded, by GGUF's name, and its coded rows in Hugging Face's order."""
        tensor = self._tensors[name]
        raw = tensor.coded(self._raw)
        order = self._order(name, len(raw))
        return self.kind(name), raw if order is None else raw[order]

    def _rounded(self, values: np.ndarray) -> np.ndarray:
        return values.astype(BFLOAT16) if self.is_quantised else values

    def _order(self, name: str, num_rows: int) -> np.ndarray | None:
        """Rows of the file in the order wanted, or None where that is the file's own."""
        heads = self._heads.get(name.split(".")[-2])
        if heads is None:
            return None
        if num_rows % (2 * heads):
            raise CheckpointError(f"tensor '{name}' has {num_rows} rows, which {heads} heads do not divide into pairs")
        return half_split_order(num_rows, heads)


class _Tensor:
    """Where a tensor lies in the file and how its rows are coded."""

    def __init__(self, header: GgufHeader, tensor: GgufTensor) -> None:
        self.shape = tensor.shape[::-1]
        self.kind, per_block, block_bytes = _coding(tensor)
        if not self.shape or self.shape[-1] % per_block:
            message = (
                f"{header.path}: tensor '{tensor.name}' of shape {self.shape} is not made of {self.kind.name} blocks of {per_block}"
            )
            raise CheckpointError(message)
        row_bytes = self.shape[-1] // per_block * block_bytes
        self.num_rows = math.prod(self.shape[:-1])
        self._bytes_shape = (self.num_rows, row_bytes)
        self._span = slice(tensor.offset, tensor.offset + math.prod(self._bytes_shape))

    def coded(self, raw: np.ndarray) -> np.ndarray:
        """All rows as they are."""
        return raw[self._span].reshape(self._bytes_shape)

    def rows(self, raw: np.ndarray, index: slice | np.ndarray) -> np.ndarray:
        """Rows as float32."""
        return gguf.quants.dequantize(self.coded(raw)[index], self.kind)


def _coding(tensor: GgufTensor) -> tuple[gguf.GGMLQuantizationType, int, int]:
    """The element type, and elements and bytes of its block."""
    try:
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        message = f"tensor '{tensor.name}' has ggml type {tensor.ggml_type}, which cannot be dequantised here"
        raise UnsupportedModelError(f"{message}; use a file in F16, BF16, Q8_0, Q4_1 or a K-quant") from None
    return kind, per_block, block_bytes
