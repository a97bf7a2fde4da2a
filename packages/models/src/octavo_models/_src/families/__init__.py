"""The families of models, one file each. To add one, write its file and name it here; `docs/add-a-model.md` walks through it."""

from __future__ import annotations

from typing import Final

from octavo_core.errors import UnsupportedModelError
from octavo_models._src.families import (
    deepseek_v3,
    gemma3,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from octavo_models._src.families.family import Family
from octavo_models._src.fields import Fields

__all__ = ["FAMILIES", "Family", "family_named", "family_of", "served"]

FAMILIES: Final = tuple(
    module.FAMILY for module in (llama, qwen2, qwen3, qwen3_moe, mistral, mixtral, gemma3, deepseek_v3, gpt_oss)
)


def served() -> tuple[str, ...]:
    """Class names of all architectures served."""
    return tuple(name for family in FAMILIES for name in family.architectures)


def family_named(architecture: str) -> Family | None:
    """The family of a class name."""
    return next((family for family in FAMILIES if architecture in family.architectures), None)


def family_of(fields: Fields) -> tuple[Family, str]:
    """The family of a config.json and the class name it goes by.

    Raises:
        CheckpointError: `architectures` is no list of names.
        UnsupportedModelError: No family serves it.
    """
    names = fields.values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise fields.fail("architectures", "a list of class names")
    for name in names:
        if (family := family_named(name)) is not None:
            return family, name
    model_type = fields.text("model_type", "")
    for family in FAMILIES:
        if not names and model_type in family.model_types:
            return family, family.architectures[0]
    came = ", ".join(names) or model_type or "none named"
    raise UnsupportedModelError(f"{fields.source}: architecture {came} is not served; this version serves {', '.join(served())}")
