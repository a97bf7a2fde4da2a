"""Sizes as people write them."""

from __future__ import annotations

import re
from typing import Final

from octavo_core.errors import ConfigError

_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_size(text: str, flag: str) -> int:
    """Bytes of `4GiB`, `512M` or `1.5t`.

    Raises:
        ConfigError: It is no size above 0; the message names the flag.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ConfigError(f"{flag} wants a size above 0 such as 4GiB or 512M, got '{text}'")
    return size
