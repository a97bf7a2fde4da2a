"""What other people's attention is told in the device bench: no GPU, no torch, only the arithmetic of what they are given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="Pallas Mosaic GPU cannot be imported")

import itertools

from octavo_kernels._src import bench_others
from octavo_kernels._src.bench_report import Report
from octavo_kernels._src.bench_steps import make_step
from octavo_kernels.cases import SPEED_CASES, SpeedCase

SMALL = SpeedCase("decode/small", ((63, 1), (31, 1), (32, 1), (0, 1)), q_heads=2, kv_heads=1, head_dim=8)


def test_a_block_table_becomes_one_list_of_page_ids_with_the_tokens_of_each_last_page() -> None:
    step = make_step(SMALL)
    indptr, ids, last = bench_others.pages(step)
    assert indptr.tolist() == [0, 2, 3, 5, 6]
    assert last.tolist() == [32, 32, 1, 1]
    table = np.asarray(step.batch.block_table)
    assert [ids[a:b].tolist() for a, b in itertools.pairwise(indptr)] == [
        table[row, :count].tolist() for row, count in enumerate((2, 1, 2, 1))
    ]


def test_what_cannot_be_imported_is_one_line_and_what_fails_is_one_for_its_case(monkeypatch, capsys) -> None:
    def fails(case: SpeedCase, rounds: int) -> float:
        raise ValueError("page size 32 is not served")

    absent = bench_others.Rival("absent", ("octavo_no_such_module",), lambda case: True, lambda case, rounds: 0.0)
    present = bench_others.Rival("present", (), lambda case: True, lambda case, rounds: 2.0)
    broken = bench_others.Rival("broken", (), lambda case: True, fails)
    monkeypatch.setattr(bench_others, "RIVALS", (absent, present, broken))
    report = Report(None)
    found = bench_others.importable(report)
    assert found == [present, broken]
    assert list(bench_others.times(report, found, SMALL, 1)) == [("present", 2.0)]
    assert not list(bench_others.times(report, found, dataclasses.replace(SMALL, dtype="float8_e4m3fn"), 1))
    said = capsys.readouterr().out
    assert said.count("absent") == 1
    assert "decode/small/broken" in said
    assert "page size 32 is not served" in said


def test_every_rival_is_timed_on_something() -> None:
    for rival in bench_others.RIVALS:
        assert any(rival.serves(case) for case in SPEED_CASES), rival.name
