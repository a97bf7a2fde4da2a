"""A follower of KV events: structs written from vLLM's documented layout, never the engine's own, and what a router keeps of them."""

import time
from typing import Any

import msgspec
import zmq

from octavo_core.testing.patience import PATIENCE_S


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class OldBlockStored(Event, tag="BlockStored"):
    """As followers written for the first version have it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldBlockStored]


class Follower:
    """Keeps the set of blocks an engine has, and checks every promise of the stream while it listens."""

    def __init__(self, events, topic=""):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.sub.connect(events.endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        if events.replay_endpoint:
            self.dealer.connect(events.replay_endpoint)
        self.decode = msgspec.msgpack.Decoder(Batch).decode
        self.held, self.tokens, self.numbers, self.has_cleared = set(), {}, [], False

    def close(self):
        self.context.destroy(linger=0)

    def receive(self, timeout_s=PATIENCE_S):
        """(topic, number, payload), or None."""
        if not self.sub.poll(int(timeout_s * 1000)):
            return None
        topic, number, payload = self.sub.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload

    def follow(self, number, payload):
        self.numbers.append(number)
        batch = self.decode(payload)
        assert abs(batch.ts - time.time()) < 600
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            self.apply(event)
        return batch

    def apply(self, event):
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
            self.has_cleared = True
            return
        assert event.medium == "GPU"
        names = [(event.group_idx, key) for key in event.block_hashes]
        if isinstance(event, BlockRemoved):
            assert set(names) <= self.held, "removed, and never stored"
            self.held -= set(names)
            return
        parent = event.parent_block_hash
        assert parent is None or (event.group_idx, parent) in self.held or self.has_cleared, "a child of nobody"
        assert len(event.token_ids) == event.block_size * len(names)
        before = self.tokens.get(parent, []) if parent is not None else []
        for i, name in enumerate(names):
            self.tokens[name[1]] = before + event.token_ids[: (i + 1) * event.block_size]
        self.held |= set(names)

    def drain(self, until=0.3):
        """Follow what comes until nothing does for a while."""
        while (message := self.receive(until)) is not None:
            self.follow(*message[1:])

    def replay(self, start):
        self.dealer.send_multipart((b"", start.to_bytes(8, "big")))
        answers = []
        while True:
            assert self.dealer.poll(int(PATIENCE_S * 1000)), "no answer to a replay"
            empty, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(number, "big"), payload))
