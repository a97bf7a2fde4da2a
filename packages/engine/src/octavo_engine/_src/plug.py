"""Components of others, by dotted name. Knows no component."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from octavo_core.errors import ConfigError
from octavo_core.seams import Model, PrefixCache, Sampler, Scheduler
from octavo_core.specs import CacheSpec

FLAG: Final = "--prefix-cache"
_METHODS: Final[dict[Any, tuple[str, ...]]] = {
    PrefixCache: ("init", "admit", "grow", "commit", "release"),
    Scheduler: ("init", "step", "arrive"),
    Sampler: ("init", "begin", "sample"),
    Model: ("kv_groups", "begin", "layers", "hidden", "logits", "weight_parts"),
}
_OWN: Final = {"weight_parts"}
"""Of what a model class has beside its seam, so that a checkpoint can be read into it."""


def find(flag: str, name: str, wanted: str) -> Callable[..., Any]:
    """What `my.module:Name` names; found before anything is loaded.

    Args:
        flag: Where it was said.
        name: The dotted name.
        wanted: What it is called with.

    Raises:
        ConfigError: There is no such name, or it cannot be called.
    """
    try:
        make: Callable[..., Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{flag} is a dotted name such as my.module:Name, got '{name}': {error}; "
            "check the spelling, and that Python finds the module (PYTHONPATH)"
        ) from error
    if not callable(make):
        raise ConfigError(f"{flag} '{name}' is a {type(make).__name__}; wanted a class or function of {wanted}")
    return make


def build(flag: str, name: str, seam: type, make: Callable[[], Any], told: str) -> Any:
    """What `make` makes, if it is a component of this seam.

    Args:
        flag, name: For messages.
        seam: A protocol of `octavo_core.seams`.
        make: Calls what was found.
        told: What it is made for, in messages.

    Raises:
        ConfigError: Making it fails, or what is made lacks a method or takes other arguments.
    """
    try:
        made = make()
    except Exception as error:
        raise ConfigError(f"{flag} '{name}' cannot be built for {told}: {type(error).__name__}: {error}") from error
    lacking = [method for method in _METHODS[seam] if not callable(getattr(made, method, None))]
    if lacking:
        raise ConfigError(f"{flag} '{name}' makes a {type(made).__name__}, no {seam.__name__}: it lacks {', '.join(lacking)}")
    _check_arguments(flag, name, seam, made)
    return made


def find_prefix_cache(name: str) -> Callable[[CacheSpec], Any]:
    """As `find`, of a cache."""
    return find(FLAG, name, "one CacheSpec")


def build_prefix_cache(name: str, make: Callable[[CacheSpec], Any], spec: CacheSpec) -> PrefixCache[Any]:
    """The cache for these sizes.

    Raises:
        ConfigError: As `build`, and for a cache that keeps another spec.
    """
    cache: PrefixCache[Any] = build(FLAG, name, PrefixCache, lambda: make(spec), str(spec))
    if getattr(cache, "spec", None) != spec:
        raise ConfigError(
            f"{FLAG} '{name}' keeps in `spec` what it was built for: wanted {spec}, got {getattr(cache, 'spec', None)}"
        )
    return cache


def _check_arguments(flag: str, name: str, seam: type, made: Any) -> None:
    """As many arguments as the seam has: a component for another version is told apart before anything is traced."""
    for method in _METHODS[seam]:
        if method in _OWN:
            continue
        wanted = [*inspect.signature(getattr(seam, method)).parameters.values()][1:]
        named = {p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY}
        places = [p.name for p in wanted if p.kind is not p.KEYWORD_ONLY]
        try:
            inspect.signature(getattr(made, method)).bind(*places, **named)
        except TypeError:
            told = ", ".join([*places, *(f"{n}=" for n in named)])
            raise ConfigError(f"{flag} '{name}': {method} takes ({told}), see octavo_core.seams") from None
