"""What the operating system lets this process have. Touches resource limits."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """Let this process and its children open as many files as they may: a connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
