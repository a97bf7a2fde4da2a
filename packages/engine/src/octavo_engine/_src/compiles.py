"""Counts compilations, so that one in service shows. JAX calls back on every backend compilation of the process."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Compilations since `arm` was called."""

    def __init__(self) -> None:
        self.count = 0
        self._armed = False
        self._listening = True
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def arm(self) -> None:
        """From here on a compilation counts."""
        self._armed = True

    def close(self) -> None:
        """Stop listening."""
        if self._listening:
            self._listening = False
            jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **_: object) -> None:
        if self._armed and event == _EVENT:
            self.count += 1
