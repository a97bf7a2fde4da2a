"""What a frontend costs: `python -m octavo_server.bench [--json FILE] [--quick]`.

A real server on a real socket, streams read by another process, and an engine that has its tokens ready: processor time of this process
alone, divided by the tokens it sent. A whole server that has nothing to do, with a core that has no model. And what a large request does to
everybody else (`_src.bench_large`).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

from octavo_core.bench import Report, parse_arguments
from octavo_core.wire import EngineOutput, EngineRequest, EngineStats, FinishReason, ModelCard
from octavo_server._src import bench_large
from octavo_server._src.config import ServerConfig
from octavo_server._src.http_server import HttpServer
from octavo_server._src.sockets import bind
from octavo_server._src.state import ServerState

GOALS: Final[dict[str, float | int]] = {"frontend.token": 200, "idle.server": 0.02, **bench_large.GOALS}
NUM_STREAMS: Final = 64
_READER: Final = """
import asyncio, sys
port, streams, tokens = map(int, sys.argv[1:])
body = b'{"prompt": [1], "stream": true, "max_tokens": %d}' % tokens
head = b"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)
async def one():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + body)
    data = await reader.read()
    assert data.endswith(b"[DONE]\\n\\n\\r\\n0\\r\\n\\r\\n") and data.count(b'"token_ids"') == tokens, data[-200:]
    writer.close()
async def main():
    await asyncio.gather(*(one() for _ in range(streams)))
asyncio.run(main())
"""


class Ready:
    """An engine that gives each of its streams a token whenever all have taken theirs."""

    card = ModelCard(name="ready", root="", max_model_len=10**6, vocab_size=1000)

    def submit(self, requests: Sequence[EngineRequest]) -> list[AsyncIterator[EngineOutput]]:
        """Tokens without work."""
        return [self.generate(request) for request in requests]

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """See `submit`."""
        most = request.sampling.max_tokens or 1
        for count in range(1, most + 1):
            await asyncio.sleep(0)
            reason = FinishReason.LENGTH if count == most else None
            yield EngineOutput(request_id=request.request_id, token_ids=[count % 1000], finish_reason=reason)

    async def abort(self, request_id: str) -> None:
        """Nothing runs that could be ended."""

    def stats(self) -> EngineStats:
        """Ready."""
        return EngineStats(is_ready=True)


async def _cost(tokens: int) -> tuple[float, float]:
    """Processor seconds and seconds for all streams."""
    config = ServerConfig(skip_tokenizer_init=True, disable_uvicorn_access_log=True, uvicorn_log_level="error", shutdown_timeout=0)
    state = ServerState(config)
    engine: Any = Ready()
    state.become_ready(engine, engine.card, None)
    sock = bind("127.0.0.1", 0)
    server = HttpServer(config, state)
    spent: list[float] = []

    async def bring_up() -> None:
        for count in (2, tokens):
            command = [sys.executable, "-c", _READER, str(sock.getsockname()[1]), str(NUM_STREAMS), str(count)]
            reader = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
            began = time.process_time(), time.perf_counter()
            if await reader.wait():
                raise RuntimeError("the reading process failed")
            spent[:] = [time.process_time() - began[0], time.perf_counter() - began[1]]
        server.stop()

    await server.run([sock], bring_up)
    return spent[0], spent[1]


def _idle_share(seconds: float) -> float:
    """Share of one core that all processes of an idle server take."""
    command = [
        sys.executable,
        "-m",
        "octavo_server.cli",
        "serve",
        "--core=octavo_core.testing.step_core:build",
        "--skip-tokenizer-init",
    ]
    with subprocess.Popen([*command, "--host=127.0.0.1", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        try:
            if not any(b"ready on" in line for line in server.stdout):
                raise RuntimeError("the server did not become ready")
            children = [text for path in Path(f"/proc/{server.pid}/task").glob("*/children") for text in path.read_text().split()]
            time.sleep(1)
            before_s, began_s = _cpu_s([server.pid, *children]), time.perf_counter()
            time.sleep(seconds)
            return (_cpu_s([server.pid, *children]) - before_s) / (time.perf_counter() - began_s)
        finally:
            server.terminate()


def _cpu_s(pids: Sequence[int | str]) -> float:
    """Processor seconds of processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("octavo_server", GOALS)
    tokens = 50 if arguments.quick else 1000
    cpu_s, wall_s = asyncio.run(_cost(tokens))
    total = tokens * NUM_STREAMS
    report.add("frontend.token", cpu_s / total * 1e6, "us", total, f"processor time per streamed token, {NUM_STREAMS} streams")
    report.add("frontend.tokens_per_s", total / wall_s, "1/s", total, "of one frontend process")
    seconds = 5 if arguments.quick else 20
    report.add(
        "idle.server", _idle_share(seconds), "ratio", 1, "of one core, keeper, frontend and core together with nothing to do"
    )
    bench_large.run(report, quick=arguments.quick)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
