"""More than can be served: a full queue, a crowd of connections, keys with limits."""

import asyncio
import hashlib
import json
import resource

import httpx
import pytest

from octavo_core.testing.patience import PATIENCE_S

LONG = {"prompt": [7], "max_tokens": 4000, "ignore_eos": True}


def test_a_full_queue_answers_503_with_retry_after_and_health_stays_green(start, wait_for, in_threads) -> None:
    served = start("--max-num-queued-reqs=4", step_ms=50)
    threads, _ = in_threads(1, lambda i: served.complete(**LONG | {"n": 4, "stream": True}))
    wait_for(lambda: served.gauge() == 4)
    for _ in range(20):
        answer = served.complete()
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "3"
        assert answer.json()["error"]["code"] == "overloaded"
        assert (served.status("/health"), served.status("/ready")) == (200, 200)
    assert served.gauge() == 4
    answer = served.complete(n=5)
    assert answer.status_code == 503, "of five sequences none may run"
    served.stop()
    threads[0].join(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_two_thousand_connections_at_once_are_all_answered(start, count, wait_for) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    served = start(f"--api-server-count={count}", "--max-num-queued-reqs=256", "--disable-access-log")
    body = json.dumps({"prompt": [7], "max_tokens": 20}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer

    async def everybody():
        return await asyncio.gather(*(one() for _ in range(2000)))

    answers = asyncio.run(everybody())
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    done = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200")]
    shed = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503") and b"retry-after: 3" in answer]
    assert len(done) + len(shed) == 2000
    assert len(done) >= 256
    assert served.status("/health") == 200
    wait_for(lambda: served.gauge() == 0)
    assert served.stop() == 0


def test_limits_of_a_key_hold_over_all_frontends(start, tmp_path, in_threads) -> None:
    entries = [
        {"name": "one", "sha256": hashlib.sha256(b"k1").hexdigest(), "max_concurrent_requests": 3},
        {"name": "two", "sha256": hashlib.sha256(b"k2").hexdigest(), "max_tokens_per_minute": 50},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    served = start("--api-server-count=2", f"--api-keys-file={tmp_path / 'keys.json'}")

    def complete(key, **fields):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(served.url + "/v1/completions", json={"prompt": [7], **fields}, headers=headers)

    threads, answers = in_threads(12, lambda i: complete("k1", max_tokens=600))
    for thread in threads:
        thread.join(PATIENCE_S)
    codes = sorted(answer.status_code for answer in answers)
    assert codes == [200] * codes.count(200) + [429] * codes.count(429)
    assert 3 <= codes.count(200) < 12
    assert complete("k1", max_tokens=1).status_code == 200
    assert complete("k2", max_tokens=60).status_code == 200
    refused = [complete("k2", max_tokens=1) for _ in range(4)]
    assert [answer.status_code for answer in refused] == [429] * 4
    assert int(refused[0].headers["retry-after"]) >= 10
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert complete("k1", max_tokens=1).status_code == 200
