"""A program in a terminal of its own. Started without `pty.fork`: forking a process that has loaded JAX is not safe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

_START = """
import fcntl, os, signal, sys, termios
for one in signal.SIGINT, signal.SIGQUIT, signal.SIGHUP:  # as a shell at a terminal leaves them, whatever tests run under
    signal.signal(one, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvpe(sys.argv[1], sys.argv[1:], os.environ)
"""


def start_in_terminal(*program: str, **variables: str) -> tuple[int, int]:
    """Its process id, and our end of the terminal that is its input, its output and its controlling terminal."""
    ours, its = pty.openpty()
    command = [sys.executable, "-c", _START, *program]
    child = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, start_new_session=True, env=os.environ | {"TERM": "dumb", **variables}
    )
    os.close(its)
    child.returncode = 0  # whoever asked waits for it by its id
    return child.pid, ours
