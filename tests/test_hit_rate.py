"""The replay of traces: simulators against models that are too slow to use, the optimum against every choice there is."""

import functools
import itertools
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo_tools.hit_rate import POLICIES, ROWS, RadixStore, Use, main, read_trace, replay
from octavo_tools.hit_rate.policies import NEW, TwoLifetimes
from octavo_tools.hit_rate.rows import SERVED
from octavo_tools.hit_rate.stores import URGENT_TOKENS
from octavo_tools.hit_rate.trace import TRACE_BLOCK, TraceError, cut
from octavo_tools.workspace import ROOT

MAKE = {row.name: row.make for row in ROWS}
FULL_BLOCKS = sorted(MAKE.keys() - {"radix+tail"})


def request(ids, tail_len=0, output_len=100):
    length = (len(ids) - bool(tail_len)) * TRACE_BLOCK + tail_len
    return {"timestamp": 0, "input_length": length, "output_length": output_len, "hash_ids": ids}


@st.composite
def traces(draw, max_requests=14, max_depth=4, block_size=TRACE_BLOCK):
    """Few ids, so that prefixes recur; an id means another block behind another prefix."""
    requests = []
    for _ in range(draw(st.integers(0, max_requests))):
        ids = draw(st.lists(st.integers(0, 1), max_size=max_depth))
        tail_len = draw(st.sampled_from([0, 100, 200])) if ids else 0
        requests.append(request(ids, tail_len, draw(st.sampled_from([1, 500]))))
    return cut("drawn", requests, block_size)


def most_hits(trace, num_blocks):
    """Hits of the best choice of all, tried one by one: what is held after a request contains its path and nothing that was not there."""
    best = {frozenset(): 0}
    for prompt in trace.prompts:
        path = frozenset(prompt.keys[:num_blocks])
        after = {}
        for held, hits in best.items():
            found = next((at for at, key in enumerate(prompt.keys) if key not in held), len(prompt.keys))
            rest = held - path
            for count in range(min(len(rest), num_blocks - len(path)) + 1):
                for kept in itertools.combinations(sorted(rest), count):
                    state = path | frozenset(kept)
                    after[state] = max(after.get(state, 0), hits + found)
        best = after
    return max(best.values())


@given(trace=traces(max_requests=9, max_depth=3), num_blocks=st.integers(1, 6))
def test_the_optimum_is_the_best_of_all_choices(trace, num_blocks):
    assert replay(MAKE["optimum"](num_blocks, trace), trace) == most_hits(trace, num_blocks) * TRACE_BLOCK


@pytest.mark.parametrize("name", FULL_BLOCKS)
@given(trace=traces(), num_blocks=st.integers(1, 8))
def test_no_cache_of_full_blocks_finds_more_than_the_optimum(name, trace, num_blocks):
    if name == "infinite":
        assert replay(MAKE["infinite"](num_blocks, trace), trace) >= replay(MAKE["optimum"](num_blocks, trace), trace)
    elif name == "whole-prompt":  # It counts tails, which the optimum leaves out.
        prompts = [prompt for prompt in trace.prompts if not prompt.tail_len]
        trace = cut("drawn", [request(list(prompt.path)) for prompt in prompts])
        assert replay(MAKE[name](num_blocks, trace), trace) <= replay(MAKE["optimum"](num_blocks, trace), trace)
    else:
        assert replay(MAKE[name](num_blocks, trace), trace) <= replay(MAKE["optimum"](num_blocks, trace), trace)


@given(trace=traces(), num_blocks=st.integers(1, 8))
def test_a_chain_that_frees_the_deepest_first_is_a_tree_without_recent_use(trace, num_blocks):
    assert replay(MAKE["block-chain"](num_blocks, trace), trace) == replay(MAKE["radix-lru"](num_blocks, trace), trace)


class SlowTree:
    """`RadixStore` by its definition: all stamps, the smallest found by looking at every one."""

    def __init__(self, num_blocks, policy):
        self.num_blocks, self.policy, self.held, self.clock, self.floor = num_blocks, policy, {}, 0, 0

    def rank(self, key):
        depth, (value, time) = self.held[key]
        expired = self.policy.lifetime is not None and time < self.clock - self.policy.lifetime
        return (0 if expired else value, time), -depth

    def insert(self, prompt):
        self.clock += 1
        path = prompt.keys[: self.num_blocks]
        is_new = not set(path) <= self.held.keys()
        while len(self.held.keys() | set(path)) > self.num_blocks:
            victim = min(self.held.keys() - set(path), key=self.rank)
            self.floor = self.held.pop(victim)[1][1]
        use = Use(self.clock, self.floor, is_new, len(path), prompt.output_len, int(prompt.prompt_len <= URGENT_TOKENS))
        for depth, key in enumerate(path):
            old = self.held[key][1] if key in self.held else NEW
            self.held[key] = depth, self.policy.touch(old, use)


LIFETIMES = [
    (name, lifetime) for name, policy in POLICIES.items() for lifetime in ((None,) if policy().lifetime is None else (2, 5))
]


@pytest.mark.parametrize(("name", "lifetime"), LIFETIMES)
@given(trace=traces(max_requests=25), num_blocks=st.integers(1, 8))
def test_a_tree_holds_what_its_definition_holds_and_no_block_without_its_parent(name, lifetime, trace, num_blocks):
    policy = POLICIES[name](lifetime=lifetime)
    store, slow = RadixStore(num_blocks, trace.block_size, policy), SlowTree(num_blocks, policy)
    parents = {key: parent for prompt in trace.prompts for parent, key in itertools.pairwise(prompt.keys)}
    for prompt in trace.prompts:
        store.insert(prompt)
        slow.insert(prompt)
        assert store.stamps == {key: stamp for key, (_, stamp) in slow.held.items()}
        assert len(store.stamps) <= num_blocks
        assert all(parents[key] in store.stamps for key in store.stamps if key in parents)
        assert store.match(prompt) == min(len(prompt.keys), num_blocks) * trace.block_size


STAMPS = st.tuples(st.integers(0, 15), st.integers(0, 60))
USES = st.builds(Use, *[st.integers(61, 99), st.integers(0, 120), st.booleans(), *[st.integers(0, 9)] * 2, st.integers(0, 1)])


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(older=STAMPS, newer=STAMPS, use=USES)
def test_a_policy_never_lowers_a_stamp_and_keeps_the_order_of_two(name, older, newer, use):
    older, newer = tuple(map(min, older, newer)), tuple(map(max, older, newer))
    policy = POLICIES[name]()
    if policy.lifetime is None:  # Such a policy leaves the value 0.
        older, newer = (0, older[1]), (0, newer[1])
    low, high = (policy.touch(stamp, use) for stamp in (older, newer))
    assert all(a <= b for a, b in zip(older, low, strict=True))
    assert all(a <= b for a, b in zip(low, high, strict=True))


@pytest.mark.parametrize("num_blocks", [6, 13])
def test_the_cache_that_serves_finds_what_its_simulation_finds(num_blocks):
    """Tails shorter than a block and answers that fit beside them: a running sequence takes one block more than the simulation gives it."""
    rng = np.random.default_rng(num_blocks)
    served = {row.name: row.make for row in SERVED}
    trace = cut("drawn", [request(rng.integers(0, 2, rng.integers(2, 6)).tolist(), 100, 10) for _ in range(60)])
    assert replay(served["octavo-lru"](num_blocks + 1, trace), trace) == replay(MAKE["radix-lru"](num_blocks, trace), trace) > 0


@given(trace=traces(block_size=64))
def test_with_tails_and_room_every_token_of_the_longest_common_prefix_is_found(trace):
    store, seen = RadixStore(10**6, 64, POLICIES["lru"](), keep_tails=True), []
    for prompt in trace.prompts:
        tokens = prompt.token_ids()
        common = (np.cumprod(tokens[: len(other)] == other[: len(tokens)]).sum() for other in seen)
        assert store.match(prompt) == max(common, default=0)
        store.insert(prompt)
        seen.append(tokens)


def test_a_tail_takes_a_block_and_is_found_only_where_tails_are_kept():
    trace = cut("two", [request([1, 2], 100), request([1, 2], 100)])
    with_tails, without = (MAKE[name](8, trace) for name in ("radix+tail", "radix-lru"))
    assert replay(with_tails, trace) == TRACE_BLOCK + 100
    assert replay(without, trace) == TRACE_BLOCK
    assert (len(with_tails.stamps), len(without.stamps)) == (2, 1)


def test_a_whole_prompt_is_found_only_whole():
    trace = cut("three", [request([1, 2]), request([1, 3]), request([1, 2])])
    assert replay(MAKE["whole-prompt"](4, trace), trace) == 2 * TRACE_BLOCK
    assert replay(MAKE["whole-prompt"](3, trace), trace) == 0


def test_what_promises_to_return_outlives_what_does_not():
    once, short, filler = request([1]), request([2], output_len=3), [request([10 + at]) for at in range(3)]
    trace = cut("promise", [once, short, *filler])
    store = MAKE["radix-two-lifetimes"](3, trace)
    replay(store, trace)
    held = [store.match(prompt) > 0 for prompt in trace.prompts]
    assert held == [False, True, False, True, True]


def test_smaller_blocks_name_the_same_tokens():
    requests = [request([1, 2], 100), request([1, 3], 100)]
    coarse, fine = cut("same", requests), cut("same", requests, 32)
    for left, right in zip(coarse.prompts, fine.prompts, strict=True):
        np.testing.assert_array_equal(left.token_ids(), right.token_ids())
        assert (len(right.keys), right.tail_len) == ((TRACE_BLOCK + 100) // 32, 100 % 32)
    first, second = (prompt.token_ids() for prompt in coarse.prompts)
    assert (first == second)[:TRACE_BLOCK].all()
    assert (first == second)[TRACE_BLOCK:].mean() < 0.1
    assert 0 <= first.min() <= first.max() < 32_000


GOOD = json.dumps(request([1, 2]))


@pytest.mark.parametrize(
    ("line", "finding"),
    [
        ("{", ":2: wanted a JSON object"),
        ("[]", ":2: wanted a JSON object"),
        ('{"input_length": 5}', ":2: wanted a JSON object"),
        (json.dumps(request([1, "x"])), ":2: wanted a JSON object"),
        (json.dumps(request([1, 2]) | {"input_length": 3000}), ":2: wanted 6 hash_ids for input_length 3000, got 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, finding):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(TraceError, match=re.escape(finding)):
        read_trace(path)


def test_a_trace_that_cannot_be_read_or_cut_is_refused(tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    assert main([str(path)]) == 2
    path.write_text(GOOD)
    assert main([str(path), "--block-size", "48"]) == 2
    assert "wanted a block size that divides 512" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--pools=0", "--pools=-1,0.5", "--rows=radix,lru", "--pools=half"])
def test_a_bad_option_is_refused(tmp_path, option):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), option])


def test_the_program_prints_every_row_and_writes_the_figures(tmp_path):
    (tmp_path / "t.jsonl").write_text(f"{GOOD}\n{GOOD}\n")
    command = [sys.executable, ROOT / "tools" / "hit-rate", tmp_path / "t.jsonl", "--pools", "0.5,1", "--json", tmp_path / "f.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == [row.name for row in ROWS]
    figures = json.loads((tmp_path / "f.json").read_text())
    assert len(figures) == 2 * len(ROWS)
    assert {"name": "hit_rate_t_radix-lru_1", "value": 0.5, "unit": "ratio", "n": 2} in figures


def test_an_empty_trace_has_a_table(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text("")
    assert main([str(tmp_path / "t.jsonl")]) == 0
    assert "0 requests" in capsys.readouterr().out


@functools.cache
def quoted():
    """Figures in docs/hit-rate.md: trace and row to hit rate by pool."""
    page, found, trace = (ROOT / "docs" / "hit-rate.md").read_text(), {}, ""
    for line in page.partition("--block-size 32")[0].splitlines():
        if head := re.match(r"(mooncake\w+): \d+ requests", line):
            trace = head[1]
        elif trace and (cells := re.findall(r"(\d\.\d{4}) \(", line)):
            found[trace, line.split()[0]] = dict(zip((0.05, 0.1, 0.25, 0.5, 1.0), map(float, cells), strict=True))
    return found


def test_the_page_quotes_every_row_of_both_traces():
    assert sorted(quoted()) == sorted(itertools.product(["mooncake_conversation_trace", "mooncake_synthetic_trace"], MAKE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conversation_trace", "mooncake_synthetic_trace"])
def test_the_page_quotes_what_is_measured(shared, name):
    trace = read_trace(shared / "traces" / f"{name}.jsonl")
    for row, pool in itertools.product(["optimum", "told-whether-again", "radix-lru", "radix-two-lifetimes"], [0.25, 0.5]):
        found = replay(MAKE[row](round(pool * trace.working_set), trace), trace) / trace.num_tokens
        assert quoted()[name, row][pool] == pytest.approx(found, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mooncake_conversation_trace", "mooncake_synthetic_trace"])
def test_the_bound_of_a_short_answer_matters_as_little_as_the_page_says(shared, name):
    trace = read_trace(shared / "traces" / f"{name}.jsonl")
    for short, pool in itertools.product([32, 128], [0.25, 0.5]):
        store = RadixStore(round(pool * trace.working_set), trace.block_size, TwoLifetimes(short=short))
        assert replay(store, trace) / trace.num_tokens == pytest.approx(quoted()[name, "radix-two-lifetimes"][pool], abs=0.005)


def test_the_recommended_rule_is_within_a_twentieth_of_the_optimum_where_the_page_says_so():
    for name, pool in [("conversation", 0.25), ("conversation", 0.5), ("synthetic", 0.5)]:
        row = quoted()[f"mooncake_{name}_trace", "radix-two-lifetimes"], quoted()[f"mooncake_{name}_trace", "optimum"]
        assert row[0][pool] >= 0.95 * row[1][pool]
