"""Owns the device: its state, the compiled programs, and the dispatch of one step after another.

Touches device memory. Every program is compiled before the first request and called through its compiled object, so that a
wrong shape is an error and never a compilation in service. Dispatch returns at once; `Dispatched` is read when its tokens are wanted.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from octavo_core.plan import Sampled, SamplingArrivals, StepPlan
from octavo_engine._src.device import DevicePrograms, DeviceState, StepInput
from octavo_engine._src.dispatched import Dispatched, Ran
from octavo_engine._src.in_order import InOrder
from octavo_engine._src.programs import Programs
from octavo_engine._src.sizing import Bucket, pick

SCORED_TOKENS: Final = 64
"""Prompt tokens scored at once."""

COPIED_BLOCKS: Final = 8
"""Blocks copied at once."""


@dataclasses.dataclass(frozen=True)
class _Programs:
    """Compiled for one bucket.

    Attributes:
        begin: What enters the layers; None where there is `whole`.
        segments: Layers.
        whole: Both, where all layers are one segment.
        ends, score: Of what leaves them.
    """

    begin: Any
    segments: list[Any]
    whole: Any
    ends: dict[int, Any]
    score: Any


class _Compiler:
    """How programs are jitted and compiled, on one device or on a mesh, where inputs and streams are on every device.

    Args:
        placed: Where inputs are.
        kept: Programs of earlier starts, which serve one device.
    """

    def __init__(self, placed: jax.sharding.Sharding, kept: Programs) -> None:
        self._everywhere = placed if isinstance(placed, jax.sharding.NamedSharding) else None
        self._kept = Programs(None) if self._everywhere is not None else kept
        self._device: Any = next(iter(placed.device_set))

    def compile(self, name: str, jitted: Any, *args: Any) -> Any:
        """A program for arguments of these shapes; compiled or found."""
        return self._kept.compile(name, jitted, *args, device=self._device)

    def shapes(self, name: str, run: Callable[..., Any], *args: Any) -> Any:
        """Shapes of what a function answers."""
        return self.placed(self._kept.recall(name, lambda: jax.eval_shape(run, *args)))

    def jit(self, run: Callable[..., Any], *, donate: tuple[int, ...] = (), kv: Any = None) -> Any:
        """Jit a program whose answer is everywhere, or is KV like `kv`, alone or first."""
        if self._everywhere is None:
            return jax.jit(run, donate_argnums=donate)
        own = jax.tree.map(lambda x: x.sharding, kv)
        out = self._everywhere if kv is None else own if donate == (0,) else (own, self._everywhere)
        return jax.jit(run, donate_argnums=donate, out_shardings=out)

    def placed(self, abstract: Any) -> Any:
        """Shapes of what is everywhere."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._everywhere), abstract)

    def ints(self, length: int) -> jax.ShapeDtypeStruct:
        """The shape of so many integers."""
        return jax.ShapeDtypeStruct((length,), jnp.int32, sharding=self._everywhere)


class ModelRunner:
    """Runs steps on the device.

    Size: one owner of the device's state and of every program that replaces it.

    Args:
        programs: What to run.
        state: Fresh device state.
        max_blocks: Width of a block table.
        threads: Programs traced at the same time.
        kept: Programs of earlier starts.
        in_thread: Calls of a program return when it is done (a CPU), so steps are run by a thread: whoever dispatches need not wait.

    Attributes:
        programs: What it runs.
        compiler: How it is compiled.

    On a mesh, inputs and streams are on every device, as `state.last_token` is; KV and weights stay where they are.
    """

    def __init__(
        self,
        programs: DevicePrograms,
        state: DeviceState,
        *,
        max_blocks: int,
        threads: int = 2,
        kept: Programs | None = None,
        in_thread: bool = False,
    ) -> None:
        self.programs, self._params, self._state = programs, programs.params, state
        self.compiler = _Compiler(state.last_token.sharding, kept or Programs(None))
        self._shapes: tuple[Bucket, ...] = ()
        self._max_blocks, self._threads = max_blocks, threads
        self._compiled: dict[Bucket, _Programs] = {}
        self._sample: dict[int, Any] = {}
        self._row_sizes: list[int] = []
        self._begin: Any = None
        self._copy: list[Any] = []
        self._in_thread = in_thread
        self._jobs = InOrder("octavo-device" if in_thread else None)

    @property
    def kv(self) -> tuple[tuple[Any, ...], ...]:
        """KV of each segment, of each of its layers, after all that was dispatched. Set it to what a program made of it."""
        self._jobs.wait()
        return self._state.kv

    @kv.setter
    def kv(self, kv: tuple[tuple[Any, ...], ...]) -> None:
        self._jobs.wait()
        self._state = self._state._replace(kv=kv)

    @property
    def shapes(self) -> tuple[Bucket, ...]:
        """Step shapes from small to large."""
        return self._shapes

    def compile(self, shapes: tuple[Bucket, ...], advance: Callable[[int], None], rows: Iterable[int] = ()) -> None:
        """Serve steps of these shapes, from small to large: compile what is missing, `threads` at a time. `advance` hears of each.

        Rows are sampled as many at a time as a shape has, or as one of `rows`.
        """
        self._shapes = shapes
        self._row_sizes = sorted({*rows, *(b.rows for b in shapes)})
        jobs: list[Callable[[], None]] = [
            functools.partial(self._compile_sample, rows) for rows in self._row_sizes if rows not in self._sample
        ]
        jobs += [functools.partial(self._compile_bucket, b) for b in reversed(shapes) if b not in self._compiled]
        with concurrent.futures.ThreadPoolExecutor(self._threads) as pool:
            for done in concurrent.futures.as_completed([pool.submit(job) for job in jobs]):
                done.result()
                advance(1)

    def _compile_bucket(self, shape: Bucket) -> None:
        step = self._abstract_input(shape)
        state, programs, params, made = self._state, self.programs, self._params, self.compiler
        stream, batches = made.shapes(f"begin {shape}", programs.begin, params, state.last_token, step)
        targets, sizes = made.ints(SCORED_TOKENS), [n for n in self._row_sizes if n <= shape.rows]
        ends = made.jit(programs.ends)
        whole = self._compile_whole(step) if len(programs.segments) == 1 else None
        self._compiled[shape] = _Programs(
            begin=None if whole else made.compile("begin", made.jit(programs.begin), params, state.last_token, step),
            segments=[] if whole else self._compile_segments(stream, batches),
            whole=whole,
            ends={n: made.compile("ends", ends, params, stream, made.ints(n)) for n in sizes},
            score=made.compile("score", made.jit(programs.score), params, stream, targets, targets),
        )

    def _compile_whole(self, step: StepInput) -> Any:
        """One program for what enters the layers and all of them: calling another costs a small step some of its time."""
        (segment,), (kv,) = self.programs.segments, self._state.kv
        run = self.compiler.jit(functools.partial(self.programs.whole, segment), donate=(1,), kv=kv)
        name = f"whole of groups {segment.groups}"
        return self.compiler.compile(name, run, segment.params, kv, self._params, self._state.last_token, step)

    def _compile_segments(self, stream: Any, batches: Any) -> list[Any]:
        """A program for every segment; segments alike in structure and shapes share one."""
        shared: dict[Any, Any] = {}
        answer = []
        for segment, kv in zip(self.programs.segments, self._state.kv, strict=True):
            leaves, tree = jax.tree.flatten((segment.params, kv))
            key = (segment.kind, segment.groups, tree, tuple((x.shape, x.dtype) for x in leaves))
            if key not in shared:
                run = self.compiler.jit(functools.partial(self.programs.run, segment), donate=(1, 2), kv=kv)
                name = f"segment {len(shared)} of groups {segment.groups}"
                shared[key] = self.compiler.compile(name, run, segment.params, kv, stream, batches)
            answer.append(shared[key])
        return answer

    def _compile_sample(self, rows: int) -> None:
        programs, params, state, made = self.programs, self._params, self._state, self.compiler
        shape = self._shapes[-1]
        stream, _ = made.shapes(f"begin {shape}", programs.begin, params, state.last_token, self._abstract_input(shape))
        hidden = made.shapes(f"ends {shape} {rows}", programs.ends, params, stream, made.ints(rows))
        sample, ids = made.jit(programs.sample, donate=(1, 2)), made.ints(rows)
        self._sample[rows] = made.compile("sample", sample, params, state.sampler, state.last_token, hidden, ids, ids)

    def compile_begin(self, arrivals: SamplingArrivals) -> None:
        """Compile the taking in of new sequences, and the copying of blocks."""
        made = self.compiler
        copies = made.placed(jax.ShapeDtypeStruct((len(self.programs.groups), COPIED_BLOCKS, 2), jnp.int32))
        shared: dict[Any, Any] = {}
        for segment, kv in zip(self.programs.segments, self._state.kv, strict=True):
            key = (segment.groups, *((x.shape, x.dtype) for x in jax.tree.leaves(kv)))
            if key not in shared:
                copy = made.jit(functools.partial(self.programs.copy, segment.groups), donate=(0,), kv=kv)
                shared[key] = made.compile(f"copy in groups {segment.groups}", copy, kv, copies)
            self._copy.append(shared[key])
        begin = made.jit(self.programs.sampler.begin, donate=(0,))
        self._begin = made.compile("begin sampling", begin, self._state.sampler, made.placed(arrivals))

    def _abstract_input(self, shape: Bucket) -> StepInput:
        return self.compiler.placed(_empty_input(shape, len(self.programs.groups), self._max_blocks))

    def time_step(self, tokens: int) -> float:
        """Seconds of a step that prefills one row of so many tokens and stores nothing, in the smallest shape that holds it."""
        shape = next(b for b in self._shapes if b.tokens >= tokens)
        step = _empty_input(shape, len(self.programs.groups), self._max_blocks)
        ends = np.full(shape.rows + 1, tokens, np.int32)
        ends[0] = 0
        step = step._replace(
            row=np.where(np.arange(shape.tokens) < tokens, 0, shape.rows).astype(np.int32),
            query_start=ends,
            context_len=np.where(np.arange(shape.rows) == 0, tokens, 0).astype(np.int32),
            num_rows=np.int32(1),
        )
        return self._best_time(shape, step)

    def time_decode(self, rows: int, context: int) -> float:
        """Seconds of the layers of a step in which so many rows see `context` tokens each and store nothing; blocks of rows differ."""
        shape = next(b for b in self._shapes if b.tokens >= rows and b.rows >= rows)
        step = _empty_input(shape, len(self.programs.groups), self._max_blocks)
        num_blocks = min(jax.tree.leaves(layer)[0].shape[0] for layer in self._state.kv[0])
        ids = np.random.default_rng(0).permutation(step.block_table.size).reshape(step.block_table.shape) % num_blocks
        step = step._replace(
            positions=np.full(shape.tokens, context - 1, np.int32),
            query_start=np.minimum(np.arange(shape.rows + 1), rows).astype(np.int32),
            context_len=np.full(shape.rows, context, np.int32),
            block_table=ids.astype(np.int32),
            num_single=np.int32(rows),
            num_rows=np.int32(rows),
        )
        return self._best_time(shape, step)

    def _best_time(self, shape: Bucket, step: StepInput) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.monotonic()
            jax.block_until_ready(self._run_layers(self._compiled[shape], step))
            best = min(best, time.monotonic() - start)
        return best

    def _run_layers(self, compiled: _Programs, step: StepInput) -> Any:
        """All layers of a step; the KV of the state is replaced."""
        state = self._state
        if compiled.whole:
            kv, stream = compiled.whole(self.programs.segments[0].params, state.kv[0], self._params, state.last_token, step)
            self._state = state._replace(kv=(kv,))
            return stream
        stream, batches = compiled.begin(self._params, state.last_token, step)
        out = []
        for segment, run, kv in zip(self.programs.segments, compiled.segments, state.kv, strict=True):
            kv, stream = run(segment.params, kv, stream, batches)
            out.append(kv)
        self._state = state._replace(kv=tuple(out))
        return stream

    def begin(self, arrivals: SamplingArrivals) -> None:
        """Hand sampling parameters of new sequences to the device."""

        def take_in() -> None:
            self._state = self._state._replace(sampler=self._begin(self._state.sampler, arrivals))

        self._jobs.submit(take_in)

    def dispatch(self, plan: StepPlan) -> Dispatched:
        """Start a step, or have it started when those before it are done; answers before it has run."""
        bucket = pick(self._shapes, int(plan.num_tokens), int(plan.num_rows))
        step = _cut(plan, bucket)
        ending = np.flatnonzero(step.sample_rows >= 0).tolist()
        return Dispatched(plan, bucket, ending, self._jobs.submit(self._step, self._compiled[bucket], step, plan.copies, ending))

    def _step(self, compiled: _Programs, step: StepInput, copies: Any, ending: list[int]) -> Ran:
        started_s = time.monotonic()
        self._copy_blocks(np.asarray(copies))
        stream = self._run_layers(compiled, step)
        sampled = self._sample_rows(compiled, stream, step, ending) if ending else None
        if self._in_thread:
            jax.block_until_ready((stream, sampled))
        return Ran(stream, sampled, started_s, time.monotonic() if self._in_thread else None)

    def _copy_blocks(self, copies: Any) -> None:
        """Copy what the plan says. No block is both read and written in one step, so the order of parts does not matter."""
        wanted = np.flatnonzero((copies[:, :, 0] >= 0).any(0))
        for i in range(0, len(wanted), COPIED_BLOCKS):
            part = _fit(copies[:, wanted[i : i + COPIED_BLOCKS]], COPIED_BLOCKS, -1, axis=1)
            kv = tuple(copy(kv, part) for copy, kv in zip(self._copy, self._state.kv, strict=True))
            self._state = self._state._replace(kv=kv)

    def _sample_rows(self, compiled: _Programs, stream: Any, step: StepInput, ending: list[int]) -> Sampled:
        """Sample the rows that end here and no others: a score of the whole vocabulary is dear on a CPU."""
        size = next(n for n in self._row_sizes if n >= len(ending))
        at, sequence = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        at[: len(ending)], sequence[: len(ending)] = step.sample_rows[ending], step.sequence[ending]
        position = step.positions[at] + np.int32(1)
        state = self._state
        hidden = compiled.ends[size](self._params, stream, at)
        sampler, last, sampled = self._sample[size](self._params, state.sampler, state.last_token, hidden, sequence, position)
        self._state = DeviceState(state.kv, sampler, last)
        return sampled

    def score(
        self, dispatched: Dispatched, at: list[int], targets: list[int]
    ) -> concurrent.futures.Future[list[tuple[Any, Any, Any, Any]]]:
        """Start scoring prompt tokens of a step: arrays of `SCORED_TOKENS` entries, the last ones padding."""
        return self._jobs.submit(self._score, dispatched, at, targets)

    def _score(self, dispatched: Dispatched, at: list[int], targets: list[int]) -> list[tuple[Any, Any, Any, Any]]:
        answers, stream = [], dispatched.ran.result().stream
        for i in range(0, len(at), SCORED_TOKENS):
            padded = np.zeros((2, SCORED_TOKENS), np.int32)
            part = slice(i, i + SCORED_TOKENS)
            padded[0, : len(at[part])], padded[1, : len(at[part])] = at[part], targets[part]
            answers.append(self._compiled[dispatched.bucket].score(self._params, stream, padded[0], padded[1]))
        return answers


def _empty_input(shape: Bucket, groups: int, max_blocks: int) -> StepInput:
    """A step of nobody."""
    tokens, rows = np.zeros(shape.tokens, np.int32), np.zeros(shape.rows, np.int32)
    return StepInput(
        token_ids=tokens,
        positions=tokens,
        row=tokens + shape.rows,
        query_start=np.zeros(shape.rows + 1, np.int32),
        context_len=rows,
        block_table=np.zeros((groups, shape.rows, max_blocks), np.int32),
        slot_mapping=np.full((groups, shape.tokens), -1, np.int32),
        sample_rows=rows - 1,
        sequence=rows - 1,
        num_single=np.int32(0),
        num_rows=np.int32(0),
    )


def _cut(plan: StepPlan, bucket: Bucket) -> StepInput:
    """The first `bucket.tokens` tokens and `bucket.rows` rows of a plan, padded where the bucket is larger than the plan."""
    tokens, rows = bucket.tokens, bucket.rows
    num_rows = len(plan.sequence)
    row = np.where(plan.row >= num_rows, rows, plan.row).astype(np.int32)
    return StepInput(
        token_ids=_fit(plan.token_ids, tokens, 0),
        positions=_fit(plan.positions, tokens, 0),
        row=_fit(row, tokens, rows),
        query_start=_fit(plan.query_start, rows + 1, int(plan.num_tokens)),
        context_len=_fit(plan.context_len, rows, 0),
        block_table=_fit(plan.block_table, rows, 0, axis=1),
        slot_mapping=_fit(plan.slot_mapping, tokens, -1, axis=1),
        sample_rows=_fit(plan.sample_rows, rows, -1),
        sequence=_fit(plan.sequence, rows, -1),
        num_single=np.asarray(plan.num_single, np.int32),
        num_rows=np.asarray(plan.num_rows, np.int32),
    )


def _fit(x: Any, size: int, fill: int, axis: int = 0) -> Any:
    x = np.asarray(x)
    if x.shape[axis] >= size:
        return x[(slice(None),) * axis + (slice(0, size),)]
    widths = [(0, size - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return np.pad(x, widths, constant_values=fill)
