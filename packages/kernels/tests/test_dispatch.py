"""Ordered dispatch: who is asked, who declines, and what is said when nobody is left."""

from __future__ import annotations

import sys
import types

import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import KVGroupSpec
from octavo_kernels import BACKENDS, ReferenceAttention, attention_backend

FULL = KVGroupSpec("full", (0, 1), 2, 16, "float32", 16)
LATENT = KVGroupSpec("latent", (0, 1), 1, 16, "float32", 16)


@pytest.fixture
def fork(monkeypatch):
    """A module outside the package with a backend that works, one that declines and something that is no backend."""

    class Declines(ReferenceAttention):
        def __init__(self) -> None:
            raise NotImplementedError("needs a GPU, found none")

    module = types.ModuleType("some_fork")
    module.Works, module.Declines, module.number = ReferenceAttention, Declines, 3
    monkeypatch.setitem(sys.modules, "some_fork", module)


def test_auto_takes_the_first_that_serves() -> None:
    choice = attention_backend("auto", (FULL,))
    assert choice.name == next(iter(BACKENDS))
    assert choice.passed_over == ()


def test_a_short_name_is_taken_at_its_word() -> None:
    assert isinstance(attention_backend("reference").backend, ReferenceAttention)


@pytest.mark.usefixtures("fork")
def test_a_fork_plugs_in_by_dotted_name() -> None:
    assert attention_backend("some_fork:Works", (FULL,)).name == "some_fork:Works"


@pytest.mark.usefixtures("fork")
def test_those_passed_over_are_reported_with_their_reasons() -> None:
    choice = attention_backend("some_fork:Declines, reference", (FULL,))
    assert choice.name == "reference"
    assert choice.passed_over == (("some_fork:Declines", "needs a GPU, found none"),)


@pytest.mark.usefixtures("fork")
def test_when_nobody_can_serve_every_reason_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"some_fork:Declines: needs a GPU.*xla: .*latent.*reference: .*latent"):
        attention_backend("some_fork:Declines,auto", (LATENT,))


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'reference'\?"):
        attention_backend("referense")


@pytest.mark.usefixtures("fork")
@pytest.mark.parametrize("name", ["some_fork:Missing", "no_such_module_here:Thing", "some fork:Works", "some_fork:number"])
def test_a_dotted_name_that_leads_nowhere_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention backend '{name}'"):
        attention_backend(name)
