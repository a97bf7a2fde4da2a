"""The optional library NIXL: whether it is here, and agents of it. Imported by nobody who was not asked to look for it.

NIXL is never needed: its wheel asks for torch, which it does not use here, and it is large. Whoever wants it installs it by `INSTALL`.
Its licence is MIT and Apache-2.0, with modules for NVIDIA's network cards in the wheel that are NVIDIA's own and may not be passed on
apart from it; Octavo neither contains nor passes on any of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Final

INSTALL: Final = "pip install --no-deps nixl-cu12==1.5.1"
_MODULES: Final = ("nixl_cu12", "nixl_cu13")


class NoNixl(OSError):
    """NIXL is not installed, or does not load; the message says which."""


def name() -> str | None:
    """The module that is installed."""
    return next((module for module in _MODULES if importlib.util.find_spec(module)), None)


def agent(who: str) -> Any:
    """An agent without backends, and without NIXL's progress thread, which would never sleep: whoever has it makes it go on.

    Raises:
        NoNixl: There is none to be had.
    """
    module = name()
    if module is None:
        raise NoNixl(f"NIXL is not installed ({INSTALL})")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        api = importlib.import_module(f"{module}._api")
        return api.nixl_agent(who, api.nixl_agent_config(backends=[], enable_prog_thread=False))
    except Exception as error:  # a library that is missing, or whatever its constructor meets
        raise NoNixl(f"{module} does not load: {' '.join(str(error).split())[:200]}") from None


def why(error: BaseException) -> str:
    """One of NIXL's errors in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
