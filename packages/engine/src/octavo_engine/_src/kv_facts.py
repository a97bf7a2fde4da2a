"""What changes the bytes of a KV block besides its tokens and its namespace: all of it is part of every key outside the device.

Where something is in doubt it is named: a needless difference costs a miss, a missing one a wrong answer.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

import jax

from octavo_core.specs import CacheSpec
from octavo_engine._src.weights import Loaded
from octavo_engine.config import EngineConfig
from octavo_models.checkpoints import Checkpoint


def kv_facts(
    config: EngineConfig,
    checkpoint: Checkpoint,
    loaded: Loaded,
    attention: Any,
    spec: CacheSpec,
    piece_bytes: tuple[int, ...],
    weights: str,
) -> dict[str, str | int]:
    """For `octavo_core.keys.tier_root`: model, weights, arithmetic, layout, ranks, and which code computed it."""
    layer = type(loaded.model.layers()[0])
    return {
        "model": repr(checkpoint.config),
        "weights": weights,
        "dtype": loaded.dtype,
        "kv_dtype": config.kv_dtype(loaded.kv_dtype),
        "quantization": config.quantization,
        "layers": f"{layer.__module__}.{layer.__qualname__}",
        "packed": int(loaded.is_packed),
        "attention": f"{type(attention).__module__}.{type(attention).__qualname__}",
        "layout": attention.layout_id,
        "pieces": ",".join(map(str, piece_bytes)),
        "groups": ",".join(f"{kind}:{window}" for kind, window in zip(spec.kinds, spec.windows, strict=True)),
        "block_size": spec.block_size,
        "rank": 0,
        "ranks": config.tensor_parallel_size,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "octavo": ",".join(f"{name}={metadata.version(name)}" for name in ("octavo-engine", "octavo-kernels", "octavo-models")),
    }
