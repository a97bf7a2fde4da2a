"""What `--kv-events-config` holds: vLLM's fields under vLLM's names and defaults, and two of our own. Knows no socket."""

from __future__ import annotations

import dataclasses
from typing import Literal

import msgspec

from octavo_core.errors import ConfigError, nearest_name

FLAG = "--kv-events-config"


@dataclasses.dataclass(frozen=True)
class KVEventsConfig:
    """How KV events leave the engine.

    Attributes:
        enable_kv_cache_events: Publish at all.
        publisher: `zmq`, or `null` to publish nothing.
        endpoint: Where the PUB socket is. It binds to an address with a wildcard (`*`, `::`) and to `ipc://`, and connects to any other.
        replay_endpoint: Where the ROUTER socket binds that answers for batches missed; None: nowhere.
        buffer_steps: Batches kept for replay.
        hwm: Batches that wait for one slow subscriber before ZeroMQ drops them.
        max_queue_size: Batches that wait for the publishing thread before they are dropped.
        topic: First frame of every message.
        encoding: Each event as an `array` (vLLM until mid-2026), or as a `map` with the tag under `type` (newer vLLM, such as 0.26).
            The batch around them is an array in both.
        block_hashes: Keys as 32 `bytes`, or as an `int` of their last 8, for followers that know no other.

    Raises:
        ConfigError: For a size below 1.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: Literal["array", "map"] = "array"
    block_hashes: Literal["bytes", "int"] = "bytes"

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{FLAG}: {name} is at least 1, got {getattr(self, name)}")

    @property
    def publishes(self) -> bool:
        """Events are wanted and have somewhere to go."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def parse(text: str | None) -> KVEventsConfig:
    """The configuration written as a JSON object; None: the defaults, which publish nothing.

    Raises:
        ConfigError: For anything else, an unknown key or a value of the wrong type.
    """
    if text is None:
        return KVEventsConfig()
    try:
        values = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{FLAG} is a JSON object such as {{\"enable_kv_cache_events\": true}}, got '{text}': {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{FLAG} is a JSON object, got '{text}'")
    known = [field.name for field in dataclasses.fields(KVEventsConfig)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{FLAG} has no key '{key}'{nearest_name(key, known)}")
    try:
        return msgspec.convert(values, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG}: {error}") from None
