"""Shape checks in every test run, and a driver that audits the cache after each operation."""

from __future__ import annotations

from jaxtyping import install_import_hook

with install_import_hook("octavo_kvcache", "beartype.beartype"):
    import octavo_kvcache

import contextlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from octavo_core.plan import CacheEvents
from octavo_core.specs import CacheSpec
from octavo_kvcache import RadixCache, audit


@contextlib.contextmanager
def unchecked_shapes() -> Iterator[None]:
    """Annotations of shapes are not looked at, as where the package is installed."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def audited(state: Any, spec: CacheSpec) -> None:
    """The books are right. Checking shapes takes longer than the audit; other tests run it with checks."""
    with unchecked_shapes():
        problems = audit(state, spec)
    assert problems == [], "\n".join(problems)


QUICK = {"xla_backend_optimization_level": 0}
"""Compiling takes longer than these tests run."""

SEARCH_FACTOR = 40 if os.environ.get("OCTAVO_HYPOTHESIS") == "nightly" else 1
"""How many times as many histories are tried at night."""


class Driver:
    """A cache, its state and its jitted operations, spoken to in lists. Every operation is followed by an audit.

    Attributes:
        state: The state after the last operation.
        host: The same in NumPy.
        copies: What the last `grow` asked to be copied.
        tables: Block tables of all groups after the last `grow` or `commit`.
    """

    def __init__(self, spec: CacheSpec, **options: Any) -> None:
        options.setdefault("partial", False)
        options.setdefault("policy", "lru")
        self.spec, self.object = spec, RadixCache(spec, **options)
        names = ("admit", "grow", "commit", "release")
        self.jitted = {n: jax.jit(getattr(self.object, n), donate_argnums=0, compiler_options=QUICK) for n in names}
        self.by_hand = by_hand(spec, self.object.policy)
        self.empty = jax.device_get(self.object.init())
        self.reset()

    def reset(self) -> None:
        self.state = jax.tree.map(jnp.array, self.empty)
        self.host = self.empty
        self.tables = self.copies = None

    def audited(self) -> None:
        self.host = jax.device_get(self.state)
        audited(self.host, self.spec)

    def pad(self, tokens: Sequence[int]) -> np.ndarray:
        row = np.full(self.spec.max_len, -7, np.int32)
        row[: len(tokens)] = tokens
        return row

    def admit(
        self,
        sequence: int,
        tokens: Sequence[int],
        *,
        space: int = 0,
        tenant: int = 0,
        want: int = 0,
        reserve: int = 0,
        length: int | None = None,
    ) -> tuple[int, int]:
        """Admit one; answers (cached_len, status)."""
        groups = self.spec.groups
        self.state, got = self.jitted["admit"](
            self.state,
            np.array([sequence], np.int32),
            self.pad(tokens)[None],
            np.array([len(tokens) if length is None else length], np.int32),
            np.array([[space, 0]], np.uint32),
            np.array([tenant], np.int32),
            np.full((1, groups), want, np.int32),
            np.full(groups, reserve, np.int32),
        )
        self.audited()
        return int(got.cached_len[0]), int(got.status[0])

    def grow(self, need: dict[int, int], rank: dict[int, int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Grow some; answers (table of group 0, status)."""
        wanted, ranks = np.zeros((self.spec.max_sequences, self.spec.groups), np.int32), np.arange(self.spec.max_sequences)
        for s, n in need.items():
            wanted[s] = n
        for s, r in (rank or {}).items():
            ranks[s] = r
        self.state, table, copies, status = self.jitted["grow"](self.state, wanted, ranks.astype(np.int32))
        self.audited()
        self.tables, self.copies = np.asarray(table), np.asarray(copies)
        return self.tables[0], np.asarray(status)

    def commit(self, tokens: dict[int, Sequence[int]]) -> np.ndarray:
        """Commit all of the tokens given; answers the table of group 0."""
        rows = np.stack([self.pad(tokens.get(s, ())) for s in range(self.spec.max_sequences)])
        upto = np.array([len(tokens.get(s, ())) for s in range(self.spec.max_sequences)], np.int32)
        self.state, table = self.jitted["commit"](self.state, rows, upto)
        self.audited()
        self.tables = np.asarray(table)
        return self.tables[0]

    def release(self, *sequences: int) -> CacheEvents:
        done = np.zeros(self.spec.max_sequences, bool)
        done[list(sequences)] = True
        self.state, events = self.jitted["release"](self.state, done)
        self.audited()
        return jax.device_get(events)

    def serve(self, sequence: int, tokens: Sequence[int], *, space: int = 0, tenant: int = 0) -> int:
        """A whole life up to, but without, the release: admit, grow, commit. Answers the tokens found."""
        blocks = -(-len(tokens) // self.spec.block_size)
        found, status = self.admit(sequence, tokens, space=space, tenant=tenant, want=blocks)
        assert status == 0
        assert self.grow({sequence: blocks})[1][sequence] == 0
        self.commit({sequence: tokens})
        return found

    def tree(self, name: str, *arguments: Any) -> Any:
        """One of the functions of the tree alone, on this cache's tree; answers what it answers besides the tree."""
        radix, *answer = self.by_hand[name](self.state.radix, *arguments)
        self.state = self.state._replace(radix=radix)
        self.audited()
        answer = jax.device_get(answer)
        return answer[0] if len(answer) == 1 else answer

    def find(self, tokens: Sequence[int], space: int = 0) -> octavo_kvcache.Match:
        """The match of a prompt, in NumPy."""
        space_key = np.array([space, 0], np.uint32)
        return jax.device_get(LOOK["match"](self.state.radix, self.pad(tokens), np.int32(len(tokens)), space_key))

    def handles(self, ids: Sequence[int]) -> list[int]:
        return np.asarray(LOOK["handle"](self.state.radix, in_eights(ids)))[: len(ids)].tolist()

    def current(self, ids: Sequence[int], generations: Sequence[int]) -> list[bool]:
        answer = LOOK["is_current"](self.state.radix, in_eights(ids), in_eights(generations))
        return np.asarray(answer)[: len(ids)].tolist()


LOOK = {name: jax.jit(getattr(octavo_kvcache, name), compiler_options=QUICK) for name in ("match", "handle", "is_current")}


def in_eights(ids: Sequence[int]) -> np.ndarray:
    """Padded, so that few lengths are compiled."""
    return np.array([*ids, *[0] * (-len(ids) % 8)], np.int32)


def by_hand(spec: CacheSpec, policy: Any, *, size: int = 4) -> dict[str, Callable[..., Any]]:
    """The functions of the tree that change it, jitted, with sizes fixed; nothing is donated, so that what was can be compared."""
    deepest = spec.max_blocks - 1
    functions = {
        "allocate": lambda radix, count, tenant: octavo_kvcache.allocate(radix, count, size=size, tenant=tenant),
        "insert": octavo_kvcache.insert,
        "lease": octavo_kvcache.lease,
        "release": lambda radix, ids, generations: octavo_kvcache.release(radix, ids, generations, policy=policy),
        "evict": lambda radix, count: (octavo_kvcache.evict(radix, count, policy, max_depth=deepest),),
        "lend": lambda radix, count: octavo_kvcache.lend(radix, count, size=size, max_depth=deepest, policy=policy),
        "settle": octavo_kvcache.settle,
    }
    return {name: jax.jit(function, compiler_options=QUICK) for name, function in functions.items()}


_DRIVERS: dict[Any, Driver] = {}


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """A driver for given sizes, in the empty state; compiled once for each set of sizes."""

    def make(
        num_blocks: tuple[int, ...] = (12, 14),
        block_size: int = 2,
        sequences: int = 4,
        max_blocks: int = 6,
        kinds: tuple[Any, ...] = (),
        windows: tuple[int, ...] = (),
        **options: Any,
    ) -> Driver:
        spec = CacheSpec(num_blocks, block_size, sequences, max_blocks, kinds, windows)
        key = (spec, *options.items())
        if key not in _DRIVERS:
            _DRIVERS[key] = Driver(spec, **options)
        _DRIVERS[key].reset()
        return _DRIVERS[key]

    return make


@pytest.fixture(name="audited")
def audited_fixture() -> Callable[..., None]:
    """An audit of a cache or of a tree alone that must find nothing."""
    return audited


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As installed: the annotations of shapes are checked in tests only, so what refuses is the package itself."""
    with unchecked_shapes():
        yield


@pytest.fixture
def fresh_driver() -> type[Driver]:
    """The driver class, for tests that change what is traced."""
    return Driver


@pytest.fixture(name="by_hand")
def by_hand_fixture() -> Callable[..., dict[str, Callable[..., Any]]]:
    """The jitted functions of the tree alone for given sizes."""
    return by_hand


@pytest.fixture
def search() -> Callable[..., None]:
    """Run a state machine for so many histories; many times as many at night."""

    def run(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
        quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
        chosen = settings(
            max_examples=examples * SEARCH_FACTOR, stateful_step_count=steps, deadline=None, suppress_health_check=quiet
        )
        run_state_machine_as_test(machine, settings=chosen)

    return run


@pytest.fixture(scope="session")
def model() -> ModuleType:
    """The module `model.py` beside this file."""
    spec = importlib.util.spec_from_file_location("octavo_kvcache_model", pathlib.Path(__file__).with_name("model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
