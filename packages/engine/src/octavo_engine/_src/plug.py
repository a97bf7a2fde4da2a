"""Components of others, by dotted name. Knows no component."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from octavo_core.errors import ConfigError
from octavo_core.seams import PrefixCache
from octavo_core.specs import CacheSpec

_METHODS = ("init", "admit", "grow", "commit", "release")


def load_prefix_cache(name: str, spec: CacheSpec) -> PrefixCache[Any]:
    """The cache that `name` builds for these sizes.

    Args:
        name: `my.module:Class`; called with the spec.

    Raises:
        ConfigError: There is no such name, calling it fails, or what it answers is no `PrefixCache` for this spec.
    """
    try:
        make = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--prefix-cache is a dotted name such as my.module:Cache, got '{name}': {error}; check the spelling and that the module can be imported"
        ) from error
    if not callable(make):
        raise ConfigError(f"--prefix-cache '{name}' is a {type(make).__name__}; wanted a class or function of one CacheSpec")
    try:
        cache = make(spec)
    except Exception as error:
        raise ConfigError(f"--prefix-cache '{name}' cannot be built for {spec}: {type(error).__name__}: {error}") from error
    lacking = [method for method in _METHODS if not callable(getattr(cache, method, None))]
    if lacking:
        raise ConfigError(f"--prefix-cache '{name}' is no PrefixCache: it lacks {', '.join(lacking)}; see octavo_core.seams")
    _check_arguments(name, cache)
    if getattr(cache, "spec", None) != spec:
        raise ConfigError(f"--prefix-cache '{name}': its `spec` is the one it was built for, {spec}")
    return cache


def _check_arguments(name: str, cache: Any) -> None:
    """As many arguments as the seam has: a cache for another version is told apart before anything is traced."""
    for method in _METHODS:
        wanted = [*inspect.signature(getattr(PrefixCache, method)).parameters][1:]
        try:
            inspect.signature(getattr(cache, method)).bind(*wanted)
        except TypeError:
            raise ConfigError(f"--prefix-cache '{name}': {method} takes ({', '.join(wanted)}); see octavo_core.seams") from None
