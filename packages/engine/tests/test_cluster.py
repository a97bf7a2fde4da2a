"""Several nodes: who is refused, who is waited for and for how long, who counts as dead; and two processes that serve what one serves."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import jax
import msgspec
import pytest
import zmq

from octavo_core.errors import ConfigError, EngineDeadError
from octavo_core.testing.patience import PATIENCE_S
from octavo_engine._src.cluster import KEY_VARIABLE, Follower, Frame, Leader, _key_pair, differing, nodes_key, options_of
from octavo_engine.config import EngineConfig

OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
}


KEY = "0123456789abcdef-of-a-test"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def free_port():
    """A port whose next one is free as well."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


def node(rank, port, **more):
    options = {"tensor_parallel_size": 2, "nnodes": 2, "node_timeout_s": 60.0, "distributed_timeout_seconds": 600, **more}
    return EngineConfig(node_rank=rank, headless=rank > 0, master_port=port, **options)


@pytest.fixture
def pair():
    """Both ends of a channel, met."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(Follower, node(1, port))
        leader = Leader(node(0, port))
        follower = following.result(timeout=600)
    yield leader, follower
    leader.close()
    follower.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 2}, "--tensor-parallel-size counts the devices of all nodes, a multiple of --nnodes 2; got 1"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "--node-rank is 0 to --nnodes less one"),
        ({"nnodes": 0}, "--node-rank is 0 to --nnodes less one"),
        ({"headless": True}, "--headless is for nodes of --node-rank 1 and above"),
        ({"node_rank": 1}, "--node-rank is 0 to --nnodes less one"),
        ({"master_port": 65535}, "--master-port is 1 to 65534"),
        ({"node_timeout_s": 1.0}, "--node-timeout-s at least 3"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "kv_offload": "host=1GiB"}, "--kv-offload serves one node"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "cpu_offload_gb": 1.0}, "--cpu-offload-gb serves one node"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert words in str(caught.value)


def test_a_node_of_another_rank_takes_no_requests(checkpoint):
    from octavo_engine import LLM, follow

    with pytest.raises(ConfigError, match="takes no requests"):
        LLM(str(checkpoint), node_rank=1, nnodes=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="follows nobody"):
        follow(EngineConfig())


def test_commands_arrive_in_order_and_end(pair):
    leader, follower = pair
    for i in range(300):
        leader.tell("count", i)
    leader.close()
    frames = list(follower.commands())
    assert [frame.data for frame in frames] == list(range(300))
    assert [frame.number for frame in frames] == list(range(300))


def test_the_least_of_all_nodes_is_everybodys(pair):
    leader, follower = pair
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(follower.least, 7)
        assert leader.least(9) == 7
        assert theirs.result(timeout=600) == 7


def test_a_node_of_an_earlier_leader_is_told_to_start_anew(pair):
    leader, follower = pair
    leader._nodes[1].address = b"somebody else"
    with pytest.raises(EngineDeadError, match="started anew"):
        list(follower.commands())


def test_a_failed_node_ends_what_waits_for_it(pair):
    leader, follower = pair
    stuck = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(leader.run, stuck.wait)
        time.sleep(0.1)
        follower.failed(RuntimeError("no memory"))
        with pytest.raises(EngineDeadError, match=r"node 1 .* has failed: RuntimeError: no memory"):
            waiting.result(timeout=600)
    with pytest.raises(EngineDeadError, match="no memory"):
        leader.tell("more")
    stuck.set()


def test_a_program_that_fails_says_why_it_does(pair):
    leader, _ = pair
    with pytest.raises(ZeroDivisionError):
        leader.run(lambda: 1 / 0)
    assert leader.run(lambda: 5) == 5


def test_a_leader_waits_for_the_missing_no_longer_than_it_is_told():
    with pytest.raises(EngineDeadError, match=r"rank 1 did not come within 1 s; start each with --node-rank N --headless"):
        Leader(node(0, free_port(), distributed_timeout_seconds=1))


def test_a_follower_waits_for_the_leader_no_longer_than_it_is_told():
    with pytest.raises(EngineDeadError, match=r"node 0 did not answer at 127.0.0.1"):
        Follower(node(1, free_port(), distributed_timeout_seconds=1))


def test_nodes_started_differently_are_refused_on_both_sides():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(Follower, node(1, port, block_size=16))
        with pytest.raises(ConfigError, match=r"another --block-size \(32 here, 16 there\); start all nodes alike"):
            Leader(node(0, port))
        with pytest.raises(ConfigError, match=r"node 0 says: node 1 .* was started with another --block-size"):
            following.result(timeout=600)


def test_what_one_node_alone_looks_at_may_differ():
    one, other = EngineConfig(step_log="a", max_num_queued_reqs=3), EngineConfig(seed=4)
    assert differing(options_of(one), options_of(other)) == []


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"--master-port \d+ cannot be listened on"):
            Leader(node(0, taken.getsockname()[1]))


@pytest.fixture
def stranger():
    """Introduces, to the port of a leader to come, a node that says nothing more; its sockets end with the test."""
    with zmq.Context() as context, ExitStack() as sockets:

        def say_hello(port, keys):
            mute = sockets.enter_context(context.socket(zmq.DEALER))
            mute.linger = 0
            mute.setsockopt(zmq.IDENTITY, b"1")
            if keys is not None:
                mute.curve_serverkey, (mute.curve_publickey, mute.curve_secretkey) = keys
            mute.connect(f"tcp://127.0.0.1:{port}")
            hello = {"rank": 1, "host": "mute", "jax": jax.__version__, "options": options_of(node(1, port, node_timeout_s=3.0))}
            mute.send(msgspec.msgpack.encode(Frame("hello", data=hello)))

        yield say_hello


def keys_of(key):
    return _key_pair(key, "server")[0], _key_pair(key, "client")


def test_a_node_that_falls_silent_counts_as_dead_in_time(stranger):
    port = free_port()
    stranger(port, keys_of(KEY.encode()))
    leader = Leader(node(0, port, node_timeout_s=3.0))
    with pytest.raises(EngineDeadError, match=r"node 1 \(mute\) has not been heard of for"):
        leader.run(threading.Event().wait)
    leader.close()


@pytest.mark.parametrize("who", ["no key", "another key", "the leader's public key"])
def test_who_has_not_the_key_is_not_heard(stranger, who):
    port, public = free_port(), _key_pair(KEY.encode(), "server")[0]
    others = {"another key": keys_of(b"another key of some length"), "the leader's public key": (public, zmq.curve_keypair())}
    stranger(port, others.get(who))
    with pytest.raises(EngineDeadError, match="rank 1 did not come"):
        Leader(node(0, port, distributed_timeout_seconds=2))


def test_the_key_is_in_the_environment_or_a_file_and_no_guess(monkeypatch, tmp_path):
    (tmp_path / "key").write_text("a key in a file of its own\n")
    assert nodes_key(node(0, 9000)) == KEY.encode()
    assert nodes_key(node(0, 9000, nodes_key_file=str(tmp_path / "key"))) == b"a key in a file of its own"
    with pytest.raises(ConfigError, match=r"--nodes-key-file .* cannot be read"):
        nodes_key(node(0, 9000, nodes_key_file=str(tmp_path / "none")))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(ConfigError, match="OCTAVO_NODES_KEY"):
        Leader(node(0, free_port()))


def test_only_the_named_address_is_listened_on():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(Follower, node(1, port, master_addr="127.0.0.2"))
        leader = Leader(node(0, port, master_addr="127.0.0.2"))
        follower = following.result(timeout=60)
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", port))
    leader.close()
    follower.close()


def test_an_address_that_is_nobodys_is_named():
    with pytest.raises(ConfigError, match=r"--master-addr nowhere\.invalid is not known"):
        Leader(node(0, free_port(), master_addr="nowhere.invalid"))
    with pytest.raises(ConfigError, match=r"--master-addr 192\.0\.2\.1 .* cannot be listened on"):
        Leader(node(0, free_port(), master_addr="192.0.2.1"))


LEADER = """
import json, os, sys, time
from octavo_core.errors import EngineDeadError
from octavo_engine import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(**options)
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
prompts = [[5, 6, 7], [9] * 40, list(range(1, 30)), [3]]
done = [llm.generate(prompts, [greedy] * 4) for _ in range(2)]
print(json.dumps([[d.token_ids for d in run] for run in done]), llm._built.recompiles, flush=True)
sys.stdin.readline()
start_s = time.monotonic()
try:
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    print("served", flush=True)
    llm.close()
except EngineDeadError as error:
    print(time.monotonic() - start_s, error, flush=True)
    os._exit(3)
"""
FOLLOWER = """
import json, sys
from octavo_engine import EngineConfig, follow
follow(EngineConfig(**json.loads(sys.argv[1])))
print("ended", flush=True)
"""


def told(process):
    """Its next line, without those that Gloo writes to standard output."""
    return next((line for line in process.stdout if not line.startswith("[Gloo]")), "")


def start(code, options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["gently", "stopped"])
def test_two_processes_serve_the_tokens_of_one_and_a_dead_one_is_an_error_in_time(checkpoint, ending):
    from octavo_engine import LLM, SamplingParams

    options = {
        **OPTIONS,
        "model": str(checkpoint),
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "master_port": free_port(),
        "node_timeout_s": 5.0,
    }
    leader, follower = start(LEADER, options), start(FOLLOWER, {**options, "node_rank": 1, "headless": True})
    try:
        line = told(leader)
        tokens, _, recompiles = line.rpartition(" ")
        alone = LLM(model=str(checkpoint), **OPTIONS)
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        wanted = [done.token_ids for done in alone.generate([[5, 6, 7], [9] * 40, list(range(1, 30)), [3]], greedy)]
        alone.close()
        assert json.loads(tokens) == [wanted, wanted]
        assert int(recompiles) == 0
        if ending == "stopped":
            os.kill(follower.pid, signal.SIGSTOP)
        leader.stdin.write("go\n")
        leader.stdin.flush()
        said = told(leader)
        if ending == "stopped":
            seconds, _, error = said.partition(" ")
            assert float(seconds) < 20
            assert "node 1" in error
            assert "has not been heard of" in error
            assert leader.wait(timeout=PATIENCE_S) == 3
        else:
            assert said == "served\n"
            assert told(follower) == "ended\n"
            assert leader.wait(timeout=PATIENCE_S) == 0
            assert follower.wait(timeout=PATIENCE_S) == 0
    finally:
        for process in (leader, follower):
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
