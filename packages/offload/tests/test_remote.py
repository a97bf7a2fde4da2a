"""A store in this process or another, its members, and what can happen between them. Right bytes or a miss, every time.

Size: all of it shares one store.
"""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload import RemoteConfig, RemoteTier, Tls, checksum, open_tiers
from octavo_offload._src.remote import auth
from octavo_offload._src.remote import messages as m
from octavo_offload._src.remote.peer import Peer, PeerError
from octavo_offload.commands import kv_store
from octavo_offload.node import Blocks, Node

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS
KEY = b"k" * 32
PATIENCE_S = 600.0


def until(what, word):
    """Wait for what must happen."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, word
        time.sleep(0.01)


@pytest.fixture(scope="module")
def node():
    node = Node("127.0.0.1:0", Blocks(8 << 20), KEY)
    node.start()
    yield node
    node.stop(0.0)


@pytest.fixture(scope="module")
def tiers():
    """Makes tiers and closes them."""
    made = []

    def make(target, *, identity=None, size=suite.BLOCK_BYTES, is_waited_for=True, **options):
        options = {
            "secret": KEY,
            "window_bytes": 8 * size,
            "deadline_s": 60.0,
            "join_s": PATIENCE_S if is_waited_for else 0.0,
            **options,
        }
        made.append(RemoteTier(RemoteConfig(target=target, **options), size, identity or os.urandom(32)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.fixture(scope="module")
def tier(node, tiers):
    """One with blocks of nobody else's, for tests that do not harm it."""
    return tiers(node.address, identity=b"s" * 32)


def test_a_store_keeps_the_promises_of_a_tier(node, tiers):
    suite.check_tier(lambda: tiers(node.address))
    assert node.blocks.num_leased == 0


def test_engines_of_one_identity_share_blocks_and_others_find_nothing(node, tiers, tier):
    numbers = [1, 2, 3]
    assert suite.put(tier, numbers) == (HIT,) * 3
    same, other = tiers(node.address, identity=b"s" * 32), tiers(node.address, identity=b"t" * 32)
    assert suite.get(same, numbers) == (HIT,) * 3
    assert same.told == "grpc; 3 blocks found"
    assert suite.get(other, numbers) == (MISS,) * 3
    suite.put(same, [4])
    until(lambda: tier.find([suite.key_of(4)]), "the directory follows what others put")
    assert suite.get(tier, [4]) == (HIT,)


def test_blocks_of_two_types_lie_side_by_side(node, tiers, tier):
    """The same keys, as a mistake would have them, in two sizes."""
    small = tiers(node.address, size=1000)
    suite.put(tier, [5])
    data = memoryview(suite.block_of(5, 1000))
    ticket = small.put([suite.key_of(5)], [data])
    assert suite.wait_for(small, [ticket])[ticket] == (HIT,)
    into = memoryview(bytearray(1000))
    ticket = small.get([suite.key_of(5)], [into])
    assert suite.wait_for(small, [ticket])[ticket] == (HIT,)
    assert into == data
    assert suite.get(tier, [5]) == (HIT,)


def test_a_flipped_bit_in_the_store_is_a_miss_and_is_counted(node, tier):
    suite.put(tier, [7, 8])
    block = node.blocks._directories[b"s" * 32].blocks[suite.key_of(7)]
    node.blocks.view(block.address, block.size)[9] ^= 1
    corrupt = tier.count.corrupt
    assert suite.get(tier, [7, 8]) == (MISS, HIT)
    assert tier.count.corrupt == corrupt + 1
    assert suite.get(tier, [7]) == (MISS,)


def test_a_block_that_was_damaged_on_its_way_is_not_kept(node, tier):
    done = []
    tier.write(suite.key_of(20), memoryview(suite.block_of(20)), 1234, done.append)
    until(lambda: done, "a write is answered")
    assert done == [MISS]
    assert not node.blocks.has(b"s" * 32, suite.key_of(20))


def test_what_was_evicted_in_the_store_is_forgotten_by_its_members(tiers):
    """A store of eight segments of 64 KiB: eight blocks in each."""
    node = Node("127.0.0.1:0", Blocks(512 << 10), KEY)
    node.start()
    tier = tiers(node.address)
    for start in range(0, 100, 20):
        assert HIT in suite.put(tier, range(start, start + 20))
    until(lambda: tier.capacity().num_blocks <= 64, "the directory follows evictions")
    assert suite.get(tier, range(80, 100)) == (HIT,) * 20
    assert suite.get(tier, [0]) == (MISS,)
    node.stop(0.0)


def test_the_tiers_together_serve_from_a_store_what_another_engine_computed(node, pieces_of):
    options = {
        "identity": os.urandom(32),
        "remote": RemoteConfig(target=node.address, secret=KEY, deadline_s=60.0, join_s=PATIENCE_S),
    }
    first = open_tiers((512, 4096), host_bytes=8 * suite.BLOCK_BYTES, **options)
    keys = [suite.key_of(n) for n in range(4)]
    first.save(keys, pieces_of(range(4)))
    until(lambda: first.lower[0].find(keys) == 4, "what is saved goes down to the store")
    first.close()
    second = open_tiers((512, 4096), host_bytes=8 * suite.BLOCK_BYTES, **options)
    fetch = second.fetch(keys, 1000.0)
    assert fetch.wait(PATIENCE_S)
    assert fetch.num_blocks == 4
    assert all(np.array_equal(a, b) for a, b in zip(fetch.take(), pieces_of(range(4)), strict=True))
    assert [t.name for t in second.stats()] == ["host", "remote"]
    assert second.stats()[1].verified == 4
    second.wait_idle(PATIENCE_S)
    assert second.host.num_leased == second.num_pending == 0
    second.close()


# Death --------------------------------------------------------------------------------------------------------------------


def test_an_agent_that_is_killed_amid_transfers_costs_misses_and_is_replaced(node, tiers):
    tier = tiers(node.address)
    suite.put(tier, range(8))
    for _ in range(2):
        agent = tier.agent_id
        into = [memoryview(bytearray(suite.BLOCK_BYTES)) for _ in range(8)]
        ticket = tier.get([suite.key_of(n) for n in range(8)], into)
        os.kill(agent, signal.SIGKILL)
        answers = suite.wait_for(tier, [ticket])[ticket]
        for n, answer, data in zip(range(8), answers, into, strict=True):
            assert answer is MISS or data == suite.block_of(n)
        until(lambda agent=agent: tier.agent_id != agent and tier.state == "on", "a new agent joins")
        assert suite.get(tier, range(8)) == (HIT,) * 8
    assert tier.num_quarantined == len(tier) == 0


STORE = """
import sys
from octavo_offload.node import Blocks, Node
node = Node(sys.argv[1], Blocks(1 << 20), b"k" * 32)
node.start()
print(node.address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def store(bind="127.0.0.1:0"):
    with subprocess.Popen([sys.executable, "-c", STORE, bind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def test_a_store_that_is_killed_amid_transfers_costs_misses_and_is_joined_again(tiers):
    with store() as (child, address):
        tier = tiers(address)
        assert suite.put(tier, range(8)) == (HIT,) * 8
        tickets = [tier.get([suite.key_of(n)], [memoryview(bytearray(suite.BLOCK_BYTES))]) for n in range(8)]
        os.kill(child.pid, signal.SIGKILL)
        suite.wait_for(tier, tickets)
        until(lambda: tier.state == "off", "a dead store is dropped")
        assert tier.find([suite.key_of(0)]) == 0
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (MISS,)
    with store(address) as (child, address):
        until(lambda: tier.state == "on", "a store that is back is joined again")
        assert suite.get(tier, range(8)) == (MISS,) * 8  # another incarnation has nothing of the old
        assert suite.put(tier, [1]) == (HIT,)
        assert suite.get(tier, [1]) == (HIT,)


@pytest.mark.slow
def test_a_store_that_hangs_is_not_waited_for_beyond_the_deadline(tiers):
    with store() as (child, address):
        tier = tiers(address, deadline_s=1.0)
        suite.put(tier, [1])
        os.kill(child.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            ticket = tier.get([suite.key_of(1)], [memoryview(bytearray(suite.BLOCK_BYTES))])
            assert time.monotonic() - start < 0.5
            assert suite.wait_for(tier, [ticket])[ticket] == (MISS,)
            until(lambda: tier.state == "off", "a store that does not answer is dropped")
        finally:
            os.kill(child.pid, signal.SIGCONT)
        until(lambda: tier.state == "on", "and joined again when it does")
        assert suite.get(tier, [1]) == (HIT,)


@pytest.mark.slow
def test_an_agent_that_hangs_is_ended_and_what_it_had_is_in_quarantine_until_then(node, tiers):
    tier = tiers(node.address, deadline_s=0.5)
    suite.put(tier, [1])
    agent = tier.agent_id
    os.kill(agent, signal.SIGSTOP)
    ticket = tier.get([suite.key_of(1)], [memoryview(bytearray(suite.BLOCK_BYTES))])
    assert suite.wait_for(tier, [ticket])[ticket] == (MISS,)
    until(lambda: tier.agent_id != agent and tier.state == "on", "a new agent joins")
    assert tier.num_quarantined == 0
    until(lambda: tier.find([suite.key_of(1)]), "and knows the directory")
    assert suite.get(tier, [1]) == (HIT,)


@pytest.mark.slow
def test_a_store_that_is_not_there_yet_is_joined_when_it_comes(tiers):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    tier = tiers(address, is_waited_for=False)
    assert (tier.state, suite.put(tier, [1])) == ("off", (MISS,))
    with store(address):
        until(lambda: tier.state == "on", "a store that comes later is joined")


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_an_engine_that_is_killed_leaves_no_agent_and_no_lease(node):
    words = "import sys\nfrom octavo_offload import *\nt = RemoteTier(RemoteConfig(target=sys.argv[1], secret=b'k' * 32, join_s=600.0), 4608, b'e' * 32)\n"
    words += "print(t.agent_id, flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen([sys.executable, "-c", words, node.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        agent = int(engine.stdout.readline())
        assert any(member.identity == b"e" * 32 for member in node._members.values())
        engine.kill()
    until(lambda: has_ended(agent), "the agent ends with its engine")
    until(lambda: all(member.identity != b"e" * 32 for member in list(node._members.values())), "and takes leave")
    assert node.blocks.num_leased == 0


# Who may join -------------------------------------------------------------------------------------------------------------


def test_without_the_key_nobody_is_let_in_and_the_error_says_so(node, tiers):
    with pytest.raises(ConfigError, match="does not have the same key"):
        tiers(node.address, secret=b"another key, 16 bytes")


def start_of(node, **options):
    words = {"target": node.address, "identity": b"i" * 32, "block_bytes": 4608, "slot_bytes": 8192, "num_slots": 4, "secret": KEY}
    return m.Start(**{**words, "transports": ["grpc"], "deadline_s": 60.0, **options})


def test_a_member_without_the_key_is_refused_by_the_store_too(node, monkeypatch):
    """One that does not care who the store is."""
    expect = auth.expect
    monkeypatch.setattr(auth, "expect", lambda given, wanted, who: None if who == "the store" else expect(given, wanted, who))
    with pytest.raises(PeerError, match="a member that wants to join does not have the same key"):
        Peer(start_of(node, secret=b"wrong" * 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"block_bytes": 2 << 20}, "give it more --memory"), ({"transports": ["carrier pigeon"]}, "moves blocks by grpc")],
)
def test_what_cannot_be_is_refused_by_name(node, options, words):
    with pytest.raises(PeerError, match=words) as caught:
        Peer(start_of(node, **options))
    assert caught.value.is_final


def test_a_message_that_was_changed_or_comes_twice_is_refused(node):
    peer = Peer(start_of(node))
    frame = peer._session.seal("Beat", b"\x91\x00")
    assert peer._call("Beat", frame)
    with pytest.raises(PeerError, match="came twice"):
        peer._call("Beat", frame)
    frame = bytearray(peer._session.seal("Beat", b"\x91\x00"))
    frame[-1] ^= 1
    with pytest.raises(PeerError, match="not signed"):
        peer._call("Beat", bytes(frame))
    with pytest.raises(PeerError, match="not signed"):
        peer._call("Release", peer._session.seal("Beat", b"\x91\x00"))
    with pytest.raises(PeerError, match="not a member"):
        peer._call("Beat", bytes(100))
    peer.leave()


def test_one_member_cannot_read_the_lease_of_another(node, tier):
    suite.put(tier, [30])
    mine, other = Peer(start_of(node, identity=b"s" * 32)), Peer(start_of(node, identity=b"s" * 32))
    leased = mine.lease([suite.key_of(30)])
    with pytest.raises(PeerError, match="less than was asked"):
        other.read(leased.lease, [memoryview(bytearray(suite.BLOCK_BYTES))])
    other.release(leased.lease)
    into = memoryview(bytearray(suite.BLOCK_BYTES))
    mine.read(leased.lease, [into])
    assert into == suite.block_of(30)
    assert checksum(suite.key_of(30), into) == leased.entries[0].seal
    mine.leave()
    other.leave()


def test_certificates_let_members_in_and_keep_others_out(tiers):
    trustme = pytest.importorskip("trustme")
    ours, theirs = trustme.CA(), trustme.CA()

    def pair(authority, name):
        issued = authority.issue_cert(name)
        return Tls(issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes(), ours.cert_pem.bytes())

    node = Node("127.0.0.1:0", Blocks(1 << 20), b"", tls=pair(ours, "127.0.0.1"))
    node.start()
    tier = tiers(node.address, secret=b"", tls=pair(ours, "member.example"))
    assert suite.put(tier, [1]) == (HIT,)
    assert suite.get(tier, [1]) == (HIT,)
    for stranger in ({"tls": pair(theirs, "member.example")}, {"tls": None}):
        assert tiers(node.address, secret=b"", is_waited_for=False, **stranger).state == "off"
    until(lambda: node.num_members == 1, "strangers are no members")
    node.stop(0.0)


def test_a_store_that_could_tell_nobody_from_anybody_is_refused():
    with pytest.raises(ConfigError, match="serves nobody it cannot tell"):
        Node("127.0.0.1:0", Blocks(1 << 20), b"")


# The command --------------------------------------------------------------------------------------------------------------


def options(*words):
    parser = argparse.ArgumentParser()
    kv_store.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--bind", "7100", "--memory", "1M"], "a host and a port"),
        (["--bind", "127.0.0.1:0", "--memory", "much"], "--memory wants a size"),
        (["--bind", "127.0.0.1:0", "--memory", "1M"], "--key-file or --tls-cert"),
        (["--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", "/nonexistent"], "cannot be read"),
        (["--bind", "127.0.0.1:0", "--memory", "1M", "--tls-cert", "a"], "all three"),
        (["--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", "SHORT"], "at least 16"),
        (["--bind", "203.0.113.9:1", "--memory", "1M", "--key-file", "GOOD"], "cannot be listened at"),
    ],
)
def test_the_command_refuses_by_name(tmp_path, words, error):
    (tmp_path / "SHORT").write_text("short\n")
    (tmp_path / "GOOD").write_text("long enough for everybody\n")
    words = [str(tmp_path / word) if word in ("SHORT", "GOOD") else word for word in words]
    with pytest.raises(ConfigError, match=error):
        kv_store.run(options(*words))


def test_the_command_serves_until_it_is_told_to_stop(tmp_path, tiers):
    key = tmp_path / "key"
    key.write_bytes(KEY)
    words = "import sys, argparse\nfrom octavo_offload.commands import kv_store\np = argparse.ArgumentParser()\nkv_store.add_arguments(p)\nsys.exit(kv_store.run(p.parse_args()))"
    words = [sys.executable, "-c", words, "--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", str(key)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
        told = child.stdout.readline()
        tier = tiers(told.split()[3].rstrip(","))
        assert suite.put(tier, [1]) == (HIT,)
        child.terminate()
        assert "1 blocks stored" in child.stdout.read()
    assert child.returncode == 0


def test_writers_and_readers_at_once_get_right_bytes(node, tiers):
    tier, stop, wrong = tiers(node.address), threading.Event(), []
    lock = threading.Lock()

    def read_on(seed):
        rng = random.Random(seed)
        while not stop.is_set():
            n, into, done = rng.randrange(30), memoryview(bytearray(suite.BLOCK_BYTES)), threading.Event()
            answers = []
            tier.read(suite.key_of(n), into, lambda answer, _, a=answers, d=done: (a.append(answer), d.set()))
            assert done.wait(PATIENCE_S)
            if answers[0] is HIT and into != suite.block_of(n):
                with lock:
                    wrong.append(n)

    readers = [threading.Thread(target=read_on, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for n in range(30):
        suite.put(tier, [n])
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert tier.count.corrupt == 0


@pytest.mark.slow
def test_no_damage_in_a_store_or_death_of_an_agent_gives_a_wrong_byte(tiers):
    """500 seeded faults: bits that flip in the store's memory, agents that are killed, blocks evicted amid it all."""
    rng = random.Random(11)
    node = Node("127.0.0.1:0", Blocks(512 << 10), KEY)
    node.start()
    tier = tiers(node.address)
    faults = kills = 0
    while faults < 500:
        first = rng.randrange(90)
        numbers = range(first, first + rng.randint(1, 8))
        (suite.put if rng.random() < 0.5 else suite.get)(tier, numbers)  # compares every hit
        for _ in range(rng.randrange(4)):
            node.blocks.slab.whole[rng.randrange(node.blocks.total_bytes)] ^= 1 << rng.randrange(8)
            faults += 1
        if faults > 100 * (kills + 1):
            agent = tier.agent_id
            ticket = tier.get([suite.key_of(n) for n in numbers], [memoryview(bytearray(suite.BLOCK_BYTES)) for _ in numbers])
            os.kill(agent, signal.SIGKILL)
            suite.wait_for(tier, [ticket])
            until(lambda agent=agent: tier.agent_id != agent and tier.state == "on", "a new agent joins")
            kills += 1
    assert kills >= 4
    assert tier.count.corrupt > 0
    assert tier.count.hits > 100
    assert tier.wait_idle(PATIENCE_S)
    assert tier.num_quarantined == 0
    node.stop(0.0)
