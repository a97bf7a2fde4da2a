"""A server for one conversation: started beside the terminal, ended with it. Touches processes; knows the command line of `octavo serve`."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from octavo_server._src.chat_client import ChatClientError

_READY = re.compile(rb"Octavo is ready on (http://\S+)")
_PAUSE_S = 0.1
_STOP_S = 20.0

# The server gets no Ctrl-C of the terminal, being in a session of its own, and on Linux does not outlive its starter.
_PROGRAM = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
from octavo_server.cli import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def embedded_server(options: Sequence[str]) -> Iterator[str]:
    """The address of a server on this machine with these options of `octavo serve`, while the block runs.

    Raises:
        ChatClientError: It did not start; the message is its own last line.
    """
    with tempfile.TemporaryFile() as log:
        argv = [sys.executable, "-c", _PROGRAM, "serve", "--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "1", *options]
        process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            yield _address(process, log.fileno())
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    """Wait until it says where it is."""
    while True:
        ended = process.poll() is not None
        told = os.pread(log, 1 << 20, 0)
        if found := _READY.search(told):
            return found[1].decode()
        if ended:
            lines = told.decode("utf-8", "replace").strip().splitlines() or [f"status {process.returncode}"]
            raise ChatClientError(f"the engine did not start: {lines[-1].removeprefix('octavo: ')}")
        time.sleep(_PAUSE_S)
