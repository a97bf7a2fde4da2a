"""Blocks read out of a store's memory by NIXL and UCX, over loopback TCP; right bytes or a miss, whatever dies, hangs or is damaged.

The store runs in a process of its own: what used UCX leaves by `os._exit`.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from octavo_core.errors import ConfigError
from octavo_core.testing import tiers as suite
from octavo_core.tiers import Answer
from octavo_offload import RemoteConfig, RemoteTier, Tls
from octavo_offload._src import nixl
from octavo_offload._src.remote import serve, ucx
from octavo_offload._src.remote.peer import PeerError
from octavo_offload.commands import kv_store
from octavo_offload.node import Blocks

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS
KEY = b"k" * 32
PATIENCE_S = 600.0
needs_nixl = pytest.mark.skipif(nixl.name() is None, reason=f"NIXL is not installed: {nixl.INSTALL}")


def until(what, word):
    """Wait for what must happen."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, word
        time.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def over_tcp():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        patch.setenv("NIXL_LOG_LEVEL", "FATAL")
        yield


STORE = """
import sys, time
from octavo_offload.node import Blocks, Node
from octavo_offload._src.remote.ucx import ReadableMemory
blocks = Blocks(1 << 20)
node = Node(sys.argv[1], blocks, b"k" * 32, readable=ReadableMemory(blocks.slab.whole, blocks.is_leased) if sys.argv[2] == "ucx" else None)
node.start()
print(node.address, flush=True)
def flip(key):
    (block,) = [d.blocks[key] for d in blocks._directories.values() if key in d.blocks]
    blocks.view(block.address, block.size)[9] ^= 1
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Store:
    """One that is a process; `ask` evaluates there."""

    def __init__(self, child):
        self.child, self.address = child, child.stdout.readline().strip()

    def ask(self, words):
        self.child.stdin.write(words + "\n")
        self.child.stdin.flush()
        return self.child.stdout.readline().strip()


@contextlib.contextmanager
def store(bind="127.0.0.1:0", transport="ucx"):
    words = [sys.executable, "-c", STORE, bind, transport]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Store(child)
        finally:
            child.kill()


@pytest.fixture(scope="module")
def node():
    with store() as it:
        yield it


@pytest.fixture
def tiers():
    made = []

    def make(target, *, identity=None, **options):
        options = {"secret": KEY, "window_bytes": 8 * suite.BLOCK_BYTES, "deadline_s": 60.0, "join_s": PATIENCE_S, **options}
        made.append(RemoteTier(RemoteConfig(target=target, **options), suite.BLOCK_BYTES, identity or os.urandom(32)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@needs_nixl
def test_a_store_that_is_read_one_sidedly_keeps_the_promises_of_a_tier(node, tiers):
    suite.check_tier(lambda: tiers(node.address))
    until(lambda: node.ask("blocks.num_leased") == "0", "every lease is given back")


@needs_nixl
def test_members_by_ucx_and_by_grpc_share_blocks(node, tiers, monkeypatch):
    mine = tiers(node.address, identity=b"s" * 32)
    assert mine.told == "ucx over tcp; 0 blocks found"
    assert suite.put(mine, [1, 2]) == (HIT,) * 2
    monkeypatch.setattr(nixl, "_MODULES", ())
    theirs = tiers(node.address, identity=b"s" * 32)
    assert theirs.told == "grpc; 2 blocks found"
    assert suite.get(theirs, [1, 2]) == suite.get(mine, [1, 2]) == (HIT,) * 2


@needs_nixl
def test_where_ucx_does_not_work_blocks_travel_by_grpc_and_it_is_told(node, tiers, monkeypatch):
    """No such device here: UCX must not fall back by itself."""
    monkeypatch.setenv("UCX_TLS", "rc_verbs")
    tier = tiers(node.address)
    assert tier.told.startswith("grpc (UCX does not start: ")
    assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)


@needs_nixl
def test_a_store_that_offers_grpc_alone_is_read_by_grpc(tiers):
    with store(transport="grpc") as it:
        tier = tiers(it.address)
        assert tier.told == "grpc; 0 blocks found"
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)


@needs_nixl
def test_a_flipped_bit_in_the_store_is_a_miss_and_is_counted(node, tiers):
    tier = tiers(node.address)
    suite.put(tier, [70, 71])
    node.ask(f"flip({suite.key_of(70)!r})")
    assert suite.get(tier, [70, 71]) == (MISS, HIT)
    assert tier.count.corrupt == 1


@needs_nixl
def test_an_agent_that_is_killed_amid_reads_costs_misses_and_is_replaced(node, tiers):
    tier = tiers(node.address)
    suite.put(tier, range(8))
    agent, into = tier.agent_id, [memoryview(bytearray(suite.BLOCK_BYTES)) for _ in range(8)]
    ticket = tier.get([suite.key_of(n) for n in range(8)], into)
    os.kill(agent, signal.SIGKILL)
    for n, answer, data in zip(range(8), suite.wait_for(tier, [ticket])[ticket], into, strict=True):
        assert answer is MISS or data == suite.block_of(n)
    until(lambda: tier.agent_id != agent and tier.state == "on", "a new agent joins")
    assert tier.told.startswith("ucx")
    assert suite.get(tier, range(8)) == (HIT,) * 8
    assert tier.num_quarantined == len(tier) == 0


@needs_nixl
def test_a_store_that_is_killed_amid_reads_costs_misses_and_is_joined_again(tiers):
    with store() as it:
        tier = tiers(it.address, deadline_s=5.0)
        assert suite.put(tier, range(8)) == (HIT,) * 8
        agent = tier.agent_id
        tickets = [tier.get([suite.key_of(n)], [memoryview(bytearray(suite.BLOCK_BYTES))]) for n in range(8)]
        os.kill(it.child.pid, signal.SIGKILL)
        suite.wait_for(tier, tickets)
        until(lambda: tier.state == "off", "a dead store is dropped")
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (MISS,)
        until(lambda: tier.num_quarantined == 0, "no slot is kept for a store that is gone")
    with store(it.address):
        until(lambda: tier.state == "on", "a store that is back is joined again")
        assert tier.told.startswith("ucx")
        assert suite.get(tier, range(8)) == (MISS,) * 8  # another incarnation has nothing of the old
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)
    assert agent > 0


STOP_AFTER_LEASE = """
import os, signal
from octavo_offload._src.remote.peer import Peer
real = Peer.lease
def lease(self, keys):
    leased = real(self, keys)
    try:
        with open(os.environ["OCTAVO_TEST_STOP"]) as file:
            number = int(file.read())
        os.unlink(os.environ["OCTAVO_TEST_STOP"])
        os.kill(number, signal.SIGSTOP)
    except OSError:
        pass
    return leased
Peer.lease = lease
"""


@needs_nixl
def test_a_read_that_is_late_is_a_miss_and_its_slot_is_left_alone_until_it_has_ended(tiers, tmp_path, monkeypatch):
    """The store stops when the agent has its lease: nothing answers the read, and nothing calls it back."""
    (tmp_path / "sitecustomize.py").write_text(STOP_AFTER_LEASE)
    with store() as it:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("OCTAVO_TEST_STOP", str(tmp_path / "stop"))
        tier = tiers(it.address, deadline_s=5.0)
        suite.put(tier, [1])
        assert suite.get(tier, [1]) == (HIT,)
        (tmp_path / "stop").write_text(str(it.child.pid))
        assert suite.get(tier, [1]) == (MISS,)
        assert tier.num_quarantined == 1
        assert not (tmp_path / "stop").exists()
        os.kill(it.child.pid, signal.SIGCONT)
        until(lambda: tier.num_quarantined == 0, "a late read ends")
        until(lambda: tier.state == "on" and tier.find([suite.key_of(1)]), "the store is joined again, or still is")
        assert suite.get(tier, [1]) == (HIT,)


@needs_nixl
def test_a_store_that_nobody_reads_sleeps(node):
    """NIXL's own progress thread would take a core."""
    start, begin = time.monotonic(), float(node.ask("time.process_time()"))
    time.sleep(2.0)
    assert float(node.ask("time.process_time()")) - begin < 0.3 * (time.monotonic() - start)


# The command, and what is refused -----------------------------------------------------------------------------------------


def options(*words):
    parser = argparse.ArgumentParser()
    kv_store.add_arguments(parser)
    return parser.parse_args(words)


@needs_nixl
def test_the_command_says_how_blocks_are_read_and_ends_when_told(tmp_path, tiers):
    (tmp_path / "key").write_bytes(KEY)
    words = "import sys, argparse\nfrom octavo_offload.commands import kv_store\np = argparse.ArgumentParser()\nkv_store.add_arguments(p)\nsys.exit(kv_store.run(p.parse_args()))"
    words = [sys.executable, "-c", words, "--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", str(tmp_path / "key")]
    with subprocess.Popen([*words, "--transport", "ucx"], stdout=subprocess.PIPE, text=True) as child:
        told = child.stdout.readline()
        assert "blocks by ucx over tcp" in told
        tier = tiers(told.split()[3].rstrip(","))
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)
        child.terminate()
        assert "1 blocks stored" in child.stdout.read()
    assert child.returncode == 0


def test_a_store_without_nixl_refuses_ucx_with_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ())
    (tmp_path / "key").write_bytes(KEY)
    with pytest.raises(
        ConfigError, match=r"--transport ucx does not work here: NIXL is not installed \(pip install --no-deps nixl"
    ):
        kv_store.run(options("--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", str(tmp_path / "key"), "--transport", "ucx"))


def test_ucx_and_certificates_are_refused_together():
    with pytest.raises(ConfigError, match="clear text"):
        serve._readable(Blocks(1 << 20), "ucx", Tls(b"", b"", b""))


def test_a_place_outside_the_stores_memory_is_not_read():
    never = object.__new__(ucx.Reader)  # has no agent: were it asked, it would fail in another way
    remote = ucx.Remote(never, "store", ucx.Where(1 << 20, 8192, b""))
    for place in (-1, 4097, 1 << 40):
        with pytest.raises(PeerError, match="outside its memory"):
            remote.read([(0, 0), (place, 1)], 4096, 1.0)
