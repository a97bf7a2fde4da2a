"""Health that does not lie: a core that is killed, stopped, stuck or out of memory, and a queue that is only full."""

import json
import signal
import threading
import time

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
