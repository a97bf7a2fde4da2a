"""Model families, weight loaders, tokenizers and chat templates.

Two halves. Without jax: `octavo_models.checkpoints` finds and describes a checkpoint, `octavo_models.text` turns text into tokens
and back. With jax: `Decoder` and `load_model`. Names here are looked up on first use, so importing this package imports neither half.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_models._src.decoder import Decoder
    from octavo_models._src.load import load_model
    from octavo_models._src.load_packed import StoredWeights, load_packed
    from octavo_models._src.placement import Placement
    from octavo_models.checkpoints import Checkpoint, GenerationConfig, ModelConfig, RopeConfig, resolve
    from octavo_models.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer, load_chat_template, load_tokenizer

__version__ = "0.1.0"

_HOME = {
    "ChatTemplate": "octavo_models.text",
    "Checkpoint": "octavo_models.checkpoints",
    "Decoder": "octavo_models._src.decoder",
    "Detokenizer": "octavo_models.text",
    "GenerationConfig": "octavo_models.checkpoints",
    "ModelConfig": "octavo_models.checkpoints",
    "Placement": "octavo_models._src.placement",
    "RopeConfig": "octavo_models.checkpoints",
    "StopStrings": "octavo_models.text",
    "StoredWeights": "octavo_models._src.load_packed",
    "Tokenizer": "octavo_models.text",
    "load_chat_template": "octavo_models.text",
    "load_model": "octavo_models._src.load",
    "load_packed": "octavo_models._src.load_packed",
    "load_tokenizer": "octavo_models.text",
    "resolve": "octavo_models.checkpoints",
}

__all__ = [
    "ChatTemplate",
    "Checkpoint",
    "Decoder",
    "Detokenizer",
    "GenerationConfig",
    "ModelConfig",
    "Placement",
    "RopeConfig",
    "StopStrings",
    "StoredWeights",
    "Tokenizer",
    "load_chat_template",
    "load_model",
    "load_packed",
    "load_tokenizer",
    "resolve",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo_models' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
