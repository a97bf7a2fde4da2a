"""How fast blocks move: `python -m octavo_offload.bench [--json FILE] [--quick] [--folder PATH]`.

Each tier is timed beside what it stands on, in the same run and in turn: host memory beside `memcpy`, the disk beside the same reads and
writes without headers, checksums and books (NIXL's where the tier has chosen it), a store over loopback beside a bare socket, and where
NIXL or Mooncake's transfer engine is installed one read one-sidedly (`remote_ucx`, `remote_mooncake`) beside the library's own reads.
`tier_<name>_<way>_fraction` is the one over the other, `tier_<name>_fraction` the worse of both ways. `disk_threads_*` is a bare loop of `preadv` and `pwritev` in threads around the page cache, `disk_fio_*` what fio says where it is installed.
Blocks are 1 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from octavo_core.bench import Report, time_call
from octavo_core.tiers import Answer, Tier
from octavo_offload import DiskTier, Files, HostTier, Jobs, RemoteConfig, RemoteTier, ThreadFiles, checksum
from octavo_offload._src.nixl_files import choose_files
from octavo_offload._src.remote import transports
from octavo_offload._src.setup import COPY_THREADS, DISK_THREADS
from octavo_offload._src.slab import Slab

BLOCK_BYTES: Final = 1 << 20
GOALS: Final = {f"tier_{name}_fraction": 0.8 for name in ("host", "disk", "remote_ucx", "remote_mooncake")}


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _in_turn(pairs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each, run in turn so that what else the machine does meets all of them."""
    times: list[list[float]] = [[] for _ in pairs]
    for i in range(rounds + 1):
        for taken, run in zip(times, pairs, strict=True):
            seconds = _seconds(run)
            if i:  # the first round warms up
                taken.append(seconds)
    return [statistics.median(t) for t in times]


def _wait(tier: Tier, ticket: int) -> None:
    while True:
        for done in tier.poll():
            if done.ticket == ticket:
                if Answer.MISS in done.answers:
                    raise RuntimeError("a block of the bench was missed; give the folder more room")
                return
        time.sleep(0.0005)


class _Blocks:
    """Blocks to put, buffers to get into, and new keys for every round."""

    def __init__(self, count: int) -> None:
        self.count, self._round = count, 0
        source, target = Slab(count, BLOCK_BYTES), Slab(count, BLOCK_BYTES)
        self.source = [source.slot(i) for i in range(count)]
        self.target = [target.slot(i) for i in range(count)]
        rng = np.random.default_rng(0)
        for view in (*self.source, *self.target):
            np.frombuffer(view, np.uint8)[:] = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)

    def new_keys(self) -> list[bytes]:
        """Keys nobody has."""
        self._round += 1
        self.keys = [(self._round << 32 | i).to_bytes(32, "little") for i in range(self.count)]
        return self.keys

    def copy(self, first: int, step: int) -> None:
        """`memcpy` of every `step`th block, in this thread, without the interpreter's lock."""
        for source, target in zip(self.source[first::step], self.target[first::step], strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _measure(
    report: Report, name: str, tier: Tier, blocks: _Blocks, raw: Sequence[Callable[[], None]], rounds: int, told: str = ""
) -> None:
    def write() -> None:
        _wait(tier, tier.put(blocks.new_keys(), blocks.source))

    def read() -> None:
        _wait(tier, tier.get(blocks.keys, blocks.target))

    raw_write, raw_read = raw
    size = blocks.count * BLOCK_BYTES / 1e9
    write_s, read_s, raw_write_s, raw_read_s = _in_turn([write, read, raw_write, raw_read], rounds)
    for way, seconds, below_s in (("write", write_s, raw_write_s), ("read", read_s, raw_read_s)):
        report.add(f"tier_{name}_{way}", size / seconds, "GB/s", rounds, f"below it {size / below_s:.2f}")
        report.add(f"tier_{name}_{way}_fraction", below_s / seconds, "x", rounds, "of the speed below it")
    worse = min(raw_write_s / write_s, raw_read_s / read_s)
    report.add(f"tier_{name}_fraction", worse, "x", rounds, f"the worse of both ways; {told}" if told else "the worse of both ways")


def run(report: Report, folder: Path, *, quick: bool) -> None:
    """Time both tiers."""
    count, rounds = (16, 3) if quick else (64, 15)
    blocks, jobs = _Blocks(count), Jobs(COPY_THREADS, "bench")
    with ThreadPoolExecutor(COPY_THREADS) as pool:

        def copy() -> None:
            list(pool.map(lambda i: blocks.copy(i, COPY_THREADS), range(COPY_THREADS)))

        _measure(report, "host", HostTier(count * BLOCK_BYTES, BLOCK_BYTES, jobs), blocks, (copy, copy), rounds)
    timing = time_call(lambda: checksum(bytes(32), blocks.source[0]), budget_s=0.05)
    report.add("checksum", BLOCK_BYTES / timing.median_us / 1e3, "GB/s", timing.n, "one thread, in cache")
    jobs.close()
    _measure_remote(report, _Blocks(16), rounds)
    for name, way in transports.ONE_SIDED.items() if not quick else ():
        if way.is_here():
            _measure_one_sided(report, name, _Blocks(16), rounds)
    _measure_disk(report, folder, blocks, rounds)
    if not quick:
        _measure_fio(report, folder)


def _measure_remote(report: Report, blocks: _Blocks, rounds: int) -> None:
    """A store in this process and an agent, over loopback, beside the same bytes through a TCP socket between two threads."""
    from octavo_offload.node import Blocks, Node

    node = Node("127.0.0.1:0", Blocks(8 * blocks.count * BLOCK_BYTES), b"bench" * 8)
    node.start()
    config = RemoteConfig(
        target=node.address, secret=b"bench" * 8, window_bytes=blocks.count * BLOCK_BYTES, deadline_s=60.0, join_s=60.0
    )
    tier = RemoteTier(config, BLOCK_BYTES, bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

        def send() -> None:
            for view in blocks.source:
                ours.sendall(view)

        def raw() -> None:
            sending = pool.submit(send)
            for view in blocks.target:
                theirs.recv_into(view, len(view), socket.MSG_WAITALL)
            sending.result()

        with ours, theirs:
            _measure(report, "remote", tier, blocks, (raw, raw), rounds)
    tier.close()
    node.stop(0.0)


_STORE: Final = """
import sys
from octavo_offload.node import Blocks, Node
from octavo_offload._src.remote.serve import readable
blocks = Blocks(int(sys.argv[2]))
node = Node("127.0.0.1:0", blocks, b"bench" * 8, readable=readable(blocks, sys.argv[1], None, "127.0.0.1"))
node.start()
print(node.address, flush=True)
sys.stdin.read()
"""
_RAW: Final = """
import os, sys, time
from octavo_offload._src.remote import messages as m, transports
from octavo_offload._src.remote.peer import Peer
from octavo_offload._src.remote.shared import SharedSlab
name, address, (count, size) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
peer = Peer(m.Start(address, bytes(32), size, size, count, [name], 60.0, b"bench" * 8))
remote = transports.reader(name, SharedSlab(count, size)).join(peer.joined.metadata)
for line in sys.stdin:
    begin = time.perf_counter()
    remote.read([(i * size, i) for i in range(count)], size, 60.0)
    print(time.perf_counter() - begin, flush=True)
os._exit(0)
"""


def _measure_one_sided(report: Report, name: str, blocks: _Blocks, rounds: int) -> None:
    """A store and an agent in processes of their own, over what the library chooses, beside its own reads without lease, pipe, copy and checksum."""
    with _child(_STORE, name, str(8 * blocks.count * BLOCK_BYTES)) as store:
        address = _line(store)
        config = RemoteConfig(
            target=address, secret=b"bench" * 8, window_bytes=blocks.count * BLOCK_BYTES, deadline_s=60.0, join_s=60.0
        )
        tier = RemoteTier(config, BLOCK_BYTES, bytes(32))
        _wait(tier, tier.put(blocks.new_keys(), blocks.source))
        with _child(_RAW, name, address, str(blocks.count), str(BLOCK_BYTES)) as reader:
            raw: list[float] = []

            def read_raw() -> None:
                print(file=reader.stdin, flush=True)
                raw.append(float(_line(reader)))

            read_s, _ = _in_turn([lambda: _wait(tier, tier.get(blocks.keys, blocks.target)), read_raw], rounds)
        told = tier.told.partition(";")[0]
        tier.close()
    size, below_s = blocks.count * BLOCK_BYTES / 1e9, statistics.median(raw[1:])
    report.add(f"tier_remote_{name}_read", size / read_s, "GB/s", rounds, f"{told}; below it {size / below_s:.2f}")
    report.add(f"tier_remote_{name}_fraction", below_s / read_s, "x", rounds, "of the library's own reads")


@contextlib.contextmanager
def _child(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def _line(child: subprocess.Popen[str]) -> str:
    line = child.stdout.readline().strip() if child.stdout is not None else ""
    if not line:
        raise RuntimeError("a process of the bench has ended before its time")
    return line


def _measure_disk(report: Report, folder: Path, blocks: _Blocks, rounds: int) -> None:
    """The tier beside its own way to the disk, and that beside a bare loop of threads."""
    size = 2 * blocks.count * BLOCK_BYTES
    jobs = Jobs(DISK_THREADS, "bench-disk")
    tier = DiskTier(folder, size + (16 << 20), BLOCK_BYTES, bytes(32), jobs, segment_bytes=32 << 20)
    files, threads = choose_files(folder), ThreadFiles(folder)
    for views in (blocks.source, blocks.target):
        for view in views:
            tier.adopt(view)
            files.adopt(view)
    with (
        ThreadPoolExecutor(DISK_THREADS) as pool,
        _open(files, folder / "raw", blocks) as fd,
        _open(threads, folder / "bare", blocks) as bare,
    ):

        def raw(move: Callable[[int, Sequence[memoryview], int], None], fd: int, views: Sequence[memoryview]) -> Callable[[], None]:
            def run() -> None:
                list(pool.map(lambda i: move(fd, [views[i]], i * BLOCK_BYTES), range(blocks.count)))

            return run

        ways = raw(files.write, fd, blocks.source), raw(files.read, fd, blocks.target)
        _measure(report, "disk", tier, blocks, ways, rounds, tier.told.partition(";")[0])
        bare_s = _in_turn([raw(threads.write, bare, blocks.source), raw(threads.read, bare, blocks.target)], rounds)
    for way, seconds in zip(("write", "read"), bare_s, strict=True):
        report.add(f"disk_threads_{way}", blocks.count * BLOCK_BYTES / 1e9 / seconds, "GB/s", rounds, threads.told)
    jobs.close()
    tier.close()


@contextlib.contextmanager
def _open(files: Files, path: Path, blocks: _Blocks) -> Iterator[int]:
    fd = files.open(path, blocks.count * BLOCK_BYTES)
    try:
        yield fd
    finally:
        files.close(fd)
        path.unlink()


def _measure_fio(report: Report, folder: Path) -> None:
    """fio over a file of 64 MiB, 1 MiB at a time, in each of as many threads as the tier has, around the page cache; a line where it is not here."""
    if shutil.which("fio") is None:
        print("disk_fio_*: left out, fio is not installed")
        return
    for way in ("write", "read"):
        words = [
            "fio",
            f"--name={way}",
            f"--filename={folder / 'fio'}",
            f"--rw={way}",
            "--bs=1M",
            "--size=64M",
            "--direct=1",
            "--thread",
        ]
        words += ["--ioengine=psync", f"--numjobs={DISK_THREADS}", "--group_reporting", "--output-format=json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            report.add(f"disk_fio_{way}", job[way]["bw_bytes"] / 1e9, "GB/s", 1, "fio psync, O_DIRECT")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m octavo_offload.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a check that it runs")
    parser.add_argument("--folder", type=Path, help="where to try the disk (default: a temporary folder)")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    report = Report("octavo_offload", GOALS)
    with tempfile.TemporaryDirectory(prefix="octavo-offload-", dir=arguments.folder) as folder:
        run(report, Path(folder), quick=arguments.quick)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
