"""An engine core as a process: `python -m octavo_engine.main`, started by a supervisor with a `CoreSpec` as one line on standard input.

The process ends with its supervisor, whatever it is doing then (`orphan`).
"""

from __future__ import annotations

import logging
import os
import pkgutil
import signal
import sys
from pathlib import Path

import setproctitle

from octavo_core.errors import OctavoError
from octavo_engine._src.process import messages
from octavo_engine._src.process.flight import FlightRecorder
from octavo_engine._src.process.hub import Hub
from octavo_engine._src.process.loop import BuiltCore, CoreLoop, Reporter
from octavo_engine._src.process.orphan import end_with_the_parent
from octavo_engine._src.process.transport import open_transport

TITLE = "octavo-engine-core"
_FAILED = 70
logger = logging.getLogger("octavo.engine")


def main() -> int:
    """Build, serve until told to stop; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    setproctitle.setproctitle(TITLE)
    spec = messages.decode_json(sys.stdin.buffer.readline(), messages.CoreSpec)
    end_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    reporter = Reporter(spec)
    recorder = FlightRecorder(Path(spec.flight))
    try:
        built: BuiltCore = pkgutil.resolve_name(spec.core)(spec.config, recorder)
        setproctitle.setproctitle(f"{TITLE} {built.card.name}")
        _serve(spec, built, reporter)
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.exception("the engine core cannot go on")
        reporter.failed(error)
        sys.stderr.flush()
        os._exit(_FAILED)  # whatever state threads and devices are in
    return 0


def _serve(spec: messages.CoreSpec, built: BuiltCore, reporter: Reporter) -> None:
    transport = open_transport(spec.ipc, Path(spec.folder))
    hub = Hub(built.core, transport, Path(spec.folder), messages.core_endpoint(spec.folder, spec.generation))
    loop = CoreLoop(built, hub)

    def stop(*_: object) -> None:
        loop.stopping = True

    signal.signal(signal.SIGTERM, stop)
    reporter.ready(built, loop)
    loop.run()
    hub.close()
    if os.environ.get("OCTAVO_AUDIT"):
        _audit(built)
    built.close()
    reporter.close()
    transport.close()


def _audit(built: BuiltCore) -> None:
    """Say whether the cache's books close: what a soak looks for at its end."""
    problems = built.audit()
    for problem in problems:
        logger.error("audit: %s", problem)
    if not problems:
        logger.info("the books of the cache are in order")


if __name__ == "__main__":
    sys.exit(main())
