"""Reading typed values out of a mapping that somebody else wrote.

Knows how to say which file and key is wrong; knows no key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo_core.errors import CheckpointError

_LARGEST: Final = 2**31 - 1


class Fields:
    """Typed access to a mapping; every complaint names `source` and the key.

    A value of None (JSON's null) counts as absent. A key without a default must be there.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def has(self, key: str) -> bool:
        """The key is there and not null."""
        return self.values.get(key) is not None

    def fail(self, key: str, wanted: str) -> CheckpointError:
        """The error to raise for a key: what was wanted there, what came."""
        came = repr(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.source}: '{key}' must be {wanted}, got {came if len(came) < 80 else came[:77] + '...'}")

    def _get(self, key: str, default: Any, wanted: str) -> Any:
        if default is None and not self.has(key):
            raise self.fail(key, wanted)
        return self.values[key] if self.has(key) else default

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number from `least` to 2³¹−1."""
        wanted = f"an integer from {least} to {_LARGEST}"
        value = self._get(key, default, wanted)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            raise self.fail(key, wanted)
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0, most: float = math.inf, closed: bool = False
    ) -> float:
        """A finite number above `above` (or equal to it where `closed`) and at most `most`."""
        wanted = f"a number {'of at least' if closed else 'above'} {above:g}" + (
            f" and at most {most:g}" if most < math.inf else ""
        )
        value = self._get(key, default, wanted)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(key, wanted)
        if value > most or value < above or (value == above and not closed):
            raise self.fail(key, wanted)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default, "a string")
        if not isinstance(value, str):
            raise self.fail(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the key is absent."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= _LARGEST:
                raise self.fail(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: When the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: wanted a JSON object, but it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wanted a JSON object, got {type(value).__name__}")
    return value
