"""Shape checks for the whole suite, schedulers compiled once, and the plain-Python oracle."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import NamedTuple

from jaxtyping import install_import_hook

install_import_hook("octavo_scheduler", "beartype.beartype")

import pytest

from octavo_core.specs import CacheSpec
from octavo_core.testing.scheduler import JittedPlanner
from octavo_core.testing.small_cache import SmallCache
from octavo_scheduler import ChunkedScheduler, SchedulerConfig


class Setup(NamedTuple):
    """A scheduler around the small cache, ready to run."""

    config: SchedulerConfig
    spec: CacheSpec
    planner: JittedPlanner


@functools.cache
def _setup(config: SchedulerConfig, spec: CacheSpec) -> Setup:
    cache = SmallCache(spec)
    return Setup(config, spec, JittedPlanner(ChunkedScheduler(config, cache), cache))


def _of(**options: object) -> SchedulerConfig:
    return SchedulerConfig(**{"max_arrivals": 3, **options})


# Pools from roomy to exactly one longest sequence; budgets 1 to 64; chunks larger and smaller than the budget; both policies.
SETUPS = {
    "roomy": (_of(max_num_seqs=4, token_budget=16, chunk_size=5), CacheSpec((40,), 4, 6, 6)),
    "one sequence fills the pool": (_of(max_num_seqs=4, token_budget=8), CacheSpec((7,), 4, 6, 6)),
    "budget of one token": (_of(max_num_seqs=3, token_budget=1), CacheSpec((6,), 4, 5, 5)),
    "fewer tokens than rows": (_of(max_num_seqs=5, token_budget=3, chunk_size=2, policy="priority"), CacheSpec((9,), 2, 5, 8)),
    "chunk beyond the budget": (
        _of(max_num_seqs=6, token_budget=64, chunk_size=317, watermark_blocks=2),
        CacheSpec((13, 11), 8, 7, 9),
    ),
    "priority under pressure": (_of(max_num_seqs=6, token_budget=12, chunk_size=7, policy="priority"), CacheSpec((8,), 3, 8, 7)),
}


@pytest.fixture(params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    """Each of the standard setups in turn, empty."""
    ready = _setup(*SETUPS[request.param])
    ready.planner.reset()
    return ready


@pytest.fixture(scope="session")
def make_setup():
    """`(config, spec) → Setup`, compiled once for equal arguments."""
    return _setup


@pytest.fixture(scope="session")
def oracle() -> ModuleType:
    """The module `oracle.py` beside this file."""
    spec = importlib.util.spec_from_file_location("octavo_scheduler_oracle", pathlib.Path(__file__).with_name("oracle.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
