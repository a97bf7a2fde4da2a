"""Shape checks for the whole suite, and schedulers compiled once."""

from __future__ import annotations

import functools
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


@pytest.fixture(scope="session")
def make_setup():
    """`(config, spec) → Setup`, compiled once for equal arguments."""
    return _setup
