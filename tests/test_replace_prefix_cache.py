"""The page "replace the prefix cache": its code conforms, is as short as it says, and serves; what is no cache is refused in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import CacheSpec
from octavo_core.testing.cache import check_prefix_cache
from octavo_core.testing.patience import PATIENCE_S
from octavo_core.testing.small_cache import SmallCache
from octavo_core.wire import SamplingParams
from octavo_engine import LLM
from octavo_engine._src.plug import build_prefix_cache, find_prefix_cache

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "packages" / "models" / "tests" / "fixtures" / "llama"
PAGE = (ROOT / "docs" / "replace" / "prefix-cache.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SPEC = CacheSpec((9,), 16, 2, 4)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Makes code importable as a module; answers the dotted name of its `Cache`."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(code, name):
        (tmp_path / f"{name}.py").write_text(code)
        return f"{name}:Cache"

    return make


def serve(**options):
    """Greedy answers to two prompts, the second beginning as the first does."""
    options |= {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 16, "max_num_seqs": 8, "block_size": 16}
    llm = LLM(str(CHECKPOINT), num_gpu_blocks_override=60, **options)
    try:
        greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        prompts = [list(range(1, 40)), [*range(1, 36), 5, 6]]
        done = [llm.generate([prompt], greedy)[0] for prompt in prompts]
        return [d.token_ids for d in done], [d.num_cached_tokens for d in done], llm.core.stats()
    finally:
        llm.close()


def test_the_page_holds_a_function_and_a_cache_of_forty_lines():
    assert len(CODE) == 2
    assert len([line for line in CODE[1].splitlines() if line.strip()]) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_the_caches_of_the_page_keep_every_promise(write, index):
    check_prefix_cache(find_prefix_cache(write(CODE[index], f"conforming_{index}")), steps=60)


@pytest.mark.slow
def test_the_cache_of_the_page_serves_the_tokens_the_default_serves(write):
    tokens, cached, _ = serve()
    assert cached[1] >= 32
    whole, found, stats = serve(prefix_cache=write(CODE[1], "serving"))
    assert (whole, found) == (tokens, [0, 0])
    assert stats.kv_usage == 0.0


BROKEN = {
    "no_module": (None, "nowhere.at_all:Cache", "No module named 'nowhere'"),
    "no_name": ("x = 1", "no_name:Cache", "has no attribute 'Cache'"),
    "no_callable": ("Cache = 5", "no_callable:Cache", "is a int; wanted a class or function of one CacheSpec"),
    "raises": ("def Cache(spec): raise ValueError('too small')", "raises:Cache", "cannot be built for .*ValueError: too small"),
    "takes_nothing": ("class Cache: pass", "takes_nothing:Cache", "TypeError"),
    "lacks": ("class Cache:\n    def __init__(self, spec): pass\n    def init(self): pass", "lacks:Cache", "lacks admit, grow, commit, release"),
    "of_another_spec": (
        "from octavo_core.testing.small_cache import SmallCache\nfrom octavo_core.specs import CacheSpec\n"
        "def Cache(spec): return SmallCache(CacheSpec((5,), 4, 1, 1))", "of_another_spec:Cache", "keeps in `spec` what it was built for"),
    "of_an_older_seam": (
        "from octavo_core.testing.small_cache import SmallCache\nclass Cache(SmallCache):\n"
        "    def admit(self, cache, sequence, tokens, lengths, namespace, want, reserve): pass",
        "of_an_older_seam:Cache", r"admit takes \(cache, sequence, tokens, lengths, namespace, tenant, want, reserve\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_cache_is_refused_with_the_reason(write, case):
    code, name, message = BROKEN[case]
    if code is not None:
        write(code, case)
    with pytest.raises(ConfigError, match=f"--prefix-cache .*{message}"):
        build_prefix_cache(name, find_prefix_cache(name), SPEC)


def test_a_cache_that_conforms_is_taken():
    name = "octavo_core.testing.small_cache:SmallCache"
    assert isinstance(build_prefix_cache(name, find_prefix_cache(name), SPEC), SmallCache)


@pytest.mark.slow
def test_the_command_line_refuses_a_wrong_name_in_one_line():
    words = ["-m", "octavo_server.cli", "generate", "hello", "--prefix-cache", "nowhere:Cache", "--model", str(CHECKPOINT)]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert re.fullmatch(r"octavo: --prefix-cache .*nowhere.*\n", ran.stderr)
