"""Checkpoints without jax: find one, read what it describes.

`resolve` takes what a user wrote after `--model`; `open_checkpoint` a path on this machine.
"""

from octavo_models._src.checkpoint import DEFAULT_MODEL, Checkpoint, locate, open_checkpoint, packaged_checkpoint, resolve
from octavo_models._src.gguf_meta import GgufHeader, GgufTensor, read_gguf
from octavo_models._src.hf_config import parse_model_config, read_generation_config, read_model_config
from octavo_models._src.hub import Cached, cached_models, describe
from octavo_models._src.model_config import GenerationConfig, ModelConfig, RopeConfig
from octavo_models._src.progress import progress
from octavo_models._src.stored import StoredType, stored_types

__all__ = [
    "DEFAULT_MODEL",
    "Cached",
    "Checkpoint",
    "GenerationConfig",
    "GgufHeader",
    "GgufTensor",
    "ModelConfig",
    "RopeConfig",
    "StoredType",
    "cached_models",
    "describe",
    "locate",
    "open_checkpoint",
    "packaged_checkpoint",
    "parse_model_config",
    "progress",
    "read_generation_config",
    "read_gguf",
    "read_model_config",
    "resolve",
    "stored_types",
]
