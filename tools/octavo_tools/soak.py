"""Half an hour of mixed load with random disconnects against a real server: memory must not grow, the books must close.

Part of `tools/nightly`; alone: `tools/soak --minutes 5`. Memory is the proportional set size of all processes of the server, read
once a minute while nothing runs. A server fills its caches and allocators first (lazy imports, tokenizer caches, arenas of threads),
so what is judged is the middle of the last readings against the middle of the first ones after the warm-up, a quarter of the time.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from octavo_tools.workspace import ROOT

WARM_SHARE = 0.25
MAX_GROWTH = 0.01
PATIENCE_S = 600
"""Of a client: a machine that has other things to do is slow, and that is no fault."""
NUM_CLIENTS = 12
NUM_READINGS = 3
"""At each end; their middle counts."""
OPTIONS = (
    "--kv-cache-memory-bytes=48M",
    "--max-num-seqs=16",
    "--disable-access-log",
    "--api-server-count=2",
    "--watchdog-timeout=120",
)
"""A machine that has other things to do for a minute is no fault of the server's, and a core replaced would begin with fresh memory."""
WORDS = [
    "sea",
    "ship",
    "harbour",
    "wind",
    "salt",
    "rope",
    "tide",
    "gull",
    "storm",
    "light",
    "captain",
    "letter",
    "island",
    "map",
    "gold",
    "song",
]
IN_ORDER = "the books of the cache are in order"


@dataclasses.dataclass
class Load:
    """What clients did."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    pause: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Memory while nothing runs, by process."""

    time_s: float
    sizes: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Of the whole server."""
        return sum(self.sizes.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Soak; 1 when something grew, broke or was left over."""
    parser = argparse.ArgumentParser(prog="tools/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="time under load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the clients' choices (default: %(default)s)")
    args = parser.parse_args(argv)
    return soak(args.minutes * 60, args.seed)


def soak(seconds: float, seed: int) -> int:
    """Run the load and judge."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        command = [str(Path(sys.executable).parent / "octavo"), "serve", "--host=127.0.0.1", "--port=0", *OPTIONS]
        environment = os.environ | {"OCTAVO_AUDIT": "1"}
        with subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment) as process:
            try:
                port = _port(Path(log.name), process)
                problems, load, sizes = _under_load(port, process, seconds, seed)
            finally:
                process.terminate()
                status = process.wait(60)
        text = Path(log.name).read_text()
    if status:
        problems.append(f"the server ended with status {status}")
    if IN_ORDER not in text:
        problems.append(f"the core did not say that {IN_ORDER}")
    if "Traceback" in text:
        problems.append("the log has a traceback:\n" + text[text.index("Traceback") :][:2000])
    print(f"soak: {seconds / 60:.0f} minutes, {dict(sorted(load.outcomes.items()))}")
    print(sizes)
    for problem in problems:
        print(f"FAIL {problem}")
    return 1 if problems else 0


def _under_load(port: int, process: subprocess.Popen[bytes], seconds: float, seed: int) -> tuple[list[str], Load, str]:
    load = Load()
    clients = [threading.Thread(target=_client, args=(port, load, random.Random(seed * 1000 + i))) for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    readings = _read_until_the_end(port, process, seconds, load)
    problems, sizes = judge(readings, seconds)
    if left := {name: value for name, value in _gauges(port).items() if value}:
        problems.append(f"idle, but {left}")
    load.stop.set()
    load.pause.clear()
    for client in clients:
        client.join()
    problems += [f"{count} requests ended with {what}" for what, count in load.outcomes.items() if what.startswith("bad")]
    return problems, load, sizes


def _read_until_the_end(port: int, process: subprocess.Popen[bytes], seconds: float, load: Load) -> list[Reading]:
    readings: list[Reading] = []
    start_s = time.monotonic()
    for end_s in range(60, int(seconds) + 60, 60):
        load.pause.clear()
        time.sleep(max(0.0, start_s + min(end_s, seconds) - time.monotonic()))
        sizes = _idle_memory(port, process, load)
        readings.append(Reading(time.monotonic() - start_s, sizes))
        print(f"  {end_s / 60:4.0f} min {readings[-1].total_bytes / 2**20:8.1f} MiB {_in_mib(sizes)}", flush=True)
    return readings


def judge(readings: Sequence[Reading], seconds: float) -> tuple[list[str], str]:
    """What is wrong with how memory went, and a line that says how it went."""
    warm = [one for one in readings if one.time_s >= seconds * WARM_SHARE] or list(readings)
    first, last = warm[:NUM_READINGS], warm[-NUM_READINGS:]
    before, after = (statistics.median(one.total_bytes for one in some) for some in (first, last))
    growth = after / before - 1
    problems = [f"memory grew by {100 * growth:.2f} %, at most {100 * MAX_GROWTH:g} % is allowed"] if growth > MAX_GROWTH else []
    grown = {name: size - first[0].sizes[name] for name, size in last[-1].sizes.items() if name in first[0].sizes}
    line = f"memory: {before / 2**20:.1f} MiB after {first[0].time_s / 60:.0f} minutes, {after / 2**20:.1f} MiB at the end, {100 * growth:+.2f} %"
    return problems, f"{line}; by process {_in_mib(grown)}"


def _in_mib(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())


def _idle_memory(port: int, process: subprocess.Popen[bytes], load: Load) -> dict[str, int]:
    """Memory of each process of the server, once nothing runs."""
    load.pause.set()
    end = time.monotonic() + PATIENCE_S
    while any(_gauges(port).values()) and time.monotonic() < end:
        time.sleep(0.5)
    time.sleep(1)
    root = psutil.Process(process.pid)
    found = [("keeper", root), *((one.name(), one) for one in root.children(recursive=True))]
    return {f"{name}[{one.pid}]": one.memory_full_info().pss for name, one in found}


def _gauges(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(found[1]) for name in names if (found := re.search(rf"^octavo:{name}\{{[^}}]*\}} (\S+)", text, re.M))}


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + 300
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"ready on http://127\.0\.0\.1:(\d+)", log.read_text()):
            return int(found[1])
        time.sleep(0.5)
    raise RuntimeError(f"octavo serve was not ready:\n{log.read_text()[-2000:]}")


def _client(port: int, load: Load, rng: random.Random) -> None:
    while not load.stop.is_set():
        if load.pause.is_set():
            time.sleep(0.2)
            continue
        try:
            outcome = _one_request(port, rng)
        except (OSError, http.client.HTTPException) as error:
            outcome = f"bad {type(error).__name__}"
        load.outcomes[outcome] += 1


def _one_request(port: int, rng: random.Random) -> str:
    """One request of a random kind, given up at a random moment one time in three."""
    path, body = _body(rng)
    leaves = rng.random() < 1 / 3
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        if leaves and not body.get("stream"):
            time.sleep(rng.random())
            return "left"
        answer = connection.getresponse()
        if leaves:
            answer.read(rng.randrange(1, 2000))
            return "left"
        data = answer.read()
        if answer.status == 200 and body.get("stream") and (b'"error"' in data or not data.endswith(b"data: [DONE]\n\n")):
            return "bad stream"
        return str(answer.status) if answer.status in (200, 400, 503) else f"bad {answer.status}"
    finally:
        connection.close()


def _body(rng: random.Random) -> tuple[str, dict[str, object]]:
    """Path and body of a request: completions, chats and tokenisation, some of them wrong."""
    shared = " ".join(random.Random(rng.randrange(5)).choices(WORDS, k=200))
    tail = " ".join(rng.choices(WORDS, k=rng.randrange(1, 300)))
    prompt = shared + " " + tail if rng.random() < 0.5 else tail
    more = rng.choice(
        ({}, {}, {"n": 3}, {"logprobs": 5}, {"stop": ["the"]}, {"temperature": 0}, {"echo": True}, {"logit_bias": {"-1": 1}})
    )
    body = {"max_tokens": rng.randrange(1, 60), "stream": rng.random() < 0.5, **more}
    kind = rng.random()
    if kind < 0.05:
        return "/tokenize", {"prompt": prompt}
    if kind < 0.25 and not {"logprobs", "echo"} & more.keys():
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **body}
    return "/v1/completions", {"prompt": prompt, **body}


if __name__ == "__main__":
    sys.exit(main())
