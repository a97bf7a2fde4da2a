"""A process that ends when the one that started it does, however that came to its end. Touches the process.

Two ways, since neither is enough: the parent keeps standard input open, so its end is seen by a thread everywhere; and on Linux the system
kills a child that could not run a thread, because it is stopped or stuck.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from typing import Final

_SET_DEATH_SIGNAL: Final = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


def end_with_the_parent() -> None:
    """Call once what was to be read of standard input is read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_wait_for_the_end, name="octavo-orphan", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)
