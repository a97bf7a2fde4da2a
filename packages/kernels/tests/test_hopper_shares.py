"""How decode's KV is cut into equal shares, and prompts into tiles: pure arithmetic, checked on every machine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_core.seams import AttentionBatch

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")

from octavo_kernels._src.hopper_decode import DecodeConfig
from octavo_kernels._src.hopper_latent_step import cut_latents
from octavo_kernels._src.hopper_shares import share_out
from octavo_kernels._src.hopper_tiles import PrefillConfig, cut
from octavo_kernels.cases import SPEED_CASES

ROWS = 6
SHAPE = {"group": 4, "kv_heads": 3, "head_dim": 64, "block_size": 16, "scale": 1.0, "num_ctas": 7}
CONFIG = DecodeConfig(**SHAPE)
share_out_jit = jax.jit(share_out, static_argnums=2)
cut_latents_jit = jax.jit(cut_latents, static_argnums=(1, 2))
cut_jit = jax.jit(cut, static_argnums=(1, 2))


def walk(shares, config: DecodeConfig) -> list[list[tuple[int, int, int]]]:
    """(row, head, step) of every step each thread block makes, following the kernel's rule."""
    steps_of = np.asarray(shares.rows)[:, 1]
    found = []
    for row, head, step, count, segments in np.asarray(shares.start).tolist():
        mine = []
        for _ in range(segments):
            length = min(steps_of[row] - step, count - len(mine))
            mine += [(row, head, step + i) for i in range(length)]
            row, head, step = (row + 1, 0, 0) if head + 1 == config.kv_heads else (row, head + 1, 0)
        assert len(mine) == count
        found.append(mine)
    return found


@given(st.lists(st.integers(0, 900), min_size=ROWS, max_size=ROWS), st.integers(0, ROWS))
@settings(max_examples=200, deadline=None)
def test_every_step_is_in_exactly_one_share_and_shares_are_equal(contexts: list[int], num_single: int) -> None:
    shares = share_out_jit(jnp.array(contexts, jnp.int32), jnp.int32(num_single), CONFIG)
    shared = walk(shares, CONFIG)
    steps = [max(-(-n // CONFIG.tile_kv), 1) for n in contexts[:num_single]]
    want = [(row, head, step) for row, n in enumerate(steps) for head in range(CONFIG.kv_heads) for step in range(n)]
    assert [step for share in shared for step in share] == want
    sizes = [len(share) for share in shared if share]
    assert len(set(sizes[:-1])) <= 1
    assert all(sizes[-1] <= size for size in sizes)


@given(st.lists(st.integers(0, 900), min_size=ROWS, max_size=ROWS))
@settings(max_examples=100, deadline=None)
def test_no_two_segments_share_a_slot_and_the_merge_reads_exactly_those_written(contexts: list[int]) -> None:
    shares = share_out_jit(jnp.array(contexts, jnp.int32), jnp.int32(ROWS), CONFIG)
    written = [
        (row, head, row * CONFIG.kv_heads + head + cta)
        for cta, share in enumerate(walk(shares, CONFIG))
        for row, head in dict.fromkeys((row, head) for row, head, _ in share)
    ]
    read = []
    for row, (before, steps, share) in enumerate(np.asarray(shares.rows).tolist()):
        for head in range(CONFIG.kv_heads):
            first = before + head * steps
            item = row * CONFIG.kv_heads + head
            read += [(row, head, item + cta) for cta in range(first // share, (first + steps - 1) // share + 1)]
    assert sorted(written) == sorted(read)
    slots = [slot for _, _, slot in written]
    assert len(set(slots)) == len(slots)
    assert max(slots) < ROWS * CONFIG.kv_heads + CONFIG.num_ctas


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(2, 90)), min_size=1, max_size=4), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_every_token_of_a_long_row_has_one_place_in_one_tile(long: list[tuple[int, int]], num_single: int) -> None:
    tokens, config = 400, PrefillConfig(**SHAPE)
    rows = [(40, 1)] * num_single + long
    starts = np.full(ROWS + 1, sum(new for _, new in rows))
    starts[: len(rows) + 1] = np.concatenate([[0], np.cumsum([new for _, new in rows])])
    contexts = np.zeros(ROWS, np.int32)
    contexts[: len(rows)] = [old + new for old, new in rows]
    fields = np.zeros(tokens), starts, contexts, np.zeros((ROWS, 4)), np.zeros(tokens), num_single, len(rows)
    tiles = cut_jit(AttentionBatch(*(jnp.asarray(f, jnp.int32) for f in fields)), tokens, config)
    about, count = np.asarray(tiles.about), int(tiles.num_tiles[0])
    tile_of, offset_of, token_of = map(np.asarray, (tiles.tile, tiles.offset, tiles.token))
    by_number = {number: rest for *rest, number in about[:count].tolist()}
    flat = num_single
    for row, (old, new) in enumerate(rows[num_single:], num_single):
        for i in range(new):
            tile, offset = int(tile_of[flat]), int(offset_of[flat])
            got_row, position, queries, context = by_number[tile]
            assert (got_row, position + offset, context) == (row, old + i, old + new)
            assert offset < queries
            assert int(token_of[tile, offset]) == flat
            flat += 1
    ends = [position + queries for _, position, queries, _, _ in about[:count].tolist()]
    assert ends == sorted(ends, reverse=True)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=ROWS), st.sampled_from([1, 3, 4]))
@settings(max_examples=100, deadline=None)
def test_every_token_over_latents_has_one_place_in_one_tile(rows: list[tuple[int, int]], tile_q: int) -> None:
    rows = sorted(rows, key=lambda row: row[1] != 1)
    tokens, contexts = 400, np.zeros(ROWS)
    starts = np.full(ROWS + 1, sum(new for _, new in rows))
    starts[: len(rows) + 1] = np.concatenate([[0], np.cumsum([new for _, new in rows])])
    contexts[: len(rows)] = [old + new for old, new in rows]
    single = sum(new == 1 for _, new in rows)
    fields = np.zeros(tokens), starts, contexts, np.zeros((ROWS, 4)), np.zeros(tokens), single, len(rows)
    tiles = cut_latents_jit(AttentionBatch(*(jnp.asarray(f, jnp.int32) for f in fields)), tokens, tile_q)
    assert int(tiles.num_tiles) == sum(-(-new // tile_q) for _, new in rows)
    places, flat = set(), 0
    for row, (old, new) in enumerate(rows):
        for i in range(new):
            tile, offset = int(tiles.tile[flat]), int(tiles.offset[flat])
            got_row, position = np.asarray(tiles.about)[tile].tolist()
            assert (got_row, position + offset) == (row, old + i)
            assert position + offset < int(tiles.context_len[tile]) <= old + new
            assert int(tiles.token[tile, offset]) == flat
            places.add((tile, offset))
            flat += 1
    assert len(places) == flat


def test_names_of_measured_cases_are_unique() -> None:
    names = [case.name for case in SPEED_CASES]
    assert len(set(names)) == len(names)
