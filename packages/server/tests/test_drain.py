"""How a server ends: what runs is finished or told, new requests go elsewhere, a fleet is renewed without dropping any."""

import asyncio
import contextlib
import re
import threading
import time

import httpx
import psutil
import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_server._src.sockets import url_of

LONG = {"prompt": [7], "max_tokens": 4000, "ignore_eos": True}


def _or_error(work):
    try:
        return work()
    except httpx.HTTPError as error:
        return error


def test_running_requests_finish_after_sigterm_and_new_ones_are_sent_elsewhere(start, wait_for, in_threads) -> None:
    served = start(step_ms=5)
    threads, answers = in_threads(4, lambda i: served.complete(max_tokens=400, stream=i % 2 == 0))
    wait_for(lambda: served.gauge() == 4)
    served.process.terminate()
    wait_for(lambda: served.status("/ready") == 503)
    assert served.status("/health") == 200
    late = served.complete()
    assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
    assert late.headers["connection"] == "close"
    assert served.process.wait(PATIENCE_S) == 0
    for index, (thread, answer) in enumerate(zip(threads, answers, strict=True)):
        thread.join(PATIENCE_S)
        assert answer.status_code == 200
        assert answer.text.endswith("[DONE]\n\n") if index % 2 == 0 else answer.json()["usage"]["completion_tokens"] == 400


def test_what_outlives_the_shutdown_timeout_is_told_so_and_a_second_signal_ends_at_once(start, wait_for, in_threads) -> None:
    served = start("--shutdown-timeout=0.5", step_ms=5)
    threads, answers = in_threads(2, lambda i: served.complete(**LONG | {"stream": i == 0}))
    wait_for(lambda: served.gauge() == 2)
    assert served.stop() == 0
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200, 503]
    assert all('"code":"aborted"' in answer.text for answer in answers)

    served = start("--shutdown-timeout=600", step_ms=5)
    threads, _ = in_threads(1, lambda i: _or_error(lambda: served.complete(**LONG)))
    wait_for(lambda: served.gauge() == 1)
    children = [child.pid for child in psutil.Process(served.process.pid).children()]
    served.process.terminate()
    time.sleep(0.3)
    began = time.monotonic()
    assert served.stop() == 0
    assert time.monotonic() - began < 300
    assert not any(psutil.pid_exists(pid) for pid in children)
    threads[0].join(PATIENCE_S)


class Proxy:
    """Round robin over servers: one that refuses, breaks off before its answer or answers 503 is passed over for the next."""

    def __init__(self, ports):
        self.ports, self._next = ports, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop).result()
        self.url = url_of("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        request = re.sub(rb"(?i)connection: keep-alive", b"connection: close", head) + await reader.readexactly(length)
        for _ in range(200):
            self._next += 1
            if await self._try(self.ports[self._next % len(self.ports)], request, writer):
                break
            await asyncio.sleep(0.02)
        writer.close()

    async def _try(self, port, request, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, upstream = await asyncio.open_connection("127.0.0.1", port)
            upstream.write(request)
            status = await reader.readuntil(b"\r\n")
            if b" 503 " in status:
                upstream.close()
                return False
            writer.write(status)
            while data := await reader.read(65536):
                writer.write(data)
            upstream.close()
            return True
        return False

    def close(self):
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.mark.slow
def test_a_rolling_restart_under_load_drops_no_request(start) -> None:
    replicas = [start("--shutdown-timeout=600") for _ in range(2)]
    proxy, done, failures, count = Proxy([one.port for one in replicas]), threading.Event(), [], [0]

    def load(index):
        while not done.is_set():
            stream = index % 2 == 0
            answer = httpx.post(proxy.url + "/v1/completions", json={"prompt": [7], "max_tokens": 60, "stream": stream})
            count[0] += 1
            whole = answer.text.endswith("[DONE]\n\n") if stream else answer.json()["usage"]["completion_tokens"] == 60
            if answer.status_code != 200 or not whole or '"error"' in answer.text:
                failures.append((answer.status_code, answer.text[-300:]))

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for replica in replicas:
        time.sleep(1)
        assert replica.stop() == 0
        start("--shutdown-timeout=600", port=replica.port)
    time.sleep(1)
    done.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    proxy.close()
    assert not failures
    assert count[0] > 50
