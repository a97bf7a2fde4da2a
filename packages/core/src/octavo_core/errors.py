"""Every exception Octavo raises on purpose, in one tree.

    OctavoError
    ├── ConfigError            a setting that cannot work, found before anything starts
    ├── CheckpointError        a model that cannot be read
    │   └── UnsupportedModelError   readable, but of a kind this version does not serve
    ├── RequestError           the caller's request is wrong: HTTP 4xx
    │   ├── ContextLengthError      prompt longer than the model or the KV pool can hold
    │   └── UnknownModelError       a model name nobody serves here
    ├── OverloadedError        a bounded queue is full: HTTP 503, try again later
    ├── EngineDeadError        the step loop has ended; nothing can be served
    └── FrameError             bytes on a wire that are not what they claim to be

Knows HTTP status numbers only as a hint for the frontend. Running out of blocks is a returned status, never an exception.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OctavoError(Exception):
    """Root of the tree. The message says what was wanted, what came and what to do."""

    http_status = 500
    code: str | None = None


class ConfigError(OctavoError):
    """A setting that cannot work."""


class CheckpointError(OctavoError):
    """A checkpoint that is missing, truncated or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """A well-formed checkpoint of an architecture or quantisation this version does not serve."""


class RequestError(OctavoError):
    """A request that is refused: the caller can mend it.

    Args:
        message: What was wanted, what came, what to do.
        param: Name of the offending field, where there is one.
        code: Machine-readable reason in OpenAI's vocabulary, where it has one.
    """

    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ContextLengthError(RequestError):
    """The prompt (plus the tokens asked for) does not fit."""

    code = "context_length_exceeded"


class UnknownModelError(RequestError):
    """The named model is not served here."""

    http_status = 404
    code = "model_not_found"


class OverloadedError(OctavoError):
    """A bounded queue is full.

    Args:
        message: Which bound, its value, what came.
        retry_after_s: Seconds after which trying again is sensible.
    """

    http_status = 503
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDeadError(OctavoError):
    """The step loop has ended."""

    http_status = 503
    code = "engine_dead"


class FrameError(OctavoError):
    """Bytes that are not a valid frame or message."""


def nearest_name(unknown: str, known: Iterable[str]) -> str:
    """A hint naming the known word closest to an unknown one: `"; did you mean 'x'?"`, or the empty string."""
    close = difflib.get_close_matches(unknown, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
