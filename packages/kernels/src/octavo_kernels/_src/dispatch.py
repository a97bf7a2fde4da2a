"""Which attention backend serves: candidates in order, the first that can.

Knows the names of this package's backends and how to reach anybody else's by dotted name. Knows nothing of how any of them works.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from octavo_core.errors import ConfigError, nearest_name
from octavo_core.seams import AttentionBackend
from octavo_core.specs import KVGroupSpec

BACKENDS: Final = {
    "hopper": "octavo_kernels._src.hopper:hopper_attention",
    "cpu": "octavo_kernels._src.cpu:cpu_attention",
    "xla": "octavo_kernels._src.xla_attention:XlaAttention",
    "reference": "octavo_kernels._src.reference_attention:ReferenceAttention",
}
"""Short names, in the order `auto` tries them."""


class PassedOver(NamedTuple):
    """A candidate that could not serve."""

    name: str
    reason: str


class AttentionChoice(NamedTuple):
    """The backend that serves.

    Attributes:
        name: Short or dotted name of the backend.
        backend: An `octavo_core.seams.AttentionBackend`.
        passed_over: Candidates tried before it, in order.
    """

    name: str
    backend: AttentionBackend[Any]
    passed_over: tuple[PassedOver, ...]


def attention_backend(name: str = "auto", groups: tuple[KVGroupSpec, ...] = ()) -> AttentionChoice:
    """Choose an attention backend.

    A candidate declines by raising `NotImplementedError` with its reason, from its constructor or from `init_kv`.

    Args:
        name: `auto` tries all short names of `BACKENDS`; or one of them; or a class or factory without arguments as
            `package.module:Name`; or several of these, joined by commas, in the order to try.
        groups: KV groups it must be able to serve; each is tried with a pool of 1 block.

    Raises:
        ConfigError: For a name nobody knows, and when no candidate can serve; the message has every reason.
    """
    passed: list[PassedOver] = []
    for candidate in _candidates(name):
        factory = _resolve(candidate)
        try:
            backend = factory()
            for group in groups:
                _check_rules(backend, group)
                backend.init_kv(group, 1)
        except NotImplementedError as reason:
            passed.append(PassedOver(candidate, str(reason)))
        else:
            return AttentionChoice(candidate, backend, tuple(passed))
    reasons = "; ".join(f"{p.name}: {p.reason}" for p in passed)
    raise ConfigError(f"no attention backend of '{name}' can serve here ({reasons}); name another with --attention-backend")


def attend_rules(spec: KVGroupSpec) -> dict[str, Any]:
    """What `AttentionBackend.attend` is told of every call for a group, beside its scale and sinks."""
    rules = {"window": spec.window, "softcap": spec.softcap}
    return {name: value for name, value in rules.items() if value is not None}


def _check_rules(backend: AttentionBackend[Any], spec: KVGroupSpec) -> None:
    """A backend written for plain attention lacks the arguments that other groups need."""
    wanted = [*attend_rules(spec), *(["sinks"] if spec.sinks else [])]
    known = inspect.signature(backend.attend).parameters
    lacking = [name for name in wanted if name not in known]
    if lacking:
        raise NotImplementedError(f"its `attend` takes no {', '.join(lacking)}, which the group of layer {spec.layers[0]} needs")


def _candidates(name: str) -> list[str]:
    parts = (part.strip() for part in name.split(","))
    return [one for part in parts for one in (BACKENDS if part == "auto" else [part])]


def _resolve(name: str) -> Callable[[], AttentionBackend[Any]]:
    path = BACKENDS.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"attention backend '{name}' is neither one of auto, {', '.join(BACKENDS)} nor a dotted name such as "
            f"my_fork.kernels:Backend{nearest_name(name, ['auto', *BACKENDS])}"
        )
    try:
        found: Callable[[], AttentionBackend[Any]] = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"attention backend '{name}' cannot be imported: {error}; check the spelling and that it is installed"
        ) from error
    if not callable(found):
        raise ConfigError(f"attention backend '{name}' is a {type(found).__name__}; wanted a class or a factory without arguments")
    return found
