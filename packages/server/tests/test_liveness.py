"""Health that does not lie: a core that is killed, stopped, stuck or out of memory, and a queue that is only full."""

import json
import re
import shutil
import signal
import threading
import time

import httpx
import psutil
import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_core.testing.step_core import EXIT, STUCK

LONG = {"prompt": [7], "max_tokens": 4000, "ignore_eos": True}


def harm_kill(served):
    served.core.send_signal(signal.SIGKILL)


def harm_stop(served):
    served.core.send_signal(signal.SIGSTOP)


def harm_stuck(served):
    threading.Thread(target=lambda: served.complete(prompt=[STUCK])).start()


def harm_exit(served):
    threading.Thread(target=lambda: served.complete(prompt=[EXIT])).start()


@pytest.mark.parametrize(
    "harm", [harm_stop, *(pytest.param(harm, marks=pytest.mark.slow) for harm in (harm_kill, harm_stuck, harm_exit))]
)
def test_A17_a_dead_or_hung_core_turns_health_red_in_five_seconds_and_is_replaced(start, harm, wait_for, in_threads) -> None:
    served = start("--api-server-count=2")
    old = served.core.pid
    threads, answers = in_threads(6, lambda i: served.complete(**LONG | {"stream": i % 2 == 0}))
    wait_for(lambda: served.gauge() == 6)
    assert (served.status("/health"), served.status("/ready")) == (200, 200)
    began = time.monotonic()
    harm(served)
    wait_for(lambda: served.status("/health") == 503, 5.0)
    assert served.status("/ready") == 503
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a request hangs"
    assert time.monotonic() - began < 7
    for index, answer in enumerate(answers):
        if index % 2 == 0:
            assert answer.status_code == 200
            *_, error, done = answer.text.strip().split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert done == "data: [DONE]"
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
            assert answer.headers["retry-after"]
    wait_for(lambda: served.status("/health") == 200)
    assert not psutil.pid_exists(old)
    assert served.core.pid != old
    assert served.complete().status_code == 200
    assert served.stop() == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "CheckpointError: the checkpoint is damaged"),
        pytest.param("killed", "as happens when memory runs out", marks=pytest.mark.slow),
    ],
)
def test_a_core_that_cannot_start_again_is_tried_with_longer_pauses_until_the_cause_is_gone(
    start, checkpoint, tmp_path, wait_for, name, reason
) -> None:
    root = shutil.copytree(checkpoint, tmp_path / "own")
    served = start(model=root)
    (root / name).touch()
    served.core.send_signal(signal.SIGKILL)

    def attempts():
        return [line for line in served.log.read_text().splitlines() if "the engine core is gone" in line and reason in line]

    wait_for(lambda: len(attempts()) >= 3)
    health = httpx.get(served.url + "/health")
    assert health.status_code == 503
    assert reason in health.json()["error"]["message"]
    answer = served.complete()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    pauses = [float(re.search(r"the next one starts in (\S+) s", line)[1]) for line in attempts()]
    assert pauses == sorted(set(pauses))
    (root / name).unlink()
    wait_for(lambda: served.status("/health") == 200)
    assert served.complete().status_code == 200
    assert served.stop() == 0
    assert "Traceback" not in served.log.read_text()


def test_when_the_keeper_is_killed_nobody_stays_not_even_a_core_that_is_stopped(start, in_threads, wait_for) -> None:
    served = start("--api-server-count=2", "--watchdog-timeout=600")
    threads, answers = in_threads(4, lambda i: _or_error(lambda: served.complete(**LONG | {"stream": i % 2 == 0})))
    wait_for(lambda: served.gauge() == 4)
    everybody = psutil.Process(served.process.pid).children(recursive=True)
    served.core.send_signal(signal.SIGSTOP)
    served.process.kill()
    served.process.wait()
    _, alive = psutil.wait_procs(everybody, timeout=PATIENCE_S)
    assert not alive
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url + "/health")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert all(isinstance(answer, httpx.HTTPError) or '"error"' in answer.text for answer in answers)


@pytest.mark.slow
def test_while_the_keeper_hangs_a_core_serves_on_and_one_that_dies_turns_health_red(start, wait_for) -> None:
    served = start()
    core = served.core
    served.process.send_signal(signal.SIGSTOP)
    for _ in range(10):
        assert (served.status("/health"), served.complete().status_code) == (200, 200)
    core.kill()
    wait_for(lambda: served.status("/health") == 503)
    assert served.complete().status_code == 503
    served.process.send_signal(signal.SIGCONT)
    wait_for(lambda: served.status("/health") == 200)
    assert served.complete().status_code == 200
    assert served.stop() == 0


def _or_error(work):
    try:
        return work()
    except httpx.HTTPError as error:
        return error
