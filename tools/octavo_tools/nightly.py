"""What takes longer than a change may wait for: slow tests, each package's tests with it alone and on a second Python, property tests
with fresh seeds for as long as is given, RDMA in a virtual machine, and acceptance.

Acceptance needs material from outside the tree (`OCTAVO_SHARED`) and starts a real server; without the material it is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo_tools import kernels_sanitized, rdma, second_python, wheels
from octavo_tools.environments import SKIPPED
from octavo_tools.soak import soak
from octavo_tools.workspace import ROOT

PROPERTIES = ("core", "kvcache", "scheduler", "kernels", "offload")
"""Packages whose property tests are worth more time."""

GROUPS = ("ops", "comp", "sample", "stop", "stream", "chat", "tokenize", "err", "load", "cache", "auth")
READY_S = 1_200.0
ANSWER_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Search, then accept; 1 when something was found."""
    parser = argparse.ArgumentParser(prog="tools/nightly", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="time for property tests (default: %(default)s)")
    parser.add_argument("--soak-minutes", type=float, default=30.0, help="time of the soak; 0: none (default: %(default)s)")
    parser.add_argument("--cases", type=int, default=10_000, help="requests of the API fuzz; 0: none (default: %(default)s)")
    parser.add_argument("--skip-acceptance", action="store_true", help="property tests only")
    args = parser.parse_args(argv)
    verdicts = [long_tests(), wheels.main(["--isolated"]), second_python.main(["--", "-q"]), search(args.minutes * 60)]
    verdicts.append(kernels_sanitized.main(["--seed", time.strftime("%Y%m%d")]))
    verdicts.append(rdma.main([]))
    if args.cases:
        verdicts.append(fuzz_api(args.cases))
    if args.soak_minutes:
        verdicts.append(soak(args.soak_minutes * 60, seed=int(time.strftime("%Y%m%d"))))
    if not args.skip_acceptance:
        verdicts += [accept(api_key=None), accept(api_key="octavo-nightly")]
    if skipped := verdicts.count(SKIPPED):
        print(f"{skipped} of {len(verdicts)} parts could not be tried; each says why above")
    return 1 if any(status not in (0, SKIPPED) for status in verdicts) else 0


def long_tests() -> int:
    """Run every test that is marked slow."""
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "slow"], cwd=ROOT).returncode


def search(seconds: float) -> int:
    """Run the property tests with a new seed each round until the time is over or one fails."""
    folders = [f"packages/{name}/tests" for name in PROPERTIES]
    environment = os.environ | {"OCTAVO_HYPOTHESIS": "nightly"}
    end = time.monotonic() + seconds
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        rounds += 1
        seed = int(time.strftime("%Y%m%d")) * 1000 + rounds
        print(f"== round {rounds}, seed {seed}", flush=True)
        argv = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", f"--hypothesis-seed={seed}", *folders]
        if status := subprocess.run(argv, cwd=ROOT, env=environment).returncode:
            return status
    return 0


def fuzz_api(num_cases: int, options: Sequence[str] = ("--max-model-len=64",)) -> int:
    """Requests made from the server's own schema against a server with the default model; 1 for any 5xx.

    Args:
        options: Of `octavo serve`: another model, or a core without one.
    """
    from octavo_tools import api_fuzz

    with server((*options, "--disable-access-log", "--watchdog-timeout=120")) as url:
        findings = api_fuzz.fuzz(api_fuzz.of_url(url), num_cases, seed=int(time.strftime("%Y%m%d")), timeout=ANSWER_S)
    print(f"api fuzz: {findings.num_cases} requests, answers by status {dict(sorted(findings.statuses.items()))}")
    for failure in findings.failures[:10]:
        print(f"FAIL {failure}")
    return 1 if findings.failures else 0


def accept(*, api_key: str | None) -> int:
    """Start a server with the default model and run the acceptance script against it; 75 where there is none."""
    script = Path(os.environ.get("OCTAVO_SHARED") or ROOT.parent / "shared") / "accept" / "openai_accept.py"
    if not script.is_file():
        print("SKIP: no acceptance script (OCTAVO_SHARED names its folder)")
        return SKIPPED
    key = ["--api-key", api_key] if api_key else []
    with server(key) as url:
        only = [part for group in GROUPS for part in ("--only", f"{group}*")]
        return subprocess.run(
            [sys.executable, script, "--base-url", url, "--model", model_name(url, api_key), *key, *only]
        ).returncode


@contextlib.contextmanager
def server(options: Sequence[str]) -> Iterator[str]:
    """A running `octavo serve` on a free port; answers its address once it is healthy.

    Raises:
        RuntimeError: It ended or was not healthy in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    argv = [str(Path(sys.executable).parent / "octavo"), "serve", "--host", "127.0.0.1", "--port", str(port), *options]
    process = subprocess.Popen(argv, cwd=ROOT)
    try:
        wait_until_healthy(url, process)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return once `/health` answers 200.

    Raises:
        RuntimeError: The server ended, or `READY_S` went by.
    """
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"octavo serve ended with {process.returncode} before it was healthy")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url + "/health", timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"octavo serve was not healthy after {READY_S:.0f} s")


def model_name(url: str, api_key: str | None) -> str:
    """Name of the first model the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/models", headers=headers), timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])
