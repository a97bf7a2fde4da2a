"""`octavo serve` as several processes: this one keeps the port, the frontends and (through a supervisor) the engine core.

Who ends what: a frontend that ends is replaced, one that never served ends the server; SIGTERM drains the frontends, then the core; a
second one ends everything at once. When this process is gone the others see their standard input end, and end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, runtime_checkable

import msgspec

from octavo_core.errors import EngineDeadError
from octavo_core.wire import ModelCard
from octavo_server._src.config import ServerConfig
from octavo_server._src.sockets import bind, raise_file_limit, url_of

LOG = logging.getLogger("octavo.server")
_TICK_S: Final = 0.1
_GRACE_S: Final = 6.0
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 15.0
BEAT_S: Final = 1.0
"""A frontend's event loop says so often that it comes round."""
_SILENT_S: Final = 15.0
"""A frontend that says nothing for so long is replaced: it would take connections and answer none."""
_MOST_AT_ONCE_S: Final = 0.5
"""Of a silence between two looks: this process may have been stopped, or the machine asleep."""


class FrontendSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend is started with, on its standard input. Numbers of descriptors it inherits: where it listens, where it says that it is up and comes round."""

    index: int
    config: dict[str, Any]
    folder: str
    ipc: str
    sockets: list[int]
    up: int
    replaces: bool = False
    """Another one served in its place before."""


@runtime_checkable
class Keeper(Protocol):
    """A supervisor, as far as it matters here. `folder` and `ipc` are known once it is started."""

    folder: str
    ipc: str
    failure: BaseException | None

    @property
    def is_ready(self) -> bool:
        """A core serves."""

    def start(self) -> Any:
        """Begin to start a core."""

    def clean(self) -> None:
        """Give back the shared memory of processes that died."""

    def close(self, *, at_once: bool = False) -> None:
        """End it."""

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen."""

    def wait_ready(self, timeout_s: int | float | None = None) -> ModelCard:
        """The card of a ready core."""


@dataclasses.dataclass
class Kept:
    """What is told when everything is up: an engine as far as the start-up table needs one."""

    card: ModelCard
    table: list[tuple[str, str, str]]

    def startup_table(self) -> list[tuple[str, str, str]]:
        """What was chosen, its value, why."""
        return self.table

    def close(self) -> None:
        """Nothing: the supervisor ends the core."""


class _Frontend:
    """One frontend process, and the next ones in its place."""

    def __init__(self, spec: FrontendSpec) -> None:
        self._spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.is_up = False
        self._silent_s, self._looked_s = 0.0, time.monotonic()
        self._failures, self._next_s = 0, 0.0
        self._up = -1

    def spawn(self) -> None:
        self._silent_s = 0.0
        self._up, write = os.pipe()
        os.set_blocking(self._up, False)
        spec = msgspec.structs.replace(self._spec, up=write, replaces=self.is_up)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo_server.frontend"],
            stdin=subprocess.PIPE,
            pass_fds=[*spec.sockets, write],
            start_new_session=True,
        )
        os.close(write)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self.process.stdin.flush()  # and stays open

    def watch(self) -> bool:
        """Notice that it is up, or has ended; True when it has ended just now.

        Raises:
            OctavoError: It ended without ever having served.
        """
        if self.process is None:
            if time.monotonic() >= self._next_s:
                self.spawn()
            return False
        self._listen()
        if (status := self.process.poll()) is None:
            return False
        self.close()
        if not self.is_up:
            raise EngineDeadError(f"a frontend ended with status {status} before it served; what it said stands above")
        pause_s = min(_FIRST_PAUSE_S * 2**self._failures, _LONGEST_PAUSE_S)
        self._failures += 1
        self._next_s = time.monotonic() + pause_s
        LOG.error("a frontend ended with status %s; another one starts in %.2g s", status, pause_s)
        return True

    def _listen(self) -> None:
        """Take in its signs of life; end one that gives none any more."""
        now_s = time.monotonic()
        self._silent_s, self._looked_s = self._silent_s + min(now_s - self._looked_s, _MOST_AT_ONCE_S), now_s
        with contextlib.suppress(BlockingIOError):
            if os.read(self._up, 4096):
                self.is_up, self._silent_s = True, 0.0
        if self.is_up and self._silent_s > _SILENT_S and self.process is not None and self.process.poll() is None:
            LOG.error("a frontend has not come round for %.0f s and is ended", self._silent_s)
            self.process.kill()
            self.process.wait()

    def send(self, sig: int) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(sig)

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def close(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        os.close(self._up)
        self.process = None


def serve_processes(config: ServerConfig, keeper: Keeper, *, announce: Callable[[str, Kept], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        ConfigError: The port is taken.
        OctavoError: The core, or a frontend, could not start.
    """
    raise_file_limit()
    sock = bind(config.host, config.port)
    with contextlib.ExitStack() as stack:
        stack.callback(sock.close)
        signals = stack.enter_context(_counted_signals())
        fleet = _Fleet(config, keeper, sock)
        stack.callback(fleet.close)
        fleet.start()
        fleet.run(signals, announce)
        fleet.drain(signals)


@contextlib.contextmanager
def _counted_signals() -> Iterator[list[int]]:
    """Signals that ask this process to stop, as they come."""
    seen: list[int] = []
    wanted = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a closed terminal, but for nohup
        wanted.append(signal.SIGHUP)
    kept = {one: signal.signal(one, lambda number, _: seen.append(number)) for one in wanted}
    try:
        yield seen
    finally:
        for one, handler in kept.items():
            signal.signal(one, handler)


class _Fleet:
    def __init__(self, config: ServerConfig, keeper: Keeper, sock: socket.socket) -> None:
        self._config, self._keeper, self._sock = config, keeper, sock
        self._frontends: list[_Frontend] = []
        self._at_once = False

    def start(self) -> None:
        self._keeper.start()
        values = dataclasses.asdict(self._config)
        spec: dict[str, Any] = {"config": values, "folder": self._keeper.folder, "ipc": self._keeper.ipc, "up": -1}
        spec["sockets"] = [self._sock.fileno()]
        self._frontends = [_Frontend(FrontendSpec(index=i, **spec)) for i in range(self._config.api_server_count)]
        for frontend in self._frontends:
            frontend.spawn()

    def run(self, signals: list[int], announce: Callable[[str, Kept], None]) -> None:
        """Until a signal comes."""
        was_announced = False
        while not signals:
            if self._keeper.failure is not None:
                raise self._keeper.failure
            for frontend in self._frontends:
                if frontend.watch():
                    self._keeper.clean()
            if not was_announced and self._keeper.is_ready and all(frontend.is_up for frontend in self._frontends):
                was_announced = True
                with contextlib.suppress(OSError):  # nobody reads standard output any more: not a reason to stop serving
                    announce(url_of(self._config.host, self._sock.getsockname()[1], scheme=self._config.scheme), self._kept())
            time.sleep(_TICK_S)

    def _kept(self) -> Kept:
        count = self._config.api_server_count
        rows = [("frontends", str(count), "--api-server-count")]
        return Kept(self._keeper.wait_ready(), [*rows, *self._keeper.startup_table()])

    def drain(self, signals: list[int]) -> None:
        """End the frontends, gently unless another signal comes."""
        self._sock.close()
        for frontend in self._frontends:
            frontend.send(signal.SIGTERM)
        end_s = time.monotonic() + self._config.shutdown_timeout + _GRACE_S
        while not all(frontend.has_ended for frontend in self._frontends):
            self._at_once = len(signals) > 1
            if self._at_once or time.monotonic() > end_s:
                break
            time.sleep(_TICK_S)

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.close()
        self._keeper.close(at_once=self._at_once)
