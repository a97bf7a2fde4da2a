"""Octavo's engine: cache, scheduler, kernels and model composed into one step loop.

`LLM` runs it in a script, `AsyncLLM` in a program of its own, `AsyncEngine` behind a server; `follow` is every node but
the first where several compute one model. Names are looked up on first use, so that importing `octavo_engine.config` imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_core.wire import SamplingParams
    from octavo_engine._src.async_engine import AsyncEngine
    from octavo_engine._src.async_llm import AsyncLLM
    from octavo_engine._src.completion import Completion
    from octavo_engine._src.compose import follow
    from octavo_engine._src.offline import LLM
    from octavo_engine.config import EngineConfig

__version__ = "0.1.0"

_HOME = {
    "AsyncEngine": "octavo_engine._src.async_engine",
    "AsyncLLM": "octavo_engine._src.async_llm",
    "Completion": "octavo_engine._src.completion",
    "EngineConfig": "octavo_engine.config",
    "LLM": "octavo_engine._src.offline",
    "SamplingParams": "octavo_core.wire",
    "follow": "octavo_engine._src.compose",
}

__all__ = ["LLM", "AsyncEngine", "AsyncLLM", "Completion", "EngineConfig", "SamplingParams", "follow"]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo_engine' has no attribute '{name}'")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
