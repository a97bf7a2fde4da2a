"""KV events as they travel: vLLM's structs, field for field. Knows msgpack; knows no cache and no socket.

Source: vLLM's `vllm/distributed/kv_events.py`. The order of fields is the layout of the `array` encoding; `map`, which newer vLLM
uses, has the same names. `extra_keys` stays None: what separates tenants is a hash and enters the keys.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

MEDIUM: Final = "GPU"
"""Tier of the blocks announced; vLLM's word for the tier that attention reads."""

BlockHash = bytes | int


class BlockStored(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Consecutive blocks of one token sequence can be found from now on."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, gc=False):
    """These blocks cannot be found any more."""

    block_hashes: list[BlockHash]
    medium: str | None = MEDIUM
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, gc=False):
    """Whatever was announced before this may be gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared

_ENCODER = msgspec.msgpack.Encoder()


def encode(ts: float, events: list[Event], *, as_maps: bool) -> bytes:
    """One batch. `ts`: seconds since 1970. The third element is the data parallel rank, 0 here."""
    return _ENCODER.encode((ts, [_as_map(event) for event in events] if as_maps else events, 0))


def _as_map(event: Event) -> dict[str, Any]:
    """By field name; fields that vLLM gives a default are left out where they have it."""
    fields = msgspec.structs.asdict(event)
    optional = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
    return {"type": type(event).__name__, **{k: v for k, v in fields.items() if v is not None or k not in optional}}
