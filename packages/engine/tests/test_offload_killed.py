"""An engine that is killed amid writing to its disk tier, and the one that comes after it."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from octavo_offload.node import Blocks, Node

CHILD = """
import itertools, json, sys
from octavo_core.wire import SamplingParams
from octavo_engine import LLM
options = json.loads(sys.argv[1])
llm = LLM(**options["llm"])
if llm.core.offload is not None:
    llm.core.offload.token_s, llm.core.offload.learns = 10.0, False
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
for i in itertools.count() if options["forever"] else range(len(options["prompts"])):
    done = llm.generate(options["prompts"][i % len(options["prompts"])], greedy)[0]
    print(json.dumps([done.token_ids, done.num_cached_tokens]), flush=True)
llm.close()
"""


def started(llm, prompts, *, forever):
    words = json.dumps({"llm": llm, "prompts": prompts, "forever": forever})
    return subprocess.Popen([sys.executable, "-c", CHILD, words], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_after_a_kill_the_next_engine_has_cached_tokens_and_the_same_text(checkpoint, tmp_path):
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 96, 100).tolist() for _ in range(10)]
    llm = {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_gpu_blocks_override": 31,
    }
    with started(llm, prompts, forever=False) as plain:
        wanted = [json.loads(line)[0] for line in plain.stdout]
    tiers = {**llm, "kv_offload": f"host=1M,disk={tmp_path}/kv:64M"}
    for kills_after in (5, 13):
        with started(tiers, prompts, forever=True) as child:
            for i in range(kills_after):
                assert json.loads(child.stdout.readline())[0] == wanted[i % 10]
            os.kill(child.pid, signal.SIGKILL)
    with started(tiers, prompts, forever=False) as child:
        got = [json.loads(line) for line in child.stdout]
    assert [tokens for tokens, _ in got] == wanted
    assert got[0][1] == 96


@pytest.mark.slow
def test_an_engine_has_cached_tokens_from_a_store_that_another_filled(checkpoint, tmp_path):
    """Through the flags, as a server is started."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, 96, 100).tolist() for _ in range(6)]
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    node = Node("127.0.0.1:0", Blocks(64 << 20), b"k" * 32)
    node.start()
    llm = {
        "model": str(checkpoint),
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_gpu_blocks_override": 31,
    }
    remote = {**llm, "kv_offload": f"remote={node.address}", "kv_store_key_file": str(key)}
    with started(llm, prompts, forever=False) as plain:
        wanted = [json.loads(line)[0] for line in plain.stdout]
    for _ in range(2):
        with started(remote, prompts, forever=False) as child:
            got = [json.loads(line) for line in child.stdout]
        assert [tokens for tokens, _ in got] == wanted
    assert got[0][1] == 96
    assert node.blocks.num_leased == 0
    node.stop(0.0)
