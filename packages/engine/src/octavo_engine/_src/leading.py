"""The runner on several nodes: node 0's says each program to the others before it runs it, theirs run what they are told.

Knows which calls of a runner touch the device; knows no plan's meaning. What is said travels as msgpack and `octavo_core.plan.to_bytes`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from octavo_core.errors import EngineDeadError, FrameError
from octavo_core.plan import SamplingArrivals, StepPlan, from_bytes, to_bytes
from octavo_engine._src.cluster import Follower, Leader
from octavo_engine._src.dispatched import Dispatched, Ran
from octavo_engine._src.runner import ModelRunner
from octavo_engine._src.sizing import Bucket


@dataclasses.dataclass(frozen=True)
class _Shared(Dispatched):
    """A step that other nodes run too: waiting for it ends when one of them is gone."""

    leader: Leader | None = None

    def wait(self) -> tuple[list[int], Ran]:
        """As `Dispatched.wait`."""
        assert self.leader is not None
        answer: tuple[list[int], Ran] = self.leader.run(super().wait)
        return answer


class LeadingRunner(ModelRunner):
    """Node 0's runner. Every call may raise `EngineDeadError`: a node is gone."""

    def __init__(self, *args: Any, leader: Leader, **options: Any) -> None:
        super().__init__(*args, **options)
        self._leader = leader

    def _lead(self, name: str, data: Any, run: Callable[[], Any]) -> Any:
        self._leader.tell(name, data)
        return self._leader.run(run)

    def compile_begin(self, arrivals: SamplingArrivals) -> None:
        """As `ModelRunner.compile_begin`."""
        compile_begin = super().compile_begin
        self._lead("compile_begin", to_bytes(arrivals), lambda: compile_begin(arrivals))
        self._leader.least(0)

    def compile(self, shapes: tuple[Bucket, ...], advance: Callable[[int], None], rows: Iterable[int] = ()) -> None:
        """As `ModelRunner.compile`."""
        rows, compile_ = list(rows), super().compile
        told = [[(shape.tokens, shape.rows) for shape in shapes], rows]
        self._lead("compile", told, lambda: compile_(shapes, advance, rows))
        self._leader.least(0)  # a collective waits for a node that compiles half a minute and no longer

    def time_step(self, tokens: int) -> float:
        """As `ModelRunner.time_step`."""
        time_step = super().time_step
        return float(self._lead("time_step", tokens, lambda: time_step(tokens)))

    def time_decode(self, rows: int, context: int) -> float:
        """As `ModelRunner.time_decode`."""
        time_decode = super().time_decode
        return float(self._lead("time_decode", [rows, context], lambda: time_decode(rows, context)))

    def begin(self, arrivals: SamplingArrivals) -> None:
        """As `ModelRunner.begin`."""
        begin = super().begin
        self._lead("begin", to_bytes(arrivals), lambda: begin(arrivals))

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """As `ModelRunner.dispatch`."""
        dispatch = super().dispatch
        done: Dispatched = self._lead("dispatch", to_bytes(plan), lambda: dispatch(plan))
        fields = {field.name: getattr(done, field.name) for field in dataclasses.fields(Dispatched)}
        return _Shared(**fields, leader=self._leader)

    def score(
        self, dispatched: Dispatched, at: list[int], targets: list[int]
    ) -> concurrent.futures.Future[list[tuple[Any, Any, Any, Any]]]:
        """As `ModelRunner.score`, of the newest step; returns when it is done."""
        score = super().score

        def run() -> concurrent.futures.Future[list[tuple[Any, Any, Any, Any]]]:
            done = score(dispatched, at, targets)
            jax.block_until_ready(done.result())
            return done

        answers: concurrent.futures.Future[list[tuple[Any, Any, Any, Any]]] = self._lead("score", [at, targets], run)
        return answers


class FollowingRunner:
    """Runs what node 0 says, until it ends."""

    def __init__(self, runner: ModelRunner, follower: Follower) -> None:
        self._runner, self._follower = runner, follower
        self._newest: Dispatched | None = None

    def run(self) -> None:
        """Run every command in turn.

        Raises:
            EngineDeadError: Node 0 ended for a reason, or sent what cannot be run.
        """
        for frame in self._follower.commands():
            obey = getattr(self, f"_do_{frame.kind}", None)
            if obey is None:
                raise EngineDeadError(f"node 0 asks for '{frame.kind}', which this version does not know")
            try:
                obey(frame.data)
            except FrameError as error:
                raise EngineDeadError(f"a command of node 0 cannot be read: {error}") from None

    def _do_compile_begin(self, data: bytes) -> None:
        self._runner.compile_begin(from_bytes(SamplingArrivals, data))
        self._follower.least(0)

    def _do_compile(self, data: list[Any]) -> None:
        shapes, rows = data
        self._runner.compile(tuple(Bucket(*shape) for shape in shapes), lambda amount: None, rows)
        self._follower.least(0)

    def _do_time_step(self, tokens: int) -> None:
        self._runner.time_step(tokens)

    def _do_time_decode(self, data: list[int]) -> None:
        self._runner.time_decode(*data)

    def _do_begin(self, data: bytes) -> None:
        self._runner.begin(from_bytes(SamplingArrivals, data))

    def _do_dispatch(self, data: bytes) -> None:
        self._newest = self._runner.dispatch(from_bytes(StepPlan, data))

    def _do_score(self, data: list[Any]) -> None:
        if self._newest is None:
            raise EngineDeadError("node 0 asks for scores of a step, but there was none")
        self._runner.score(self._newest, *data)
