"""The pages "replace …": their code, built as a distribution outside the workspace and installed, serves what Octavo's own parts serve."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo_core.errors import ConfigError
from octavo_core.specs import CacheSpec
from octavo_core.testing import attention
from octavo_core.testing.scheduler import check_scheduler
from octavo_core.testing.small_cache import SmallCache
from octavo_core.wire import SamplingParams
from octavo_engine import LLM
from octavo_engine.config import EngineConfig
from octavo_scheduler import SchedulerConfig
from octavo_tools.nightly import model_name, server

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "packages" / "models" / "tests" / "fixtures" / "llama"
PAGES = ("attention", "model", "prefix-cache", "sampler", "scheduler")
CODE = {page: re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "replace" / f"{page}.md").read_text(), re.S) for page in PAGES}
NAMES = {
    "attention_backend": "octavo_fork.attention:Backend",
    "model_class": "octavo_fork.model:Model",
    "prefix_cache": "octavo_fork.prefix_cache:Cache",
    "sampler": "octavo_fork.sampler:Sampler",
    "scheduler": "octavo_fork.scheduler:Scheduler",
}
PROJECT = """
[project]
name = "octavo-fork"
version = "0.1.0"
dependencies = ["octavo-engine>=0.1"]
[build-system]
requires = ["hatchling>=1.26"]
build-backend = "hatchling.build"
[tool.hatch.build.targets.wheel]
packages = ["octavo_fork"]
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """The distribution, built and installed beside nothing else; on the path while this module's tests run."""
    source, target = tmp_path_factory.mktemp("fork"), tmp_path_factory.mktemp("site")
    (source / "octavo_fork").mkdir()
    (source / "octavo_fork" / "__init__.py").write_text("")
    (source / "pyproject.toml").write_text(PROJECT)
    for page, code in CODE.items():
        (source / "octavo_fork" / f"{page.replace('-', '_')}.py").write_text(code[-1])
    run("uv", "build", "--wheel", "--offline", "-q", "-o", str(source / "dist"), str(source))
    (wheel,) = (source / "dist").glob("*.whl")
    run("uv", "pip", "install", "-q", "--offline", "--no-deps", "--python", sys.executable, "--target", str(target), str(wheel))
    sys.path.insert(0, str(target))
    yield target
    sys.path.remove(str(target))


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and "hatchling" in done.stderr and "offline" in done.stderr.lower():
        pytest.skip("hatchling is not in uv's cache and the registry is not asked")
    assert done.returncode == 0, done.stderr


def serve(**options):
    """Greedy answers to prompts that chunk, batch and wait for one another, and scores of one."""
    options |= {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 16, "max_num_seqs": 4, "block_size": 16}
    llm = LLM(str(CHECKPOINT), num_gpu_blocks_override=14, max_model_len=128, **options)
    try:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, 380, int(n)).tolist() for n in (1, 15, 16, 50, 33, 7)]
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2))
        assert llm.core.stats().kv_usage == 0.0
        assert llm._built.recompiles == 0
        return [d.token_ids for d in done], [[entry.logprob for entry in d.logprobs] for d in done]
    finally:
        llm.close()


def test_each_page_holds_a_component_of_at_most_forty_lines():
    lengths = {page: len([line for line in code[-1].splitlines() if line.strip()]) for page, code in CODE.items()}
    assert {page: length for page, length in lengths.items() if length > 40} == {}


@pytest.mark.slow
def test_all_five_replaced_at_once_serve_the_tokens_that_octavos_own_serve(fork):
    tokens, scores = serve(layer_backend="xla")
    replaced, their_scores = serve(**NAMES)
    assert replaced == tokens
    for own, theirs in zip(scores, their_scores, strict=True):
        np.testing.assert_allclose(theirs, own, atol=1e-4)


@pytest.mark.slow
def test_a_server_with_all_five_replaced_is_accepted_as_a_server_of_completions(fork, shared, monkeypatch):
    script = shared / "accept" / "openai_accept.py"
    if not script.is_file():
        pytest.skip("the acceptance script is absent (OCTAVO_SHARED names the folder it is in)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(fork), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in NAMES.items()]
    with server([*flags, "--max-model-len=2048", "--max-num-seqs=16", "--watchdog-timeout=600", "--disable-access-log"]) as url:
        argv = [sys.executable, str(script), "--base-url", url, "--model", model_name(url, None), "--timeout=600", "--only=comp*"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"TOTAL [1-9]\d* passed", done.stdout), done.stdout[-1000:]


def test_the_scheduler_of_the_page_keeps_every_promise():
    names = {}
    exec(compile(CODE["scheduler"][0], "scheduler.md", "exec"), names)
    cache = SmallCache(CacheSpec((40,), 4, 8, 8))
    scheduler = names["Scheduler"](SchedulerConfig(max_num_seqs=4, token_budget=16), cache)
    check_scheduler(scheduler, cache, num_streams=10)


@pytest.mark.slow
def test_the_attention_of_the_page_keeps_every_promise(fork):
    from octavo_fork.attention import Backend

    attention.check_attention(Backend(), [case for case in attention.CASES if case.name in ("mixed step", "decode in bfloat16")])


@pytest.mark.parametrize("flag", ["model_class", "sampler", "scheduler"])
@pytest.mark.parametrize("name", ["nowhere.at_all:Thing", "octavo_core.plan:OK", "octavo_core.plan:nothing"])
def test_a_name_that_leads_nowhere_is_refused_in_one_line(flag, name):
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} .*'?{name}") as caught:
        serve(**{flag: name})
    assert "\n" not in str(caught.value)


def test_what_is_no_component_is_told_what_it_lacks():
    with pytest.raises(ConfigError, match="--sampler 'builtins:dict' makes a dict, no Sampler: it lacks init, begin, sample"):
        serve(sampler="builtins:dict")


def test_the_flags_are_there():
    fields = EngineConfig.__dataclass_fields__
    assert NAMES.keys() <= fields.keys()
