"""Blocks read out of a store's memory by each library that can, over loopback TCP; right bytes or a miss, whatever dies, hangs or is damaged.

With both: `uv run --group nixl --group mooncake pytest packages/offload/tests/test_remote_onesided.py`. The store runs in a process of its own:
what used UCX leaves by `os._exit`.
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
from octavo_offload._src.remote import mooncake, serve, transports
from octavo_offload._src.remote.errors import PeerError
from octavo_offload._src.remote.onesided import Remote, Where
from octavo_offload._src.remote.shared import SharedSlab
from octavo_offload.commands import kv_store
from octavo_offload.node import Blocks

HIT, MISS = Answer.HIT_VERIFIED, Answer.MISS
KEY = b"k" * 32
PATIENCE_S = 600.0
needs_nixl = pytest.mark.skipif(nixl.name() is None, reason=f"NIXL is not installed: {nixl.INSTALL}")


def mooncake_misses():
    """What keeps Mooncake's engine from being used here: it may be installed without the system libraries it wants."""
    try:
        mooncake.load()
    except OSError as error:
        return str(error)
    return ""


needs_mooncake = pytest.mark.skipif(bool(mooncake_misses()), reason=mooncake_misses())


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
        patch.setenv("MC_FORCE_TCP", "1")
        patch.setenv("NIXL_LOG_LEVEL", "FATAL")
        yield


STORE = """
import sys, time
from octavo_offload.node import Blocks, Node
from octavo_offload._src.remote.serve import readable
blocks = Blocks(1 << 20)
node = Node(sys.argv[1], blocks, b"k" * 32, readable=readable(blocks, sys.argv[2], None, "127.0.0.1"))
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
def store(transport, bind="127.0.0.1:0"):
    words = [sys.executable, "-c", STORE, bind, transport]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Store(child)
        finally:
            child.kill()


@pytest.fixture(scope="module", params=[pytest.param("ucx", marks=needs_nixl), pytest.param("mooncake", marks=needs_mooncake)])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def node(way):
    with store(way) as it:
        yield it


@pytest.fixture
def tiers(monkeypatch, way):
    """Tiers whose agents know no other way than the one that is tried, and gRPC."""
    monkeypatch.setattr(transports, "ONE_SIDED", {way: transports.ONE_SIDED[way]})
    made = []

    def make(target, *, identity=None, **options):
        options = {"secret": KEY, "window_bytes": 8 * suite.BLOCK_BYTES, "deadline_s": 60.0, "join_s": PATIENCE_S, **options}
        made.append(RemoteTier(RemoteConfig(target=target, **options), suite.BLOCK_BYTES, identity or os.urandom(32)))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


def test_a_store_that_is_read_one_sidedly_keeps_the_promises_of_a_tier(node, tiers):
    suite.check_tier(lambda: tiers(node.address))
    until(lambda: node.ask("blocks.num_leased") == "0", "every lease is given back")


def test_members_that_read_one_sidedly_and_by_grpc_share_blocks(node, way, tiers, monkeypatch):
    mine = tiers(node.address, identity=b"s" * 32)
    assert mine.told == f"{way} over tcp; 0 blocks found"
    assert suite.put(mine, [1, 2]) == (HIT,) * 2
    monkeypatch.setattr(transports, "ONE_SIDED", {})
    theirs = tiers(node.address, identity=b"s" * 32)
    assert theirs.told == "grpc; 2 blocks found"
    assert suite.get(theirs, [1, 2]) == suite.get(mine, [1, 2]) == (HIT,) * 2


def test_where_a_library_does_not_work_blocks_travel_by_grpc_and_it_is_told(node, way, tiers, monkeypatch, tmp_path):
    """UCX without such a device must not fall back by itself; Mooncake's engine that does not load."""
    monkeypatch.setenv("UCX_TLS", "rc_verbs")
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.so").write_bytes(b"no library")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tier = tiers(node.address)
    why = {"ucx": "UCX does not start: ", "mooncake": "Mooncake's transfer engine does not load: "}
    assert tier.told.startswith(f"grpc ({why[way]}")
    assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)


def test_a_store_that_offers_grpc_alone_is_read_by_grpc(tiers):
    with store("grpc") as it:
        tier = tiers(it.address)
        assert tier.told == "grpc; 0 blocks found"
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)


def test_a_flipped_bit_in_the_store_is_a_miss_and_is_counted(node, tiers):
    tier = tiers(node.address)
    suite.put(tier, [70, 71])
    node.ask(f"flip({suite.key_of(70)!r})")
    assert suite.get(tier, [70, 71]) == (MISS, HIT)
    assert tier.count.corrupt == 1


def test_an_agent_that_is_killed_amid_reads_costs_misses_and_is_replaced(node, tiers, way):
    tier = tiers(node.address)
    suite.put(tier, range(8))
    agent, into = tier.agent_id, [memoryview(bytearray(suite.BLOCK_BYTES)) for _ in range(8)]
    ticket = tier.get([suite.key_of(n) for n in range(8)], into)
    os.kill(agent, signal.SIGKILL)
    for n, answer, data in zip(range(8), suite.wait_for(tier, [ticket])[ticket], into, strict=True):
        assert answer is MISS or data == suite.block_of(n)
    until(lambda: tier.agent_id != agent and tier.state == "on", "a new agent joins")
    assert tier.told.startswith(way)
    assert suite.get(tier, range(8)) == (HIT,) * 8
    assert tier.num_quarantined == len(tier) == 0


def test_a_store_that_is_killed_amid_reads_costs_misses_and_is_joined_again(tiers, way):
    with store(way) as it:
        tier = tiers(it.address, deadline_s=5.0)
        assert suite.put(tier, range(8)) == (HIT,) * 8
        agent = tier.agent_id
        tickets = [tier.get([suite.key_of(n)], [memoryview(bytearray(suite.BLOCK_BYTES))]) for n in range(8)]
        os.kill(it.child.pid, signal.SIGKILL)
        suite.wait_for(tier, tickets)
        until(lambda: tier.state == "off", "a dead store is dropped")
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (MISS,)
        until(lambda: tier.num_quarantined == 0, "no slot is kept for a store that is gone")
    with store(way, it.address):
        until(lambda: tier.state == "on", "a store that is back is joined again")
        assert tier.told.startswith(way)
        assert suite.get(tier, range(8)) == (MISS,) * 8  # another incarnation has nothing of the old
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)
    assert agent > 0


STOP_AFTER_LEASE = """
import glob, os, signal, time
from octavo_offload._src.remote.peer import Peer
real = Peer.lease
def lease(self, keys):
    leased = real(self, keys)
    try:
        with open(os.environ["OCTAVO_TEST_STOP"]) as file:
            number = int(file.read())
        os.unlink(os.environ["OCTAVO_TEST_STOP"])
        os.kill(number, signal.SIGSTOP)
        while any(open(path).read().rpartition(")")[2].split()[0] != "T" for path in glob.glob(f"/proc/{number}/task/*/stat")):
            time.sleep(0.001)
    except OSError:
        pass
    return leased
Peer.lease = lease
"""


def test_a_read_that_is_late_is_a_miss_and_its_slot_is_left_alone_until_it_has_ended(tiers, way, tmp_path, monkeypatch):
    """The store stops when the agent has its lease: nothing answers the read, and nothing calls it back."""
    (tmp_path / "sitecustomize.py").write_text(STOP_AFTER_LEASE)
    with store(way) as it:
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


def test_the_command_says_how_blocks_are_read_and_ends_when_told(tmp_path, tiers, way):
    (tmp_path / "key").write_bytes(KEY)
    words = "import sys, argparse\nfrom octavo_offload.commands import kv_store\np = argparse.ArgumentParser()\nkv_store.add_arguments(p)\nsys.exit(kv_store.run(p.parse_args()))"
    words = [sys.executable, "-c", words, "--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", str(tmp_path / "key")]
    with subprocess.Popen([*words, "--transport", way], stdout=subprocess.PIPE, text=True) as child:
        line = child.stdout.readline()
        assert f"blocks by {way} over tcp" in line
        tier = tiers(line.split()[3].rstrip(","))
        assert suite.put(tier, [1]) == suite.get(tier, [1]) == (HIT,)
        child.terminate()
        assert "1 blocks stored" in child.stdout.read()
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        ("ucx", r"NIXL is not installed \(pip install --no-deps nixl"),
        ("mooncake", r"Mooncake's transfer engine is not installed \(pip install --no-deps mooncake"),
    ],
)
def test_a_store_without_the_library_refuses_with_the_install_line(tmp_path, monkeypatch, transport, why):
    monkeypatch.setattr(nixl, "_MODULES", ())
    monkeypatch.setattr(mooncake, "_PACKAGE", "a_package_nobody_has")
    (tmp_path / "key").write_bytes(KEY)
    words = ("--bind", "127.0.0.1:0", "--memory", "1M", "--key-file", str(tmp_path / "key"), "--transport", transport)
    with pytest.raises(ConfigError, match=f"--transport {transport} does not work here: {why}"):
        kv_store.run(options(*words))


def test_a_package_of_the_same_name_is_not_the_engine(tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    assert not mooncake.is_here()


@pytest.mark.parametrize("transport", ["ucx", "mooncake"])
def test_one_sided_reads_and_certificates_are_refused_together(transport):
    with pytest.raises(ConfigError, match="clear text"):
        serve.readable(Blocks(1 << 20), transport, Tls(b"", b"", b""), "127.0.0.1")
    assert transports.installed(encrypted=True) == ["grpc"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
def test_mooncake_wants_an_address_that_members_can_reach(host):
    with pytest.raises(ConfigError, match=r"name one of this machine's in --bind"):
        serve.readable(Blocks(1 << 20), "mooncake", None, host)


class NoLink:
    """Were it asked, it would fail in another way."""

    name = "nothing"

    def begin(self, near, far, size):
        raise NotImplementedError

    def close(self):
        raise NotImplementedError


def test_a_place_outside_the_stores_memory_is_not_read():
    remote = Remote(NoLink(), SharedSlab(2, 4096), Where(1 << 20, 8192, b""))
    for place in (-1, 4097, 1 << 40):
        with pytest.raises(PeerError, match="outside its memory"):
            remote.read([(0, 0), (place, 1)], 4096, 1.0)


class Batches:
    """An engine whose batches stand as they are told to."""

    def __init__(self, states):
        self.states, self.asked = dict(states), []

    def batch_transfer_async_read(self, remote, near, far, sizes):
        return next((batch for batch in self.states if batch == near[0]), 0)

    def transfer_check_status(self, batch):
        self.asked.append(batch)
        return self.states[batch]


def test_a_read_by_mooncake_has_ended_when_all_its_blocks_have_even_where_one_failed():
    """A slot that is given back while another block of the read is under way would be written by it later."""
    engine = Batches({1: 0, 2: -1, 3: 1})
    transfer = mooncake._Link(engine, "store").begin([1, 2, 3], [0, 0, 0], 4096)
    assert transfer.poll() == "PROC"
    engine.states[1] = -2  # late, in its words
    assert transfer.poll() == "PROC"
    engine.states[1] = 1
    assert transfer.poll() == transfer.poll() == "a block did not arrive"
    assert engine.asked == [3, 2, 1, 1, 1], "a batch that has ended is gone"


def test_a_read_by_mooncake_that_could_begin_in_part_ends_with_that_part_and_has_failed():
    engine = Batches({1: 0})
    transfer = mooncake._Link(engine, "store").begin([1, 9, 1], [0, 0, 0], 4096)
    assert transfer.batches == [1]
    assert transfer.poll() == "PROC"
    engine.states[1] = 1
    assert transfer.poll() == "a block did not arrive"


@pytest.mark.parametrize(
    ("topology", "forced", "wanted"),
    [
        ('{"cpu:0": [[], []]}', None, "tcp"),
        ('{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cpu:1": [["mlx5_0"], ["mlx5_1"]]}', None, "rdma (mlx5_0, mlx5_1)"),
        ('{"cpu:0": [["mlx5_0"], []]}', "1", "tcp"),
        ("", None, "tcp"),
    ],
)
def test_how_mooncake_travels_is_told(topology, forced, wanted):
    assert mooncake._way(topology, forced) == wanted
