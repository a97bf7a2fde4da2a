"""Starts the engine core, watches it, and starts another one when it is dead, stopped or stuck. Owns processes; imports no jax.

One thread does everything. A core is given up when its process has ended, when it has not reported for `watchdog_timeout`, or when
its step loop has not come round for so long; it is killed, waited for, its last steps are written down, and the next one starts after
a pause that doubles with every failure. What frontends must know goes out as `State` several times a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from octavo_core import errors
from octavo_core.wire import ModelCard
from octavo_engine._src.process import flight, messages, transport
from octavo_engine._src.process.awake import AwakeClock
from octavo_engine._src.process.config import ProcessConfig
from octavo_engine._src.process.folders import ServerFolder
from octavo_engine._src.process.messages import Phase, Report, State, Table
from octavo_engine.config import EngineConfig

logger = logging.getLogger(__name__)

DEFAULT_CORE: Final = "octavo_engine._src.compose:build_for_process"
TICK_S: Final = 0.1
SAY_S: Final = 0.2
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 30.0
SETTLED_S: Final = 60.0
"""A core that served for so long has proven itself: the next pause is short again."""
SILENT_START_S: Final = 60.0
"""A core that is loading reports too, but may hold Python's lock for long."""
GRACE_S: Final = 10.0


class Supervisor:
    """The keeper of one engine core.

    Size: the life of a core, from its start to what is written down of its end, is one thread's story.

    Args:
        config: The engine's.
        process: How it is watched.
        core: Dotted name of what builds the core from the config, in its process.
    """

    def __init__(self, config: EngineConfig, process: ProcessConfig | None = None, *, core: str = DEFAULT_CORE) -> None:
        self.process = process or ProcessConfig()
        self.ipc, self.folder = "", ""
        self._table: Table = [("core", "a process of its own", "--in-process keeps one")]
        self._folder: ServerFolder | None = None
        self._config, self._core = config, core
        self._context: Any = zmq.Context()
        self._reports, self._states = self._context.socket(zmq.PULL), self._context.socket(zmq.PUB)
        self._child: subprocess.Popen[bytes] | None = None
        self._generation, self._failures = -1, 0
        self._next_start_s: float | None = 0.0
        self._clock = AwakeClock()
        self._heard_s = self._ready_s = self._said_s = 0.0
        self.state = self._state_of(Phase.STARTING)
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._gently = True
        self._thread = threading.Thread(target=self._run, name="octavo-supervisor", daemon=True)

    def start(self) -> Supervisor:
        """Begin to start a core; returns at once, and then `ipc` and `folder` are known. `wait_ready` waits.

        Raises:
            ConfigError: There is no place for sockets, or `--ipc` cannot be had.
        """
        self._folder = ServerFolder()
        self.folder = str(self._folder.path)
        self.ipc, why = transport.choose(self.process.ipc)
        self._table.append(("ipc", self.ipc, why))
        self.clean()
        self._reports.bind(messages.report_endpoint(self.folder))
        self._states.bind(messages.state_endpoint(self.folder))
        self._thread.start()
        return self

    def clean(self) -> None:
        """Give back the shared memory of processes that died, of this server or an earlier one."""
        cleaner = transport.open_transport(self.ipc, Path(self.folder))
        cleaner.clean()
        cleaner.close()

    def wait_ready(self, timeout_s: int | float | None = None) -> ModelCard:
        """Wait for the first core to be ready.

        Raises:
            OctavoError: It could not start.
            TimeoutError: Not in so long.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self.state.phase is not Phase.READY:
            if self.failure is not None:
                raise self.failure
            if end_s is not None and time.monotonic() > end_s:
                raise TimeoutError(f"no engine core was ready within {timeout_s} s")
            time.sleep(0.02)
        assert self.state.card is not None
        return self.state.card

    def startup_table(self) -> Table:
        """What was chosen and why."""
        return [*self._table, *self.state.table]

    @property
    def is_ready(self) -> bool:
        """A core serves."""
        return self.state.phase is Phase.READY

    @property
    def core_pid(self) -> int | None:
        """The process id of the core, while there is one."""
        return self._child.pid if self._child is not None else None

    def close(self, *, at_once: bool = False) -> None:
        """End the core, gently unless `at_once`."""
        self._gently = not at_once
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def __enter__(self) -> Supervisor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # The supervisor's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            self._say(self._state_of(Phase.STOPPED, reason="the server is shutting down"))
        except Exception as error:  # nobody would watch the core any more: the server must end, not go on unwatched
            logger.exception("the engine core cannot be watched any more")
            self.failure = errors.EngineDeadError(f"the engine core cannot be watched any more: {type(error).__name__}: {error}")
            self._gently = False
        if self._child is not None:
            self._end(self._child, gently=self._gently)

    def _turn(self) -> None:
        self._clock.tick()
        if self._child is None and self._next_start_s is not None and self._clock.now_s >= self._next_start_s:
            self._spawn()
        if self._reports.poll(int(TICK_S * 1000)):
            self._hear(messages.decode(self._reports.recv(), Report))
        self._clock.tick()
        self._watch()
        if self._clock.now_s - self._said_s >= SAY_S:
            self._say(self.state)

    def _state_of(self, phase: Phase, **more: Any) -> State:
        return State(generation=self._generation, phase=phase, ipc=self.ipc, watchdog_s=self.process.watchdog_timeout, **more)

    def _say(self, state: State) -> None:
        self.state, self._said_s = state, self._clock.now_s
        self._states.send(messages.encode(state))

    def _spawn(self) -> None:
        self._generation += 1
        spec = messages.CoreSpec(
            core=self._core,
            config=dataclasses.asdict(self._config),
            folder=self.folder,
            generation=self._generation,
            ipc=self.ipc,
            flight=str(self._flight_file()),
        )
        command = [sys.executable, "-m", "octavo_engine.main"]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:  # no memory, or no process more
            self._plan_next(f"it could not be started: {error.strerror}", None)
            return
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._child.stdin.flush()  # and stays open: its end tells the core that we are gone
        self._heard_s = self._clock.now_s
        self._say(self._state_of(Phase.STARTING, reason=self.state.reason))

    def _flight_file(self) -> Path:
        return Path(self.folder) / f"flight-{self._generation}"

    def _hear(self, report: Report) -> None:
        if report.generation != self._generation or self._child is None:
            return
        self._heard_s = self._clock.now_s
        if report.phase is Phase.FAILED:
            self._give_up(f"{report.kind}: {report.error}", report)
        elif report.phase is Phase.READY:
            if report.age_s > self.process.watchdog_timeout:
                self._give_up(f"a step has not ended for {report.age_s:.1f} s")
            elif self.state.phase is not Phase.READY:
                self._ready_s = self._clock.now_s
                self._say(self._state_of(Phase.READY, card=report.card, table=report.table))

    def _watch(self) -> None:
        if self._child is None:
            return
        silent_s = self._clock.now_s - self._heard_s
        most_s = self.process.watchdog_timeout if self.state.phase is Phase.READY else SILENT_START_S
        if (status := self._child.poll()) is not None:
            self._drain_reports()
            if self._child is not None:
                self._give_up(_how_it_ended(status))
        elif silent_s > most_s:
            self._give_up(f"it has not been heard of for {silent_s:.1f} s")

    def _drain_reports(self) -> None:
        """What a core said before it ended."""
        while self._child is not None and self._reports.poll(50):
            self._hear(messages.decode(self._reports.recv(), Report))

    def _give_up(self, reason: str, report: Report | None = None) -> None:
        """Kill the core, tell everybody, plan the next one."""
        child, self._child = self._child, None
        if child is None:
            return
        was_ready = self.state.phase is Phase.READY
        self._say(self._state_of(Phase.FAILED, reason=f"the engine core is gone: {reason}"))
        self._end(child, gently=False)
        self._write_flight()
        self.clean()
        self._plan_next(reason, report, was_ready=was_ready)

    def _plan_next(self, reason: str, report: Report | None, *, was_ready: bool = False) -> None:
        """When another core is started; a first one that never served is the last."""
        reason = f"the engine core is gone: {reason}"
        if not was_ready and self._ready_s == 0.0:
            self.failure = _error_of(report, reason)
            self._next_start_s = None
            return
        if was_ready and self._clock.now_s - self._ready_s > SETTLED_S:
            self._failures = 0
        pause_s = min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._failures += 1
        self._next_start_s = self._clock.now_s + pause_s
        logger.error("%s; the next one starts in %.2g s", reason, pause_s)

    def _write_flight(self) -> None:
        folder = self.process.flight_recorder_dir
        source = self._flight_file()
        if folder != "off":
            name = f"octavo-flight-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{self._generation}.jsonl"
            target = Path(folder or _state_folder()) / name
            try:
                if count := flight.dump(source, target):
                    logger.error("the last %d steps of the engine core are in %s", count, target)
            except OSError as error:
                logger.error("the last steps of the engine core could not be written to %s: %s", target, error)
        flight.remove(source)

    def _end(self, child: subprocess.Popen[bytes], *, gently: bool) -> None:
        if gently and child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()


def _state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "octavo"


def _how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "it was killed (SIGKILL), as happens when memory runs out"
    if status < 0:
        return f"it was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"it ended with status {status}"


def _error_of(report: Report | None, reason: str) -> BaseException:
    """The core's own error, where it is one a caller can mend."""
    kind = getattr(errors, report.kind or "", None) if report is not None else None
    if report is not None and isinstance(kind, type) and issubclass(kind, errors.OctavoError):
        return kind(report.error)
    return errors.EngineDeadError(reason)
