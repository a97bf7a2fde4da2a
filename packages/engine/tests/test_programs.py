"""Programs of earlier starts: found, or in doubt compiled; never another's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo_core.wire import SamplingParams
from octavo_engine._src.programs import Programs, environment, kept_programs
from octavo_engine.config import EngineConfig

CPU = jax.devices("cpu")[0]
FACTS = ("compiler", "sources", "settings")


def scaled(by, state, x):
    """Large enough to be several fused computations, with a donated state."""
    order = jnp.argsort(x)
    return state + by * x[order][jnp.cumsum(jnp.ones_like(order)) - 1], jnp.sort(x)[::-1] @ jnp.ones((len(x), 3))


def compiled(folder, by=2, facts=FACTS, name="scaled", n=64, options=None):
    programs = Programs(folder, *facts)
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    jitted = jax.jit(functools.partial(scaled, by), donate_argnums=0)
    return programs.compile(name, jitted, shape, shape, device=CPU, options=options), programs.counts


def check(program, by=2, n=64):
    x = np.random.default_rng(1).normal(size=n).astype(np.float32)
    state = jax.device_put(np.ones(n, np.float32), CPU)
    state, total = program(state, x)
    np.testing.assert_allclose(state, 1 + by * np.sort(x), rtol=1e-6)
    np.testing.assert_allclose(total, np.full(3, x.sum()), rtol=1e-4)


def files(folder, kind):
    return sorted(folder.glob(f"{kind}-*"))


def use_jax_cache(folder):
    """JAX's own cache: in a folder or nowhere."""
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def without_jax_cache():
    before = jax.config.jax_compilation_cache_dir
    use_jax_cache(None)
    yield
    use_jax_cache(before)


def test_a_program_is_found_again_and_donates_as_before(tmp_path):
    for counts in ({"compiled": 1}, {"found": 1}, {"found": 1}):
        program, got = compiled(tmp_path)
        assert dict(got) == counts
        check(program)
        given = jax.device_put(np.ones(64, np.float32), CPU)
        program(given, np.ones(64, np.float32))
        assert given.is_deleted()


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"facts": ("compiler", "edited", "settings")}, {"known": 1}),
        ({"facts": ("compiler", "sources", "others")}, {"known": 1}),
        ({"facts": ("another XLA", "sources", "settings")}, {"compiled": 1}),
        ({"name": "another"}, {"compiled": 1}),
        ({"n": 65}, {"compiled": 1}),
        ({"options": {"xla_llvm_disable_expensive_passes": True}}, {"compiled": 1}),
        ({"by": 3, "facts": ("compiler", "edited", "settings")}, {"compiled": 1}),
    ],
    ids=["an edit that changes nothing", "other settings, same program", "another compiler", "name", "shape", "options", "an edit"],
)
def test_another_fact_is_a_miss_and_the_same_text_is_compiled_once(tmp_path, change, counts):
    compiled(tmp_path)
    program, got = compiled(tmp_path, **change)
    assert dict(got) == counts
    check(program, change.get("by", 2), change.get("n", 64))
    assert dict(compiled(tmp_path, **change)[1]) == {"found": 1}


@pytest.mark.parametrize("kind", ["name", "program"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "other", "gone"])
def test_a_damaged_file_is_a_miss_and_is_replaced(tmp_path, kind, damage):
    compiled(tmp_path)
    (path,) = files(tmp_path, kind)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"flip": flipped, "truncate": data[:middle], "empty": b"", "other": b"not a program"}[damage])
    program, counts = compiled(tmp_path)
    assert counts["found"] == 0
    check(program)
    assert dict(compiled(tmp_path)[1]) == {"found": 1}


def test_a_program_in_jax_s_own_cache_is_kept_whole(tmp_path):
    """JAX reads it back without all of its code: written again it would fail when it runs."""
    use_jax_cache(tmp_path / "jax")
    compiled(None)
    jax.clear_caches()
    for counts in ({"compiled": 1}, {"found": 1}):
        program, got = compiled(tmp_path / "kept")
        assert dict(got) == counts
        check(program)
    assert jax.config.jax_enable_compilation_cache


def test_threads_are_a_fact_and_an_api_key_is_none(monkeypatch):
    before = environment()
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert environment() == before
    monkeypatch.setenv("OCTAVO_CPU_THREADS", "1")
    assert environment() != before


def test_what_jax_tells_makes_no_difference(tmp_path):
    before = environment()
    level = jax.config.jax_logging_level
    jax.config.update("jax_logging_level", "ERROR")
    try:
        assert environment() == before
    finally:
        jax.config.update("jax_logging_level", level)


def test_a_folder_that_cannot_be_written_or_is_none_is_no_fault(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "below", tmp_path / "file"):
        program, counts = compiled(folder)
        assert dict(counts) == {"compiled": 1}
        check(program)


def test_values_are_recalled_for_the_same_facts_only(tmp_path):
    calls = []

    def make(value):
        calls.append(value)
        return value

    assert [Programs(tmp_path, *facts).recall("x", lambda: make(len(calls))) for facts in ("a", "b", "a")] == [0, 1, 0]


def test_the_environment_tells_settings_apart(monkeypatch):
    before = environment()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    changed = environment()
    assert before[0] != changed[0]
    assert before[1:] == changed[1:]
    assert repr(changed) == repr(environment())


@pytest.mark.parametrize("field", ["prefix_cache", "scheduler", "sampler", "model_class", "attention_backend"])
def test_with_a_component_from_elsewhere_nothing_is_kept(field, tmp_path):
    config = EngineConfig(**{field: "somebody.elses:Thing"}, compilation_cache_dir=str(tmp_path))
    assert kept_programs(config, tmp_path).folder is None
    assert kept_programs(EngineConfig(compilation_cache_dir=str(tmp_path)), tmp_path).folder == tmp_path / "programs"


def test_a_folder_that_others_can_write_is_not_used(tmp_path, caplog):
    config = EngineConfig(compilation_cache_dir=str(tmp_path))
    assert kept_programs(config, tmp_path).folder == tmp_path / "programs"
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700
    (tmp_path / "programs").chmod(0o770)
    assert kept_programs(config, tmp_path).folder is None
    assert "chmod 700" in caplog.text


@pytest.mark.parametrize("layers", ["auto", pytest.param("xla", marks=pytest.mark.slow)])
def test_a_second_engine_compiles_nothing_and_says_the_same(make_llm, tmp_path, layers):
    prompts = [[5, 6, 7], list(range(1, 60)), [9] * 33]
    said, told = [], []
    for _ in range(2):
        llm = make_llm(compilation_cache_dir=str(tmp_path), max_num_seqs=2, max_num_batched_tokens=16, layer_backend=layers)
        told.append({name: value for name, value, _ in llm._built.table}["programs"])
        said.append([out.token_ids for out in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))])
        assert llm._built.recompiles == 0
        llm.close()
    assert said[0] == said[1]
    number = int(told[0].removeprefix("0 of an earlier start, ").removesuffix(" compiled"))
    assert told[1] == f"{number} of an earlier start, 0 compiled"
