"""KV events as a follower sees them, without an engine: what is announced, in which order, and what happens when it cannot be."""

import time

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_core.keys import block_keys
from octavo_core.plan import CacheEvents
from octavo_core.specs import KVGroupSpec
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine import EngineConfig
from octavo_engine._src.kv_events import KVEvents
from octavo_engine._src.kv_events_config import KVEventsConfig, parse
from octavo_engine._src.sequence import Sequence

BLOCK = 4
GROUPS = (KVGroupSpec("full", (0,), 1, 8, "float32", BLOCK), KVGroupSpec("window", (1,), 1, 8, "float32", BLOCK, window=6))


def sequence(tokens, order=0, namespace=b"namespac", prompt_len=3):
    request = EngineRequest(request_id=str(order), prompt_ids=tokens[:prompt_len], sampling=SamplingParams(), namespace=namespace)
    return Sequence(request, order, 10_000, 0, frozenset(), 0.0, output=tokens[prompt_len:])


def step(stored=(), removed=(), overflow=False):
    """The events of one step, padded as a plan's are."""

    def padded(rows, width):
        out = np.full((len(rows) + 3, width), -1, np.int32)
        out[: len(rows)] = np.array(rows, np.int32).reshape(-1, width)
        return out

    nothing = np.zeros(2, np.int32)
    return CacheEvents(padded(stored, 5), padded(removed, 3), np.bool_(overflow), nothing, nothing)


@pytest.fixture
def open_events(layout):
    """A publisher on free ports and a follower that is subscribed to it."""
    opened = []

    def make(begin=True, **options):
        addresses = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
        events = KVEvents(KVEventsConfig(enable_kv_cache_events=True, **{**addresses, **options}))
        follower = layout.Follower(events, options.get("topic", ""))
        opened.append((events, follower))
        time.sleep(0.2)  # a subscription takes effect when it has travelled
        if begin:
            events.begin(GROUPS, BLOCK)
        return events, follower

    yield make
    for events, follower in opened:
        events.close()
        follower.close()


def test_a_stored_block_carries_its_key_its_parent_and_its_tokens(layout, open_events):
    events, follower = open_events(topic="kv-events")
    tokens = list(range(100, 115))
    keys = block_keys(tokens, b"namespac", BLOCK)
    events.take(step([(0, 7, 1, 1, 0), (0, 9, 1, 1, 1)]), [None, sequence(tokens)])
    topic, number, payload = follower.receive()
    assert (topic, number) == (b"kv-events", 0)
    assert follower.follow(number, payload).events == [
        layout.BlockStored(keys[:2], None, tokens[:8], BLOCK, None, "GPU", None, None, 0, "full_attention", None)
    ]
    events.take(step([(0, 3, 5, 0, 2)], [(0, 7, 1)]), [sequence(tokens)])
    assert follower.follow(*follower.receive()[1:]).events == [
        layout.BlockStored([keys[2]], keys[1], tokens[8:12], BLOCK, None, "GPU", None, None, 0, "full_attention", None),
        layout.BlockRemoved([keys[0]], "GPU", 0),
    ]


def test_groups_are_told_apart_and_described(open_events):
    events, follower = open_events()
    tokens = list(range(8))
    events.take(step([(g, 1, 1, 0, c) for c in (0, 1) for g in (0, 1)]), [sequence(tokens)])
    full, window = follower.follow(*follower.receive()[1:]).events
    assert (full.group_idx, full.kv_cache_spec_kind, full.kv_cache_spec_sliding_window) == (0, "full_attention", None)
    assert (window.group_idx, window.kv_cache_spec_kind, window.kv_cache_spec_sliding_window) == (1, "sliding_window", 6)
    assert full.block_hashes == window.block_hashes == block_keys(tokens, b"namespac", BLOCK)


def test_steps_that_change_nothing_send_nothing_and_spend_no_number(open_events):
    events, follower = open_events()
    events.take(step(), [])
    events.take(step(removed=[(0, 5, 5)]), [])  # a block nobody was told of
    events.take(step([(0, 1, 1, 0, 0)]), [sequence([1, 2, 3, 4])])
    assert follower.receive()[1] == 0


def test_a_generation_is_part_of_a_blocks_name(open_events):
    events, follower = open_events()
    old, new = sequence([1] * 4), sequence([2] * 4, order=1)
    events.take(step([(0, 1, 1, 0, 0)]), [old])
    events.take(step([(0, 1, 2, 0, 0)], [(0, 1, 1)]), [new])
    follower.drain()
    assert follower.held == {(0, key) for key in block_keys([2] * 4, b"namespac", BLOCK)}


def test_overflow_clears_everything_and_later_removals_of_forgotten_blocks_are_silent(open_events):
    events, follower = open_events()
    one = sequence(list(range(16)))
    events.take(step([(0, 1, 1, 0, 0)]), [one])
    events.take(step([(0, 2, 1, 0, 1)], overflow=True), [one])
    events.take(step([(0, 3, 1, 0, 2)], [(0, 1, 1), (0, 2, 1)]), [one])
    follower.drain()
    assert follower.numbers == [0, 1, 2]
    assert follower.has_cleared
    assert follower.held == {(0, block_keys(list(range(12)), b"namespac", BLOCK)[2])}


def test_a_full_queue_drops_counts_leaves_a_gap_and_tells_followers_to_start_over(layout, open_events):
    events, follower = open_events(begin=False, max_queue_size=1)
    one = sequence(list(range(40)))
    began = time.monotonic()
    for column in range(4):
        events.take(step([(0, column + 1, 1, 0, column)]), [one])
    assert time.monotonic() - began < 1.0
    assert events.num_dropped == 3
    events.begin(GROUPS, BLOCK)
    assert follower.receive()[1] == 0
    events.take(step([(0, 9, 1, 0, 9)]), [one])
    _, number, payload = follower.receive()
    assert number == 4
    cleared, stored = follower.follow(number, payload).events
    assert isinstance(cleared, layout.AllBlocksCleared)
    assert stored.token_ids == [36, 37, 38, 39]
    assert [number for number, _ in follower.replay(0)] == [0, 4]


def test_a_change_that_cannot_be_told_leaves_a_gap_and_publishing_goes_on(open_events, caplog):
    events, follower = open_events()
    events.take(step([(0, 1, 1, 0, 9)]), [sequence([1, 2, 3, 4])])  # a ninth block of four tokens
    events.take(step([(5, 1, 1, 0, 0)]), [sequence([1, 2, 3, 4])])  # a sixth group of two
    events.take(step([(0, 1, 1, -1, 0), (0, 1, 1, 3, 0)]), [sequence([1, 2, 3, 4])])  # sequences there are not
    events.take(step([(0, 2, 1, 0, 0)]), [sequence([5, 6, 7, 8])])
    follower.drain()
    assert follower.numbers == [2, 3]
    assert follower.has_cleared
    assert follower.held == {(0, block_keys([5, 6, 7, 8], b"namespac", BLOCK)[0])}
    assert "batch 0 was not published" in caplog.text


def test_the_last_batches_are_replayed_from_any_number_on(open_events):
    events, follower = open_events(buffer_steps=5)
    one = sequence(list(range(400)))
    for column in range(12):
        events.take(step([(0, column + 1, 1, 0, column)]), [one])
    live = [follower.receive()[1:] for _ in range(12)]
    assert [number for number, _ in live] == list(range(12))
    assert follower.replay(0) == live[7:]
    assert follower.replay(10) == live[10:]
    assert follower.replay(12) == []
    assert follower.replay(2**64 - 1) == []


@pytest.mark.parametrize("request_frames", [(b"",), (b"", b""), (b"", b"12345678", b"x"), (b"", b"123456789"), (b"x",) * 5])
def test_a_replay_request_that_is_none_is_answered_with_the_end(open_events, request_frames):
    _, follower = open_events()
    follower.dealer.send_multipart(request_frames)
    assert follower.dealer.poll(int(PATIENCE_S * 1000))
    assert follower.dealer.recv_multipart() == [b"", b"\xff" * 8, b""]
    assert follower.replay(0) == []


def test_a_long_replay_to_a_follower_that_is_slow_to_read_is_whole(open_events):
    events, follower = open_events(buffer_steps=5000)
    one = sequence(list(range(4 * 3000)))
    for column in range(3000):
        events.take(step([(0, column + 1, 1, 0, column)]), [one])
    while follower.receive()[1] < 2999:
        pass
    follower.dealer.send_multipart((b"", bytes(8)))
    time.sleep(0.5)
    assert len([follower.dealer.recv_multipart() for _ in range(3001)]) == 3001


def test_maps_carry_the_same_fields_by_name_within_the_same_batch(open_events):
    events, follower = open_events(encoding="map")
    tokens = [1, 2, 3, 4]
    events.take(step([(0, 1, 1, 0, 0)]), [sequence(tokens)])
    events.take(step(removed=[(0, 1, 1)]), [])
    events.take(step(overflow=True), [])
    (key,) = block_keys(tokens, b"namespac", BLOCK)
    batches = [msgspec.msgpack.decode(follower.receive()[2]) for _ in range(3)]
    assert [b[2] for b in batches] == [0, 0, 0]
    assert batches[0][1] == [
        {"type": "BlockStored", "block_hashes": [key], "parent_block_hash": None, "token_ids": tokens, "block_size": 4,
         "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    ]  # fmt: skip
    assert batches[1][1] == [{"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": 0}]
    assert batches[2][1] == [{"type": "AllBlocksCleared"}]


def test_followers_of_the_first_version_read_integer_keys(layout, open_events):
    events, follower = open_events(block_hashes="int")
    tokens = list(range(8))
    events.take(step([(0, 1, 1, 0, 0)]), [sequence(tokens)])
    events.take(step([(0, 2, 1, 0, 1)]), [sequence(tokens)])
    first, second = block_keys(tokens, b"namespac", BLOCK)
    wanted = [int.from_bytes(key[-8:], "big") for key in (first, second)]
    batches = [msgspec.msgpack.decode(follower.receive()[2], type=layout.OldBatch) for _ in range(2)]
    assert [b.events[0].block_hashes for b in batches] == [[wanted[0]], [wanted[1]]]
    assert batches[1].events[0].parent_block_hash == wanted[0]


histories = st.lists(
    st.lists(st.tuples(st.sampled_from(["store", "store", "remove"]), st.integers(0, 5), st.integers(0, 3)), max_size=6),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(histories)
def test_a_follower_knows_exactly_the_keys_a_cache_holds_whatever_happened(layout, history):
    """A cache that files the blocks of six prompts in random order, twice if it likes, and removes children first."""
    prompts = [sequence([p // 3, p // 2, 0, 0] * 2 + [p] * 8, order=p) for p in range(6)]
    events = KVEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*"))
    follower = layout.Follower(events)
    try:
        time.sleep(0.02)
        events.begin(GROUPS, BLOCK)
        live, next_block = {}, 1
        for change in history:
            stored, removed = [], []
            for action, prompt, column in change:
                tokens = prompts[prompt].request.prompt_ids + prompts[prompt].output
                keys = block_keys(tokens, b"namespac", BLOCK)
                if action == "store" and (column == 0 or keys[column - 1] in live.values()):
                    live[(0, next_block, 1)] = keys[column]
                    stored.append((0, next_block, 1, prompt, column))
                    next_block += 1
                elif action == "remove" and live:
                    last = max(live)  # whatever is its child was stored later
                    del live[last]
                    removed.append(last)
            events.take(step(stored, removed), prompts)
        events.take(step([(0, 10_000, 1, 0, 0)]), prompts)
        live[(0, 10_000, 1)] = block_keys(prompts[0].request.prompt_ids + prompts[0].output, b"namespac", BLOCK)[0]
        events.close()
        follower.drain(0.05)
        if follower.numbers and follower.numbers[0] == 0:  # else it subscribed too late to know
            assert follower.numbers == list(range(len(follower.numbers)))
            assert {key for _, key in follower.held} == set(live.values())
    finally:
        follower.close()


def test_an_address_in_use_is_refused_in_one_line():
    first = KVEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*"))
    taken = first.endpoint.replace("127.0.0.1", "*")
    try:
        for options in ({"endpoint": taken}, {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": first.endpoint}):
            with pytest.raises(ConfigError, match=r"cannot bind 'tcp://.*in use.*; choose another endpoint"):
                KVEvents(KVEventsConfig(**options))
    finally:
        first.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "tcp://host", "ftp://*:1"])
def test_an_address_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match="choose another endpoint"):
        KVEvents(KVEventsConfig(endpoint=endpoint))


def test_an_endpoint_without_a_wildcard_is_connected_to(open_events):
    context = zmq.Context()
    try:
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        events, _ = open_events(endpoint=f"tcp://127.0.0.1:{port}")
        assert not sub.poll(300)  # a socket subscribes while it waits
        events.take(step([(0, 1, 1, 0, 0)]), [sequence([1, 2, 3, 4])])
        assert sub.poll(int(PATIENCE_S * 1000))
        assert events.told[1] == f"--kv-events-config: connected, replay on {events.replay_endpoint}"
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is a JSON object such as"),
        ("[]", "is a JSON object, got"),
        ('{"endpont": "x"}', "has no key 'endpont'; did you mean 'endpoint'"),
        ('{"buffer_steps": "many"}', "Expected `int`, got `str`"),
        ('{"publisher": "kafka"}', "Invalid enum value 'kafka'"),
        ('{"encoding": "json"}', "Invalid enum value 'json'"),
        ('{"hwm": 0}', "hwm is at least 1, got 0"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_the_name_of_its_flag(text, message):
    with pytest.raises(ConfigError, match=f"--kv-events-config.*{message}"):
        EngineConfig(kv_events_config=text)


def test_nothing_is_published_unless_it_is_asked_for():
    assert not parse(None).publishes
    assert not parse("{}").publishes
    assert not parse('{"enable_kv_cache_events": true, "publisher": "null"}').publishes
    assert parse('{"enable_kv_cache_events": true}').publishes
    assert parse('{"enable_kv_cache_events": true}').endpoint == "tcp://*:5557"
