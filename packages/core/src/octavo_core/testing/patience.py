"""How long a test waits for what must happen.

A wait that is too short says something about the machine, not about the program: beside other work a core takes ten times as long
to build an engine, to start a process or to answer. A test waits this long for what must come, and asserts on order and state.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 600.0
"""Seconds. Long enough for a busy machine, short enough that a run that hangs ends."""
