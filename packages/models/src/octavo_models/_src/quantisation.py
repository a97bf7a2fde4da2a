"""What a config.json says of quantised weights. Opens no weights, imports no jax.

Weights of these formats are turned back into plain numbers as they are loaded; activations are computed in the model's dtype, whatever
scheme the file names for them.
"""

from __future__ import annotations

import dataclasses

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.fields import Fields

_METHODS = ("compressed-tensors", "fp8", "mxfp4")
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "dense")


@dataclasses.dataclass(frozen=True)
class QuantisationConfig:
    """How weights are stored.

    Attributes:
        method: Hugging Face's name: `compressed-tensors` (8-bit integers or FP8), `fp8` (FP8 with a scale a block), `mxfp4` (gpt-oss's experts).
        block: Rows and columns that share a scale where the scale is a matrix; None: as many as its shape says.
    """

    method: str
    block: tuple[int, int] | None = None


def read_quantisation(fields: Fields) -> QuantisationConfig | None:
    """The quantisation of a config.json; None where there is none.

    Raises:
        UnsupportedModelError: For a method or format that is not served.
    """
    values = fields.values.get("quantization_config") or fields.values.get("compression_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise fields.fail("quantization_config", "an object")
    inner = Fields(values, f"{fields.source}: quantization_config")
    method = inner.text("quant_method", "none")
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{fields.source}: 'quantization_config' of method '{method}' is not served; {', '.join(_METHODS)} and GGUF files are"
        )
    if method == "compressed-tensors":
        _check_compressed(inner)
    return QuantisationConfig(method, _block(inner))


def _check_compressed(inner: Fields) -> None:
    groups = inner.values.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    formats = [inner.text("format", "int-quantized")]
    formats += [g["format"] for g in groups.values() if isinstance(g, dict) and isinstance(g.get("format"), str)]
    for name in formats:
        if name not in (*_FORMATS, "mixed-precision"):
            raise UnsupportedModelError(f"{inner.source}: format '{name}' is not served; {', '.join(_FORMATS)} are")
    for group in groups.values():
        weights = Fields((group.get("weights") if isinstance(group, dict) else None) or {}, inner.source)
        if weights.integer("num_bits", 8) != 8:
            raise UnsupportedModelError(f"{inner.source}: weights of {weights.values['num_bits']} bits are not served; 8 are")


def _block(inner: Fields) -> tuple[int, int] | None:
    sizes = inner.values.get("weight_block_size")
    groups = inner.values.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        sizes = sizes or (weights.get("block_structure") if isinstance(weights, dict) else None)
    if sizes is None:
        return None
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(isinstance(s, int) and s > 0 for s in sizes):
        raise inner.fail("weight_block_size", "two positive numbers")
    return sizes[0], sizes[1]
