"""KV in 8 bits: one more element type to the engine, with keys of its own and scales that travel with their block."""

import types

import pytest

from octavo_core.keys import tier_root
from octavo_core.specs import CacheSpec
from octavo_core.wire import SamplingParams
from octavo_engine import EngineConfig
from octavo_engine._src.kv_facts import kv_facts
from octavo_engine._src.programs import kept_programs
from octavo_engine._src.weights import Loaded
from octavo_kernels import attention_backend
from octavo_kvcache import memory
from octavo_models.checkpoints import open_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NAMES = ("auto", "bfloat16", "fp8", "fp8_e5m2")


def test_no_two_element_types_share_a_key_outside_the_device(checkpoint):
    opened, attention = open_checkpoint(checkpoint, name="tiny"), attention_backend("xla").backend
    loaded = Loaded(types.SimpleNamespace(layers=lambda: [object()]), "float32", "float32", False)

    def root(name):
        # As many bytes a block for each, so that nothing but the type tells them apart.
        return tier_root(
            b"", **kv_facts(EngineConfig(kv_cache_dtype=name), opened, loaded, attention, CacheSpec((9,), 16, 2, 4), (64,), "w")
        )

    assert len({root(name) for name in NAMES}) == len(NAMES)
    assert root("fp8") == root("fp8_e4m3")
    assert root("auto") == root("float32")


def test_no_two_element_types_share_a_kept_program(checkpoint, tmp_path):
    kept = [kept_programs(EngineConfig(kv_cache_dtype=n, compilation_cache_dir=str(tmp_path)), checkpoint) for n in NAMES]
    assert len({programs._path("name", "segment 0") for programs in kept}) == len(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_an_engine_serves_from_fp8_memory_cold_cached_and_in_chunks(make_llm, prompts, is_idle, name):
    llm = make_llm(kv_cache_dtype=name, kv_offload="host=4M", max_num_seqs=8, chunked_prefill_size=24)
    told = {row[0]: row[1:] for row in llm._built.table}
    dtype = EngineConfig(kv_cache_dtype=name).kv_dtype("")
    assert told["KV pool"][0].endswith(dtype)
    assert told["attention"][0] == "xla"
    assert "hopper: " in told["attention"][1]
    groups = llm.core.runner.programs.groups
    assert sum(llm.core.offload._mover.piece_bytes) == sum(memory.block_bytes(group) for group in groups)
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:4]]
    assert [done.token_ids for done in llm.generate(prompts[:4], GREEDY)] == alone
    plain = make_llm(max_num_seqs=8, chunked_prefill_size=24)
    wide = [done.logprobs[0] for done in plain.generate(prompts[:4], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))]
    narrow = [done.logprobs[0] for done in llm.generate(prompts[:4], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))]
    differences = [abs(w.top_logprobs[0] - n.top_logprobs[0]) for w, n in zip(wide, narrow, strict=True)]
    assert 0 < max(differences) < 0.5
    is_idle(llm.core)
