"""Jobs in order, in a thread and at once."""

from __future__ import annotations

import threading

import pytest

from octavo_core.testing.patience import PATIENCE_S
from octavo_engine._src.in_order import InOrder


@pytest.mark.parametrize("thread", [None, "worker"])
def test_jobs_run_in_the_order_they_were_handed_over(thread: str | None) -> None:
    jobs, seen = InOrder(thread), []
    answers = [jobs.submit(lambda i=i: (seen.append(i), i * i)[1]) for i in range(100)]
    jobs.wait()
    assert seen == list(range(100))
    assert [answer.result() for answer in answers] == [i * i for i in range(100)]


def test_whoever_hands_over_does_not_wait() -> None:
    jobs, gate, ran = InOrder("worker"), threading.Event(), threading.Event()
    first = jobs.submit(gate.wait, PATIENCE_S)
    second = jobs.submit(ran.set)
    assert not first.done()
    assert not ran.is_set()
    gate.set()
    second.result(PATIENCE_S)
    assert ran.is_set()


@pytest.mark.parametrize("thread", [None, "worker"])
def test_after_a_job_that_failed_none_runs_and_everybody_hears_of_it(thread: str | None) -> None:
    jobs, seen = InOrder(thread), []

    def fails() -> None:
        raise ZeroDivisionError("the first")

    failed = []
    for job in (fails, lambda: seen.append(1)):
        try:
            failed.append(jobs.submit(job).exception(PATIENCE_S))
        except ZeroDivisionError as error:
            failed.append(error)
    assert [str(error) for error in failed] == ["the first", "the first"]
    assert seen == []
    with pytest.raises(ZeroDivisionError, match="the first"):
        jobs.wait()
