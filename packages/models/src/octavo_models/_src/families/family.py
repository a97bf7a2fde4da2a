"""What a family's file says: which checkpoints are its, and how their configuration reads.

A family is data about the parts in `attention`, `latent_attention`, `mlp`, `moe` and `decoder`; a file here imports no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from octavo_models._src.fields import Fields
from octavo_models._src.model_config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    Attributes:
        architectures: Class names in `architectures` of config.json.
        model_types: `model_type` of files that name no class.
        read: From the fields of a config.json and the class name to the model it describes.
        renames: (what a tensor's name holds, what Octavo calls it), applied in order; Octavo's names are those of `Decoder.weight_parts`.
    """

    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[Fields, str], ModelConfig]
    renames: tuple[tuple[str, str], ...] = ()

    def tensor_name(self, name: str) -> str:
        """Octavo's name of a tensor."""
        for theirs, ours in self.renames:
            name = name.replace(theirs, ours)
        return name

    def stored_name(self, name: str) -> str:
        """The family's name of a tensor that Octavo calls so: the inverse of `tensor_name` inside layers. Around them a language model alone
        has Octavo's names."""
        for theirs, ours in reversed(self.renames):
            if ours.startswith("."):
                name = name.replace(ours, theirs)
        return name
