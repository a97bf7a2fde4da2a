"""The bench runs and names its figures as dashboards know them; `InPlace` hands over what it says."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import octavo_kvcache as kv
from octavo_core.specs import CacheSpec
from octavo_core.testing.patience import PATIENCE_S


@pytest.mark.slow
def test_the_bench_writes_every_figure_under_its_name(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "octavo_kvcache.bench", "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    values = {row["name"]: row["value"] for row in json.loads(figures.read_text())}
    wanted = {"match_32768", "match_2048", "insert_64", "evict_1024", "lease_release", "bytes_per_block"}
    assert wanted <= values.keys()
    assert {f"{name}_floor" for name in wanted - {"bytes_per_block"}} <= values.keys()
    assert values["bytes_per_block"] <= 240
    in_workspace = "baselines: they are in" not in done.stdout
    assert in_workspace == ({"speedup_match_32768_sha256", "speedup_match_32768_radix"} <= values.keys())


def allocate(radix):
    return kv.allocate(radix, jnp.int32(2), size=2)[:3]


def test_an_operation_in_place_answers_as_it_does_by_itself_and_leaves_other_arrays_where_they_are():
    radix = kv.init(CacheSpec((9,), 2, 1, 4), max_events=4)
    expected, ids, _ = allocate(radix)
    untouched = radix.tokens
    after, got, generations = kv.InPlace(allocate)(radix)
    assert got.tolist() == ids.tolist()
    assert generations.tolist() == [1, 1]
    assert after.tokens is untouched
    assert radix.leases.is_deleted(), "what changes is handed over"
    for name in ("leases", "generation", "counters"):
        assert np.array_equal(getattr(after, name), getattr(expected, name))


def test_an_operation_that_changes_other_arrays_for_other_shapes_is_refused():
    def odd(state, length):
        first, second = state
        return ((first + 1, second) if length.shape[0] == 1 else (first, second + 1)), length

    operation = kv.InPlace(odd)
    state, _ = operation((jnp.zeros(2), jnp.zeros(2)), jnp.zeros(1))
    with pytest.raises(TypeError, match="changes other arrays"):
        operation(state, jnp.zeros(3))
