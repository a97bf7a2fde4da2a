"""KV below the device in a running engine: the same tokens as without it, whatever happens to the tiers.

Size: engines that are dear to build are asked everything here.
"""

import functools
import itertools
import os
import pathlib
import signal
import time

import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.keys import block_keys, namespace_of, tier_root
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine._src import compose_tiers
from octavo_engine._src.kv_offload_config import parse
from octavo_engine._src.offload import Offload
from octavo_engine.config import EngineConfig
from octavo_offload import RemoteConfig, ThreadFiles, open_tiers
from octavo_offload._src import nixl_files
from octavo_offload.node import Blocks, Node

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
NAMES = itertools.count()
MODELS = pathlib.Path(__file__).parents[2] / "models" / "tests" / "fixtures"


class Served:
    """One engine whose tiers, and whose device cache, can be replaced as a restart would."""

    def __init__(self, llm):
        self.llm, self.core = llm, llm.core
        self.first = llm.core.offload
        self.first.close()

    def restart(self, path, *, revision="a", host_bytes=8 << 20, disk_bytes=8 << 20, files=None, remote=None):
        """Forget everything but what is on disk."""
        self.stop()
        facts = {"revision": revision}
        store = open_tiers(
            self.first._mover.piece_bytes,
            host_bytes=host_bytes,
            disk=(path, disk_bytes) if path else None,
            identity=tier_root(b"", **facts),
            files=files,
            remote=remote,
        )
        self.core.planner.reset()
        root = functools.partial(tier_root, **facts)
        self.core.offload = Offload(
            store, self.first._mover, self.first._lending, self.core.planner.spec, root, token_s=10.0, learns=False
        )
        return self.core.offload

    def stop(self):
        if self.core.offload is not None:
            self.idle()
            self.core.offload.close()
            self.core.offload = None

    def idle(self):
        while self.core.has_work:
            self.core.turn()
        self.core.offload.store.wait_idle(PATIENCE_S)

    def ask(self, *prompts, tenant="", abort=()):
        """Tokens and cached tokens of each prompt, all at once."""
        names = [f"r{next(NAMES)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.core.add(EngineRequest(request_id=name, prompt_ids=prompt, sampling=GREEDY, namespace=namespace_of(tenant)))
        tokens, cached = {n: [] for n in names}, dict.fromkeys(names, 0)
        for name in (names[i] for i in abort):
            self.core.abort(name)
        end = time.monotonic() + PATIENCE_S
        while self.core.has_work:
            assert time.monotonic() < end, "the engine ends what it was asked"
            for out in self.core.turn():
                tokens[out.request_id] += out.token_ids
                cached[out.request_id] = max(cached[out.request_id], out.num_cached_tokens)
        return [(tokens[n], cached[n]) for n in names]


@pytest.fixture(scope="module")
def served(make_llm):
    """30 blocks of 16 tokens, eight sequences: prompts of a test do not fit together."""
    llm = make_llm(num_gpu_blocks_override=31, kv_offload="host=8M", max_num_seqs=8)
    served = Served(llm)
    served.core.offload = None
    yield served
    served.stop()


@pytest.fixture
def texts():
    rng = np.random.default_rng(7)
    return [rng.integers(0, 96, 100).tolist() for _ in range(10)]


@pytest.fixture
def wanted(served, texts):
    """What the engine says without tiers."""
    served.stop()
    served.core.planner.reset()
    return [served.ask(text)[0][0] for text in texts]


def findable(radix, spec):
    """Part, id and generation of every block that a prefix leads to."""
    nodes = np.flatnonzero(np.asarray(radix.is_indexed)) if spec.whole_groups else np.zeros(0, int)
    names = {(0, block, int(radix.generation[block])) for block in nodes.tolist()}
    for part, side in enumerate(radix.sides, bool(spec.whole_groups)):
        assert not np.any(np.asarray(side.refcount)), "nothing is leased"
        names |= {(part, block, int(side.generation[block])) for block in np.flatnonzero(np.asarray(side.owner)).tolist()}
    return names


def check_books(served):
    """Nothing is leased, and every known block is where and what the cache says."""
    from octavo_kvcache import audit

    served.idle()
    for _ in range(3):
        served.core.turn()
    served.core.offload.store.wait_idle(PATIENCE_S)
    cache = served.core.planner.state[1]
    assert audit(cache, served.core.planner.spec) == []
    assert served.core.offload.store.host.num_leased == 0
    assert served.core.offload._held_bytes == 0
    known = {name for name, _ in served.core.offload.blocks.items()}
    assert known == findable(cache.radix, served.core.planner.spec)


def test_what_the_device_lost_comes_back_with_the_same_tokens(served, texts, wanted):
    offload = served.restart(None)
    compiled = served.llm._built.recompiles
    first = [served.ask(text)[0] for text in texts]
    assert [tokens for tokens, _ in first] == wanted
    assert max(cached for _, cached in first) < 16  # the first tokens of a block may be those of another
    again = [served.ask(text)[0] for text in texts]
    assert [tokens for tokens, _ in again] == wanted
    assert all(cached >= 96 for _, cached in again)
    assert offload.stats()[0].hits >= 40
    check_books(served)
    assert served.llm._built.recompiles == compiled


def test_many_at_once_give_the_same_tokens(served, texts, wanted):
    served.restart(None)
    for _ in range(3):
        assert [tokens for tokens, _ in served.ask(*texts)] == wanted
    check_books(served)


def test_a_restart_with_a_warm_disk_has_cached_tokens_on_the_first_request(served, texts, wanted, tmp_path):
    served.restart(tmp_path)
    served.ask(*texts[:4])
    served.restart(tmp_path)
    (first,) = served.ask(texts[0])
    assert first == (wanted[0], 96)
    assert served.core.offload.stats()[1].verified == 6
    check_books(served)


def test_a_prefix_that_others_share_comes_back_in_part(served, texts, tmp_path):
    served.restart(tmp_path)
    served.ask(texts[0])
    served.restart(tmp_path)
    mixed = texts[0][:50] + texts[1][:50]
    (got,) = served.ask(mixed)
    assert got[1] == 48
    served.restart(None)
    assert served.ask(mixed)[0][0] == got[0]


def test_another_revision_or_type_finds_nothing_in_the_same_folder(served, texts, wanted, tmp_path):
    for revision in ("a", "b", "a"):
        served.restart(tmp_path, revision=revision)
        served.ask(texts[0])
    served.restart(tmp_path, revision="c")
    assert served.ask(texts[0])[0] == (wanted[0], 0)
    served.restart(tmp_path, revision="a")
    assert served.ask(texts[0])[0] == (wanted[0], 96)


def test_tenants_share_nothing_in_any_tier(served, texts, wanted, tmp_path):
    served.restart(tmp_path)
    served.ask(texts[0], tenant="one")
    served.restart(tmp_path)
    assert served.ask(texts[0], tenant="two")[0] == (wanted[0], 0)
    served.ask(*texts[1:8], tenant="two")
    assert served.ask(texts[0], tenant="one")[0] == (wanted[0], 96)


def test_flipped_bits_on_disk_cost_the_cache_and_never_a_token(served, texts, wanted, tmp_path):
    served.restart(tmp_path)
    served.ask(*texts[:4])
    served.stop()
    for file in tmp_path.rglob("seg-*.kv"):
        data = np.fromfile(file, np.uint8)
        data[5000::4096] ^= 1
        data.tofile(file)
    served.restart(tmp_path)
    assert served.ask(texts[0])[0] == (wanted[0], 0)
    disk = served.core.offload.stats()[1]
    assert disk.corrupt > 0
    assert disk.hits == 0
    check_books(served)


def test_a_truncated_disk_under_a_running_engine_costs_no_token(served, texts, wanted, tmp_path):
    served.restart(tmp_path, host_bytes=1 << 14)
    served.ask(*texts[:4])
    check_books(served)
    for file in tmp_path.rglob("seg-*.kv"):
        os.truncate(file, 8192)
    assert [tokens for tokens, _ in served.ask(*texts)] == wanted
    check_books(served)


def test_requests_that_are_aborted_between_look_up_and_load_leave_nothing_leased(served, texts, wanted, tmp_path):
    served.restart(tmp_path, host_bytes=1 << 16)
    served.ask(*texts)
    for i in range(100):
        served.ask(texts[i % 10], abort=[0])
    check_books(served)
    assert [tokens for tokens, _ in served.ask(*texts, abort=[])] == wanted
    check_books(served)


def test_a_prompt_asked_for_a_hundred_times_pins_nothing_and_new_ones_are_kept(served, texts, wanted, tmp_path):
    """As in LMCache#1034, where what was looked up and never fetched stayed pinned until the hit rate was 0. A host tier of twenty blocks."""
    offload = served.restart(None, host_bytes=20 * served.first.store.host.block_bytes)
    for turn in range(100):
        (said, _), *_ = served.ask(texts[0], texts[0], abort=(1,) if turn % 3 == 0 else ())
        assert said == wanted[0]
    for _ in range(2):
        assert [served.ask(text)[0][0] for text in texts] == wanted
    served.idle()
    assert offload.store.host.num_leased == offload.store.num_pending == 0
    evicted = offload.store.host.count.evicted
    rng = np.random.default_rng(5)
    for _ in range(5):
        served.ask(rng.integers(0, 96, 100).tolist())
    served.idle()
    assert offload.store.host.count.evicted > evicted, "new blocks still find room"
    check_books(served)


def test_a_slow_writer_is_never_read_before_it_is_done(served, texts, wanted, tmp_path):
    """As in LMCache#207: the same prompt again at once, with the device's copy gone, while the first is being written."""

    class Slow(ThreadFiles):
        def write(self, fd, data, offset):
            for part in data:
                super().write(fd, [part], offset)
                offset += len(part)
                time.sleep(0.02)

    offload = served.restart(tmp_path, host_bytes=4 * served.first.store.host.block_bytes, files=Slow(tmp_path))
    for text, said in zip(texts[:4], wanted, strict=False):
        first, second = served.ask(text, text)
        assert first[0] == second[0] == said
        served.ask(*texts[5:8])
        assert served.ask(text)[0][0] == said
    served.idle()
    assert not any(tier.corrupt for tier in offload.stats())
    check_books(served)


def test_a_reused_prefix_is_kept_at_once_and_the_rest_when_nothing_runs(served, texts):
    offload = served.restart(None)
    served.ask(texts[0])
    stored = offload.stats()[0].stored
    served.core.turn()
    offload.store.wait_idle(PATIENCE_S)
    assert offload.stats()[0].stored >= max(stored, 6)
    check_books(served)


def test_a_crowded_pool_lends_blocks_and_frees_them_once_they_are_kept(served, texts):
    offload = served.restart(None)
    free = []
    for text in texts:
        served.ask(text)
        served.idle()
        free.append(served.core.stats().num_free_blocks)
    for _ in range(4):
        served.ask(texts[-1])
        served.idle()
    assert served.core.stats().num_free_blocks >= 3  # 0.88 of 30 blocks are 26
    assert offload.stats()[0].stored >= 30
    check_books(served)


@pytest.mark.parametrize("is_amid_turn", [True, False])
def test_a_turn_that_failed_is_not_trusted_with_what_the_device_holds(served, texts, tmp_path, monkeypatch, is_amid_turn):
    offload, saved = served.restart(tmp_path), []
    served.ask(texts[0])
    served.idle()
    monkeypatch.setattr(offload.store, "has", lambda key: False)
    monkeypatch.setattr(offload.store, "save", lambda *words: saved.append(words))
    offload._unsaved.update(dict.fromkeys(key for _, key in offload.blocks.items()))
    offload.is_amid_turn = is_amid_turn
    offload.close()
    served.core.offload = None
    assert bool(saved) != is_amid_turn


@pytest.fixture(scope="module")
def remote():
    node = Node("127.0.0.1:0", Blocks(64 << 20), b"k" * 32)
    node.start()
    yield node, RemoteConfig(target=node.address, secret=b"k" * 32, join_s=600.0, deadline_s=60.0)
    node.stop(0.0)


def test_another_engine_has_cached_tokens_from_the_store_and_other_weights_and_tenants_none(served, texts, wanted, remote):
    node, config = remote
    served.restart(None, remote=config)
    assert served.ask(texts[0], tenant="one")[0][0] == wanted[0]
    served.restart(None, remote=config)
    assert served.ask(texts[0], tenant="two")[0] == (wanted[0], 0)
    assert served.ask(texts[0], tenant="one")[0] == (wanted[0], 96)
    assert served.core.offload.stats()[1].verified == 6
    check_books(served)
    served.restart(None, remote=config, revision="b")
    assert served.ask(texts[0], tenant="one")[0] == (wanted[0], 0)
    served.stop()
    assert node.blocks.num_leased == 0


@pytest.mark.slow
def test_an_agent_that_is_killed_while_requests_wait_for_it_costs_no_token(served, texts, wanted, remote):
    _, config = remote
    served.restart(None, remote=config, revision="c")
    served.ask(*texts)
    served.restart(None, remote=config, revision="c", host_bytes=1 << 16)
    tier = served.core.offload.store.lower[0]
    for _ in range(3):
        agent = tier.agent_id
        for i, text in enumerate(texts):
            name = f"r{next(NAMES)}"
            served.core.add(EngineRequest(request_id=name, prompt_ids=text, sampling=GREEDY, namespace=namespace_of("")))
            if i == 2:
                os.kill(agent, signal.SIGKILL)
        served.idle()
        assert [tokens for tokens, _ in served.ask(*texts)] == wanted
        end = time.monotonic() + 600
        while tier.agent_id == agent or tier.state != "on":
            assert time.monotonic() < end, "a new agent joins"
            time.sleep(0.01)
    check_books(served)


NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("gpt-oss", marks=NIGHTLY),
        pytest.param("deepseek-v3", marks=NIGHTLY),
    ],
)
def windowed(make_llm, request):
    """Layers of which some, all, some and none see 24 tokens back: 30 blocks of 16 tokens in each group."""
    llm = make_llm(MODELS / request.param, num_gpu_blocks_override=31, kv_offload="host=8M", max_num_seqs=8)
    windowed = Served(llm)
    windowed.core.offload = None
    yield windowed
    windowed.stop()


@pytest.fixture
def said(windowed, texts):
    """What it says without tiers."""
    windowed.stop()
    windowed.core.planner.reset()
    return [windowed.ask(text)[0][0] for text in texts]


def test_windows_lost_by_the_device_come_back_with_the_same_tokens(windowed, texts, said):
    offload = windowed.restart(None)
    compiled = windowed.llm._built.recompiles
    assert [windowed.ask(text)[0][0] for text in texts] == said
    again = [windowed.ask(text)[0] for text in texts]
    assert [tokens for tokens, _ in again] == said
    assert all(cached >= 96 for _, cached in again)
    assert offload.stats()[0].hits >= 8, "of some prompts at least what a window sees"
    for _ in range(2):
        assert [tokens for tokens, _ in windowed.ask(*texts)] == said
    check_books(windowed)
    assert windowed.llm._built.recompiles == compiled


def test_windows_come_from_a_warm_disk_after_a_restart(windowed, texts, said, tmp_path):
    windowed.restart(tmp_path)
    windowed.ask(*texts[:4])
    windowed.restart(tmp_path, host_bytes=12 * windowed.first.store.host.block_bytes)
    assert windowed.ask(texts[0])[0] == (said[0], 96)
    assert windowed.core.offload.stats()[1].verified >= 2
    check_books(windowed)
    assert [tokens for tokens, _ in windowed.ask(*texts)] == said
    check_books(windowed)


def test_a_shorter_prefix_than_the_loaded_one_gets_the_window_it_needs(windowed, texts, tmp_path, request):
    """What was loaded has windows at its end only. Where no layer has one, the beginning of the fourth block is copied too."""
    shared = 50 if request.node.callspec.params["windowed"] == "deepseek-v3" else 48
    mixed = texts[0][:50] + texts[1][:50]
    windowed.restart(tmp_path)
    without = windowed.ask(mixed)[0][0]
    windowed.restart(tmp_path / "other")
    windowed.ask(texts[0])
    windowed.restart(tmp_path / "other")
    assert windowed.ask(texts[0])[0][1] == 96
    assert windowed.ask(mixed)[0] == (without, shared)
    check_books(windowed)


def test_a_window_that_no_tier_has_is_a_miss(windowed, texts, said):
    offload = windowed.restart(None)
    windowed.ask(texts[0])
    windowed.idle()
    windowed.core.turn()
    offload.store.wait_idle(PATIENCE_S)
    keys = block_keys(texts[0], b"", 16, parent=tier_root(namespace_of(""), revision="a"))
    lost = keys[5]
    offload.clear()
    windowed.core.planner.reset()
    host = offload.store.host
    find = host.find
    host.find = lambda keys: find(keys[: keys.index(lost)] if lost in keys else keys)
    assert windowed.ask(texts[0])[0] == (said[0], 80), "as far as windows go"
    check_books(windowed)


@pytest.mark.parametrize(
    ("text", "gigabytes", "wanted"),
    [
        (None, 0.0, (0, None)),
        ("host=4GiB", 0.0, (4 << 30, None)),
        ("host=512M,disk=/a:b/kv:50GiB", 0.0, (512 << 20, ("/a:b/kv", 50 << 30))),
        ("disk=/kv:1.5g", 2.0, (2 << 30, ("/kv", 3 << 29))),
        ("remote=[::1]:7100", 2.0, (2 << 30, None)),
    ],
)
def test_flags_say_which_tiers_there_are(text, gigabytes, wanted):
    tiers = parse(text, gigabytes)
    assert tiers.remote == ("[::1]:7100" if "remote" in (text or "") else "")
    assert (tiers.host_bytes, tiers.disk and (str(tiers.disk[0]), tiers.disk[1])) == wanted
    assert tiers.is_wanted == (wanted != (0, None))
    assert tiers.host_policy == "lru"
    assert parse("host=4GiB:arc,disk=/kv:1G").host_policy == parse("host=4GiB:arc").host_policy == "arc"
    assert tiers.disk_way == "auto"
    asked = parse("disk=/kv:1G:gds_mt")
    assert (asked.disk_way, asked.disk) == ("gds_mt", parse("disk=/kv:1G").disk)


def test_gpudirect_storage_is_refused_where_there_is_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(nixl_files, "_GPU", tmp_path / "nothing")
    assert compose_tiers._files(parse(f"disk={tmp_path}:1G")) is None
    with pytest.raises(ConfigError, match="gds_mt does not work here: no NVIDIA GPU is seen"):
        compose_tiers._files(parse(f"disk={tmp_path}:1G:gds_mt"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_offload": "host=4GiB,remote=10.0.0.1:7000"}, "wants --kv-store-key-file"),
        ({"kv_offload": "remote=10.0.0.1", "kv_store_key_file": "k"}, "host and port"),
        ({"kv_offload": "host=1G", "kv_store_key_file": "k"}, "which is missing"),
        ({"kv_offload": "remote=a:1", "kv_store_tls": "one,two"}, "three files"),
        ({"kv_offload": "host=lots"}, "wants a size above 0"),
        ({"kv_offload": "host=1G:clock"}, "takes :lru or :arc"),
        ({"kv_offload": "disk=/kv"}, "a folder and a size"),
        ({"kv_offload": "disk=/kv:gds_mt"}, "a folder and a size"),
        ({"kv_offload": "disk=/kv:1G:gds"}, "wants a size above 0"),
        ({"kv_offload": "tape=1G"}, r"knows host=SIZE\[:lru\|:arc\], disk=PATH:SIZE\[:gds_mt\] and remote=HOST:PORT"),
        ({"kv_offload": "host=1G,host=2G"}, "twice"),
        ({"kv_offload": "host=1G", "cpu_offload_gb": 1.0}, "both say"),
        ({"cpu_offload_gb": -1.0}, "at least 0"),
        ({"kv_offload": "host=1G", "enable_prefix_caching": False}, "prefix"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)
