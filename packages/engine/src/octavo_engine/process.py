"""The engine core in a process of its own: who starts it, and who talks to it. Imports no jax.

`Supervisor` starts and watches a core; any number of `RemoteEngine` in any processes talk to the core it keeps; `ProcessConfig` says how.
"""

from __future__ import annotations

from octavo_engine._src.process.config import ProcessConfig
from octavo_engine._src.process.flight import read as read_flight
from octavo_engine._src.process.orphan import end_with_the_parent
from octavo_engine._src.process.remote import RemoteEngine
from octavo_engine._src.process.supervisor import DEFAULT_CORE, Supervisor

__all__ = ["DEFAULT_CORE", "ProcessConfig", "RemoteEngine", "Supervisor", "end_with_the_parent", "read_flight"]
