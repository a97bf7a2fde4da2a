"""Reads and writes of a disk by NIXL: its POSIX plugin with io_uring, or libaio where the system forbids that; GPUDirect Storage where it is asked for.

Who owns what: a worker is an agent with memory and files of its own registration, lent to one call at a time; nothing of NIXL is ever
used by two threads at once. A call waits for its transfer to end, whatever that takes, as `preadv` does: a buffer is never given back
while the kernel may still write into it. Buffers outside the memory that was adopted go through the worker's own.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from octavo_offload._src import nixl
from octavo_offload._src.files import Files, ThreadFiles
from octavo_offload._src.slab import PAGE, address

Mode = Literal["io_uring", "libaio", "gds_mt"]
_FLAGS: Final = {"io_uring": "use_uring", "libaio": "use_aio"}
_GDS: Final = "GDS_MT"
_GPU: Final = Path("/dev/nvidiactl")
_WORKERS: Final = 8
_EAGER_POLLS: Final = 4
_PAUSE_S: Final = 5e-5


class NixlFiles:
    """`Files` by NIXL.

    Args:
        folder: Where files will be: whether it takes direct I/O is tried there.
        mode: How NIXL asks the kernel.

    Raises:
        OSError: This does not work here; the message says why.
    """

    def __init__(self, folder: Path, mode: Mode) -> None:
        self._inner, self._mode = ThreadFiles(folder), mode
        self._lock = threading.Lock()
        self._memory: list[tuple[int, int]] = []
        self._sizes: dict[int, tuple[int, int]] = {}
        self._opened = 0
        self._workers: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._num_workers = 1
        self._workers.put(_Worker(mode, 0))
        plugin = f"NIXL {_GDS}" if mode == "gds_mt" else f"NIXL POSIX with {mode}"
        self.told = f"{plugin}, {'O_DIRECT' if self._inner.is_direct else 'through the page cache: no O_DIRECT here'}"
        self._try(folder)

    def _try(self, folder: Path) -> None:
        """Write and read two blocks: what the system forbids may show only then."""
        path, buffer = folder / ".probe-nixl", mmap.mmap(-1, 4 * PAGE)
        view = memoryview(buffer)
        view[: 2 * PAGE] = bytes(range(256)) * (2 * PAGE // 256)
        try:
            fd = self.open(path, 2 * PAGE)
            try:
                self.write(fd, [view[:PAGE], view[PAGE : 2 * PAGE]], 0)
                self.read(fd, [view[2 * PAGE : 3 * PAGE], view[3 * PAGE :]], 0)
            finally:
                self.close(fd)
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        if view[: 2 * PAGE] != view[2 * PAGE :]:
            raise OSError(errno.EIO, "what was written is not what was read")

    def adopt(self, memory: memoryview) -> None:
        """See `Files`."""
        with self._lock:
            bisect.insort(self._memory, (address(memory), len(memory)))

    def open(self, path: Path, size: int) -> int:
        """See `Files`."""
        fd = self._inner.open(path, size)
        with self._lock:
            self._opened += 1
            self._sizes[fd] = self._opened, size
        return fd

    def read(self, fd: int, into: Sequence[memoryview], offset: int) -> None:
        """See `Files`."""
        self._move("READ", fd, into, offset)

    def write(self, fd: int, data: Sequence[memoryview], offset: int) -> None:
        """See `Files`."""
        self._move("WRITE", fd, data, offset)

    def sync(self, fd: int) -> None:
        """See `Files`."""
        self._inner.sync(fd)

    def close(self, fd: int) -> None:
        """See `Files`."""
        with self._lock:
            self._sizes.pop(fd, None)
        self._inner.close(fd)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        try:
            worker = self._workers.get_nowait()
        except queue.Empty:
            with self._lock:
                number, is_new = self._num_workers, self._num_workers < _WORKERS
                self._num_workers += is_new
            worker = _Worker(self._mode, number) if is_new else self._workers.get()
        try:
            yield worker
        finally:
            self._workers.put(worker)

    def _move(self, verb: str, fd: int, views: Sequence[memoryview], offset: int) -> None:
        with self._lock:
            opened, size = self._sizes[fd]
        if offset < 0 or offset + sum(map(len, views)) > size:
            raise OSError(errno.EINVAL, f"{sum(map(len, views))} bytes at {offset} are not inside a file of {size}")
        with self._worker() as worker:
            worker.see_file(fd, opened, size)
            worker.move(verb, fd, views, offset, self._home)

    def _home(self, view: memoryview) -> tuple[int, int] | None:
        """The adopted memory a buffer lies in."""
        start = address(view)
        with self._lock:
            i = bisect.bisect_right(self._memory, (start, 1 << 63)) - 1
            home = self._memory[i] if i >= 0 else None
        return home if home is not None and start + len(view) <= home[0] + home[1] else None


class _Worker:
    """An agent, for one thread at a time."""

    def __init__(self, mode: Mode, number: int) -> None:
        self._name = f"octavo-files-{number}"
        self._agent = nixl.agent(self._name)
        self._plugin = _GDS if mode == "gds_mt" else "POSIX"
        flags = {} if mode == "gds_mt" else {flag: str(flag == _FLAGS[mode]).lower() for flag in _FLAGS.values()}
        self._call(self._agent.create_backend, self._plugin, flags)
        self._files: dict[int, tuple[int, Any]] = {}
        self._memory: set[tuple[int, int]] = set()
        self._bounce = memoryview(b"")

    @staticmethod
    def _call(what: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return what(*arguments, **named)
        except Exception as error:  # NIXL's errors have no common base but this
            raise OSError(errno.EIO, nixl.why(error)) from None

    def _register(self, where: tuple[int, int, int, str], kind: str) -> Any:
        return self._call(self._agent.register_memory, [where], kind, backends=[self._plugin])

    def see_file(self, fd: int, opened: int, size: int) -> None:
        """Know a file; a descriptor may have been another's before."""
        known = self._files.get(fd)
        if known is not None and known[0] != opened:
            self._call(self._agent.deregister_memory, self._files.pop(fd)[1], backends=[self._plugin])
            known = None
        if known is None:
            self._files[fd] = opened, self._register((0, size, fd, ""), "FILE")

    def _see_memory(self, home: tuple[int, int]) -> None:
        if home not in self._memory:
            self._register((*home, 0, ""), "DRAM")
            self._memory.add(home)

    def _own(self, size: int) -> memoryview:
        if len(self._bounce) < size:
            self._bounce = memoryview(mmap.mmap(-1, size))
            self._see_memory((address(self._bounce), size))
        return self._bounce[:size]

    def move(
        self, verb: str, fd: int, views: Sequence[memoryview], offset: int, home_of: Callable[[memoryview], tuple[int, int] | None]
    ) -> None:
        """Move buffers from or to a file; ends when the kernel has done with them."""
        homes = [home_of(view) for view in views]
        strays = [view for view, home in zip(views, homes, strict=True) if home is None]
        own, copies, used = self._own(sum(map(len, strays))), list[tuple[memoryview, memoryview]](), 0
        near, far, at = [], [], offset
        for view, home in zip(views, homes, strict=True):
            place = view
            if home is None:
                place = own[used : used + len(view)]
                used += len(view)
                copies.append((view, place))
            else:
                self._see_memory(home)
            near.append((address(place), len(place), 0))
            far.append((at, len(place), fd))
            at += len(place)
        if verb == "WRITE":
            _copy((place, view) for view, place in copies)
        self._call(self._transfer, verb, near, far)
        if verb == "READ":
            _copy(copies)

    def _transfer(self, verb: str, near: list[tuple[int, int, int]], far: list[tuple[int, int, int]]) -> None:
        agent = self._agent
        handle = agent.initialize_xfer(verb, agent.get_xfer_descs(near, "DRAM"), agent.get_xfer_descs(far, "FILE"), self._name)
        try:
            state, polls = agent.transfer(handle), 0
            while state == "PROC":
                if polls >= _EAGER_POLLS:
                    time.sleep(_PAUSE_S)
                polls += 1
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise OSError(errno.EIO, f"the transfer ended as {state}")
        finally:
            handle.release()


def _copy(pairs: Iterator[tuple[memoryview, memoryview]] | list[tuple[memoryview, memoryview]]) -> None:
    for into, data in pairs:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


def choose_files(folder: Path) -> Files:
    """The best way to a disk that works here: NIXL with io_uring, with libaio, or threads. `told` says which, and why not another."""
    failed: list[str] = []
    for mode in ("io_uring", "libaio"):
        try:
            return NixlFiles(folder, mode)  # type: ignore[arg-type]
        except nixl.NoNixl as error:
            failed.append(str(error))
            break
        except OSError as error:
            failed.append(f"NIXL with {mode}: {error.strerror or error}")
    files = ThreadFiles(folder)
    files.told += f" ({'; '.join(failed)})"
    return files


def gds_files(folder: Path) -> Files:
    """A disk by GPUDirect Storage, for who asks for it: NIXL's plugin `GDS_MT`, over cuFile. Two blocks are written and compared first.

    Raises:
        OSError: There is no GPU, or the plugin or a library it wants is not here; the message says which.
    """
    if not _GPU.exists():
        raise OSError(errno.ENODEV, f"no NVIDIA GPU is seen: {_GPU} is not there")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return NixlFiles(folder, "gds_mt")
    except nixl.NoNixl:
        raise
    except OSError as error:
        hint = "it wants CUDA's libcufile.so.0 and libcudart.so.12 where the loader finds them"
        raise OSError(error.errno, f"NIXL's plugin {_GDS} does not work: {error.strerror or error}; {hint}") from None
