"""Memory arithmetic against known values and against brute force."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_core.errors import ConfigError
from octavo_core.specs import KVGroupSpec
from octavo_kvcache import memory

LLAMA_70B = KVGroupSpec("full", tuple(range(80)), 8, 128, "bfloat16", 32)
DEEPSEEK_V3 = KVGroupSpec("latent", tuple(range(61)), 1, 512 + 64, "bfloat16", 64)
sizes = st.integers(1, 40)


def test_a_token_of_llama_70b_takes_320_kib_in_bfloat16():
    assert memory.token_bytes(LLAMA_70B) == 327_680
    assert memory.block_bytes(LLAMA_70B) == 32 * 327_680
    assert memory.token_bytes(dataclasses.replace(LLAMA_70B, dtype="float32")) == 655_360
    assert memory.token_bytes(dataclasses.replace(LLAMA_70B, dtype="float16")) == 327_680


@pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", "float8_e5m2"])
def test_fp8_halves_the_elements_and_adds_a_float32_for_each_row(dtype):
    spec = dataclasses.replace(LLAMA_70B, dtype=dtype)
    assert memory.data_bytes(spec) == 32 * 163_840
    assert memory.scale_bytes(spec) == 32 * 80 * 2 * 8 * 4
    assert memory.token_bytes(spec) == 163_840 + 5_120
    assert memory.scale_bytes(LLAMA_70B) == 0


def test_a_latent_token_is_one_row_without_a_factor_for_k_and_v():
    assert memory.token_bytes(DEEPSEEK_V3) == 61 * 576 * 2 == 70_272
    fp8 = dataclasses.replace(DEEPSEEK_V3, dtype="fp8")
    assert memory.token_bytes(fp8) == 61 * (576 + 4)


def test_a_window_block_has_the_bytes_of_a_full_one():
    window = dataclasses.replace(LLAMA_70B, kind="window", window=4096)
    assert memory.block_bytes(window) == memory.block_bytes(LLAMA_70B)


@given(st.integers(1, 128))
def test_a_snapshot_of_a_recurrent_state_costs_the_same_at_every_block_size(block_size):
    spec = KVGroupSpec("state", (0, 2), 4, 64 * 128, "float32", block_size)
    assert memory.block_bytes(spec) == 2 * 4 * 64 * 128 * 4
    assert memory.token_bytes(spec) == memory.block_bytes(spec) / block_size


def test_a_pool_is_the_sum_of_its_groups():
    state = KVGroupSpec("state", (80,), 4, 64, "float32", 32)
    assert memory.pool_bytes((LLAMA_70B, state), (10, 3)) == 10 * memory.block_bytes(LLAMA_70B) + 3 * memory.block_bytes(state)
    with pytest.raises(ValueError):
        memory.pool_bytes((LLAMA_70B, state), (10,))


@given(window=sizes, chunk=sizes, block_size=sizes, length=st.integers(0, 200))
def test_a_windows_blocks_are_enough_for_any_chunk_and_two_more_than_any_needs(window, chunk, block_size, length):
    spec = KVGroupSpec("window", (0,), 1, 8, "float32", block_size, window=window)
    touched = [
        (last // block_size) - (max(0, first - window + 1) // block_size) + 1
        for last in range(length)
        for first in range(max(0, last - chunk + 1), last + 1)
    ]
    most = memory.sequence_blocks(spec, length, chunk_tokens=chunk)
    assert max(touched, default=0) <= most <= -(-length // block_size)
    assert length < window + chunk + block_size or most <= max(touched) + 2


@given(block_size=sizes, length=st.integers(0, 200), chunk=sizes)
def test_other_groups_hold_every_block_or_a_snapshot_for_each_they_touch(block_size, length, chunk):
    every = -(-length // block_size)
    for kind in ("full", "latent"):
        assert memory.sequence_blocks(KVGroupSpec(kind, (0,), 1, 8, "float32", block_size), length, chunk_tokens=chunk) == every
    state = KVGroupSpec("state", (0,), 1, 8, "float32", block_size)
    assert memory.sequence_blocks(state, length, chunk_tokens=chunk) == min(every, 2 + -(-chunk // block_size))


@given(st.lists(st.integers(0, 300), max_size=30), sizes)
def test_waste_is_what_is_left_of_the_last_blocks_and_stays_within_its_bound(lengths, block_size):
    allocated = sum(memory.blocks_for(n, block_size) * block_size for n in lengths)
    wasted = memory.wasted_slots(lengths, block_size)
    assert wasted == allocated - sum(lengths)
    assert wasted <= memory.most_wasted_slots(len(lengths), block_size)
    assert memory.waste(lengths, block_size) == (wasted / allocated if allocated else 0.0)


@given(sizes, st.integers(0, 5))
def test_the_expected_waste_is_the_mean_over_all_remainders_and_the_bound_is_reached(block_size, repeats):
    every = list(range(1, block_size + 1)) * repeats
    assert memory.wasted_slots(every, block_size) == memory.expected_wasted_slots(len(every), block_size)
    assert memory.wasted_slots([1] * repeats, block_size) == memory.most_wasted_slots(repeats, block_size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.element_bytes("bfloat61"), "did you mean 'bfloat16'"),
        (lambda: memory.block_bytes(dataclasses.replace(DEEPSEEK_V3, kv_heads=128)), "kv_heads is 1, got 128"),
        (lambda: memory.block_bytes(KVGroupSpec("state", (0,), 1, 8, "fp8", 16)), "not stored as fp8"),
        (lambda: memory.block_bytes(dataclasses.replace(LLAMA_70B, block_size=0)), "at least 1"),
        (lambda: memory.sequence_blocks(dataclasses.replace(LLAMA_70B, kind="window"), 5), "window is at least 1, got 0"),
        (lambda: memory.sequence_blocks(dataclasses.replace(LLAMA_70B, kind="state"), 5, chunk_tokens=0), "chunk_tokens"),
        (lambda: memory.blocks_for(-1, 16), "num_tokens is at least 0, got -1"),
        (lambda: memory.wasted_slots([3, -2], 16), "lengths are at least 0, got -2"),
        (lambda: memory.waste([3], 0), "block_size is at least 1, got 0"),
        (lambda: memory.most_wasted_slots(-1, 16), "num_sequences"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_with_what_came(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_module_itself_needs_no_jax():
    code = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('memory', sys.argv[1]); "
    code += "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, memory.__file__], check=False).returncode == 0
