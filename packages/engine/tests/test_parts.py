"""Sizes, the queue, configuration and commands: what needs no engine."""

import argparse
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.config import add_arguments, from_namespace
from octavo_core.errors import ConfigError
from octavo_core.specs import CacheSpec, KVGroupSpec
from octavo_core.wire import EngineRequest, SamplingParams
from octavo_engine import EngineConfig
from octavo_engine._src import sizing
from octavo_engine._src.compose import _prefix_cache
from octavo_engine._src.device import tree_bytes
from octavo_engine._src.intake import Queue
from octavo_engine._src.sequence import Sequence
from octavo_kernels import attention_backend
from octavo_kvcache import memory


def test_shares_of_the_pool_become_quotas_and_a_policy_is_found_by_its_name():
    table = []
    cache = _prefix_cache(EngineConfig(prefix_cache_policy="lfu", prefix_cache_quotas="0.25,0.5"), table)(
        CacheSpec((101,), 16, 4, 8)
    )
    assert (cache.quotas, type(cache.policy).__name__) == ((25, 50), "LeastFrequentlyUsed")
    assert ("eviction", "lfu", "--prefix-cache-policy") in table


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_cache_quotas": "a"}, "list of shares"),
        ({"prefix_cache_quotas": "0.6,0.6"}, "together at most 1"),
        ({"prefix_cache_quotas": "-0.1"}, "from 0 to 1"),
        ({"prefix_cache_quotas": "nan"}, "from 0 to 1"),
        ({"prefix_cache_policy": "mru"}, "one of two-lifetimes, lru, lfu, fifo"),
    ],
)
def test_wrong_shares_and_policies_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ConfigError, match=message):
        _prefix_cache(EngineConfig(**options), [])


@given(budget=st.integers(1, 9000), seqs=st.integers(1, 600), alone=st.booleans())
def test_every_step_the_scheduler_can_plan_has_a_shape(budget, seqs, alone):
    shapes = sizing.buckets(budget, seqs, alone=alone)
    assert len(shapes) <= sizing.MAX_BUCKETS
    assert [b.tokens for b in shapes] == sorted({b.tokens for b in shapes})
    for tokens in {1, budget // 2 or 1, budget}:
        shape = sizing.pick(shapes, tokens, min(tokens, seqs))
        assert shape.tokens >= tokens
        assert shape.rows >= min(tokens, seqs)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_the_pool_an_attention_backend_allocates_has_the_bytes_it_is_sized_by(backend, dtype):
    group = KVGroupSpec("full", tuple(range(30)), 3, 64, dtype, 32)
    pool = attention_backend(backend, (group,)).backend.init_kv(group, 5)
    assert tree_bytes(pool) == memory.pool_bytes((group,), (5,))


@pytest.mark.parametrize(("name", "num_bytes"), [("auto", 327_680), ("fp8", 163_840 + 5_120), ("fp8_e5m2", 163_840 + 5_120)])
def test_a_token_of_llama_3_1_70b_takes_half_the_bytes_in_fp8_and_a_scale_for_each_head(name, num_bytes):
    dtype = EngineConfig(kv_cache_dtype=name).kv_dtype("bfloat16")
    group = KVGroupSpec("full", tuple(range(80)), 8, 128, dtype, 32)
    assert memory.token_bytes(group) == num_bytes
    pool = attention_backend("xla", (group,)).backend.init_kv(group, 2)
    assert tree_bytes(pool) == 2 * 32 * num_bytes


def test_fp8_without_a_format_is_e4m3():
    assert EngineConfig(kv_cache_dtype="fp8").kv_dtype("float32") == EngineConfig(kv_cache_dtype="fp8_e4m3").kv_dtype("float32")
    assert EngineConfig(kv_cache_dtype="fp8_e5m2").kv_dtype("float32") == "float8_e5m2"
    assert EngineConfig().kv_dtype("float32") == "float32"


@pytest.mark.parametrize(("asked", "on_cpu", "most"), [(7, True, 7), (0, True, 64), (0, False, 256), (300, False, 300)])
def test_the_most_sequences_are_those_asked_for_or_the_devices_default(asked, on_cpu, most):
    assert sizing.num_sequences(EngineConfig(max_num_seqs=asked), on_cpu=on_cpu)[0] == most


@pytest.mark.parametrize(
    ("options", "free", "on_cpu", "blocks"),
    [
        ({"num_gpu_blocks_override": 7}, 0, False, 7),
        ({"kv_cache_memory_bytes": 1000}, 0, False, 10),
        ({"gpu_memory_utilization": 0.5}, 2000, False, 10),
        ({"gpu_memory_utilization": 0.5}, 8000, True, 10),
        ({"gpu_memory_utilization": 1.0}, 2**50, True, sizing.CPU_POOL_BYTES // 100),
    ],
)
def test_the_pool_is_as_large_as_asked_for(options, free, on_cpu, blocks):
    assert sizing.num_blocks(EngineConfig(**options), 100, free, on_cpu=on_cpu)[0] == blocks


def test_a_pool_without_room_for_two_blocks_is_refused():
    with pytest.raises(ConfigError, match="at least 2"):
        sizing.num_blocks(EngineConfig(kv_cache_memory_bytes=150), 100, 0, on_cpu=True)


@pytest.mark.parametrize(
    ("small_s", "large_s", "budget"), [(0.02, 0.03, 512), (0.05, 0.2, 128), (0.02, 0.1, 256), (3.0, 6.0, 128), (0.05, 0.04, 512)]
)
def test_the_cpu_budget_keeps_a_full_step_short(small_s, large_s, budget):
    assert sizing.cpu_budget(small_s, large_s, 64)[0] == budget


def sequence(order, priority=0):
    request = EngineRequest(request_id=str(order), prompt_ids=[1] * 5, sampling=SamplingParams(), priority=priority)
    return Sequence(request, order, 10, 0, frozenset(), 0.0)


def sequence_of(order, *, priority=0, deadline=0, tenant=0):
    made = sequence(order, priority)
    made.request = msgspec.structs.replace(made.request, tenant=tenant)
    made.deadline = deadline
    return made


ENTRIES = st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 9), st.integers(0, 2), st.booleans()))


@given(entries=ENTRIES, policy=st.sampled_from(["fcfs", "priority", "edf", "lpm"]))
def test_the_queue_answers_in_policy_order_without_those_discarded(entries, policy):
    queue = Queue(policy=policy, max_requests=0, max_tokens=0)
    made = [sequence_of(i, priority=p, deadline=d, tenant=t) for i, (p, d, t, _) in enumerate(entries)]
    for one in made:
        queue.push(one)
    for one, (*_, gone) in zip(made, entries, strict=True):
        if gone:
            queue.discard(one)
    kept = [one for one, (*_, gone) in zip(made, entries, strict=True) if not gone]
    key = {"priority": lambda s: s.request.priority, "edf": lambda s: s.deadline}.get(policy, lambda s: 0)
    wanted = sorted(kept, key=lambda s: (key(s), s.order))
    assert [queue.pop({}, 0) for _ in wanted] == wanted
    assert queue.pop({}, 0) is None
    queue.check_room([10**9], 0)


@given(entries=ENTRIES, slots=st.integers(0, 9))
def test_a_fair_queue_keeps_places_for_tenants_that_come_and_each_in_its_own_order(entries, slots):
    queue = Queue(policy="fair", max_requests=0, max_tokens=0)
    made = [sequence_of(i, tenant=t) for i, (_, _, t, _) in enumerate(entries)]
    for one in made:
        queue.push(one)
    waiting: dict[int, int] = {}
    while (one := queue.pop(waiting, slots)) is not None:
        tenant = one.request.tenant
        behind = {s.request.tenant for s in made}
        assert waiting.get(tenant, 0) == min(waiting.get(t, 0) for t in behind)
        waiting[tenant] = waiting.get(tenant, 0) + 1
        assert one is next(s for s in made if s.request.tenant == tenant)
        made.remove(one)
    present = {*waiting, *(s.request.tenant for s in made)}
    for one in made:
        assert waiting[one.request.tenant] >= max(1, slots // (1 + len(present)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size is at least 1"),
        ({"expert_parallel": True}, "--expert-parallel divides experts among the devices"),
        ({"kv_cache_dtype": "fp4"}, "--kv-cache-dtype is one of auto, bfloat16, float32, fp8, fp8_e4m3, fp8_e5m2, got 'fp4'"),
        ({"enable_chunked_prefill": False}, "always computed in chunks"),
        ({"block_size": 48}, "--block-size is one of 16, 32, 64"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"max_num_seqs": -1}, "--max-num-seqs is at least 0"),
        ({"num_gpu_blocks_override": 1}, "at least 2"),
    ],
)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_the_reference_manifest_parses():
    parser = argparse.ArgumentParser()
    add_arguments(parser, EngineConfig)
    words = "--tensor-parallel-size=1 --block-size=32 --max-num-batched-tokens=2048 --enable-chunked-prefill=true --gpu-memory-utilization=0.92"
    config = from_namespace(EngineConfig, parser.parse_args(words.split()))
    assert (config.max_num_batched_tokens, config.gpu_memory_utilization, config.enable_chunked_prefill) == (2048, 0.92, True)


def test_importing_config_and_commands_imports_no_jax():
    code = "import sys, octavo_engine.config, octavo_engine.commands; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_doctor_looks_at_the_fabric_and_wants_tcp_to_be_allowed(capsys):
    from octavo_core.errors import ConfigError
    from octavo_engine.commands import doctor

    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--fabric"])) == 1
    assert "--allow-tcp" in capsys.readouterr().out
    doctor.run(parser.parse_args(["--fabric", "--allow-tcp"]))
    assert "ok    transport" in capsys.readouterr().out
    assert doctor.run(parser.parse_args(["--fabric", "--prometheus"])) == 0
    with pytest.raises(ConfigError, match="which is missing"):
        doctor.run(parser.parse_args(["--allow-tcp"]))


def test_doctor_reports_each_fact_and_fails_for_a_missing_model(capsys):
    from octavo_engine.commands import doctor

    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--model", "/nonexistent.gguf"])) == 1
    shown = capsys.readouterr().out
    assert "ok    jax" in shown
    assert "FAIL  model" in shown


def test_doctor_says_which_attention_would_serve_and_why_not_those_before_it(checkpoint, capsys):
    from octavo_engine.commands import doctor

    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.run(parser.parse_args(["--model", str(checkpoint)])) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ok    attention"))
    assert line.split()[2] == attention_backend("auto", (KVGroupSpec("full", (0, 1), 2, 8, "float32", 32),)).name
    assert "hopper: needs a GPU of compute capability 9.0 (Hopper); JAX sees cpu (cpu)" in line
