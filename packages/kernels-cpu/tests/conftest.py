"""The library under test: the best one that this machine can run and that is built."""

import sys
from pathlib import Path

from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))

install_import_hook("octavo_kernels_cpu", "beartype.beartype")

import jax
import pytest

from octavo_kernels_cpu._src import build_library
from octavo_kernels_cpu._src.library import NEEDS, ORDER, Library, load, processor_flags

HERE = [isa for isa in reversed(ORDER) if NEEDS[isa] <= processor_flags()]


@pytest.fixture(scope="session", params=HERE or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    """Each instruction set that this machine has."""
    try:
        return load(request.param)
    except (NotImplementedError, KeyError) as reason:
        pytest.skip(f"no kernels for {request.param}: {reason}")


@pytest.fixture(scope="session")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The same source compiled without vector units."""
    try:
        folder = build_library.build(Path(jax.ffi.include_dir()), ["scalar"], folder=tmp_path_factory.mktemp("scalar"))
    except build_library.CannotBuild as reason:
        pytest.skip(str(reason))
    return load("scalar", folder)
