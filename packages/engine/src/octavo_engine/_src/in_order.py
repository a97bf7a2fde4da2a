"""Jobs that run one after another, in a thread of their own or at once.

What JAX does by itself where a dispatch returns before the device is done: whoever gives work to the device need not wait for it.
Knows no device.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class InOrder:
    """After a job that failed no other runs: each answers with that error, for what it would start from is not there.

    Args:
        thread: The name of the thread that runs the jobs; None: each runs when it is handed over.
    """

    def __init__(self, thread: str | None) -> None:
        self._pool = None if thread is None else concurrent.futures.ThreadPoolExecutor(1, thread)
        self._last: concurrent.futures.Future[Any] | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Run a job after those before it."""
        if self._pool is not None:
            self._last = done = self._pool.submit(self._run, job, *arguments)
            return done
        done = concurrent.futures.Future()
        done.set_result(self._run(job, *arguments))
        return done

    def _run(self, job: Callable[..., T], *arguments: Any) -> T:
        if self._error is not None:
            raise self._error
        try:
            return job(*arguments)
        except BaseException as error:
            self._error = error
            raise

    def wait(self) -> None:
        """Return when every job is done.

        Raises:
            Exception: What the first that failed raised.
        """
        if self._last is not None:
            self._last.result()
            self._last = None
        if self._error is not None:
            raise self._error
