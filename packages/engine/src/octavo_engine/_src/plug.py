"""Components of others, by dotted name. Knows no component."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from octavo_core.errors import ConfigError
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec

FLAG: Final = "--prefix-cache"
_METHODS: Final = ("init", "admit", "grow", "commit", "release")


def find_prefix_cache(name: str) -> Callable[[CacheSpec], Any]:
    """What `my.module:Class` names; found before anything is loaded.

    Raises:
        ConfigError: There is no such name, or it cannot be called.
    """
    try:
        make: Callable[[CacheSpec], Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{FLAG} is a dotted name such as my.module:Cache, got '{name}': {error}; "
            "check the spelling, and that Python finds the module (PYTHONPATH)"
        ) from error
    if not callable(make):
        raise ConfigError(f"{FLAG} '{name}' is a {type(make).__name__}; wanted a class or function of one CacheSpec")
    return make


def build_prefix_cache(name: str, make: Callable[[CacheSpec], Any], spec: CacheSpec) -> PrefixCache[Any]:
    """The cache for these sizes.

    Raises:
        ConfigError: Making it fails, or what is made is no `PrefixCache` for this spec.
    """
    try:
        cache = make(spec)
    except Exception as error:
        raise ConfigError(f"{FLAG} '{name}' cannot be built for {spec}: {type(error).__name__}: {error}") from error
    lacking = [method for method in _METHODS if not callable(getattr(cache, method, None))]
    if lacking:
        raise ConfigError(f"{FLAG} '{name}' makes a {type(cache).__name__}, no PrefixCache: it lacks {', '.join(lacking)}")
    _check_arguments(name, cache)
    if getattr(cache, "spec", None) != spec:
        raise ConfigError(
            f"{FLAG} '{name}' keeps in `spec` what it was built for: wanted {spec}, got {getattr(cache, 'spec', None)}"
        )
    return cache


def _check_arguments(name: str, cache: Any) -> None:
    """As many arguments as the seam has: a cache for another version is told apart before anything is traced."""
    for method in _METHODS:
        wanted = [*inspect.signature(getattr(PrefixCache, method)).parameters][1:]
        try:
            inspect.signature(getattr(cache, method)).bind(*wanted)
        except TypeError:
            raise ConfigError(f"{FLAG} '{name}': {method} takes ({', '.join(wanted)}), see octavo_core.seams") from None
