"""What may be loaded: each reason not to, told before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo_kernels_cpu._src import build_library, choose, library


@pytest.fixture
def built(tmp_path: Path) -> Path:
    (tmp_path / "build.json").write_text(json.dumps({"ffi_api": [0, 1]}))
    return tmp_path


def test_a_package_without_kernels_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"not built: install a wheel of octavo-kernels-cpu, or g\+\+ 11"):
        library.load("avx2", tmp_path)


def test_kernels_built_for_a_newer_jaxlib_are_not_loaded(built: Path) -> None:
    (built / "build.json").write_text(json.dumps({"ffi_api": [0, 99]}))
    with pytest.raises(NotImplementedError, match=r"built for XLA's FFI 0\.99, this jaxlib has 0\."):
        library.load("avx2", built)


def test_a_processor_without_the_units_is_told_which(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_flags", lambda: frozenset({"fma"}))
    with pytest.raises(NotImplementedError, match="lacks avx2, f16c"):
        library.load("avx2", built)


def test_an_instruction_set_that_was_not_built_is_named(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_flags", lambda: library.NEEDS["avx512"])
    with pytest.raises(NotImplementedError, match="no kernels are built for avx512"):
        library.load("avx512", built)


def test_where_nothing_serves_every_reason_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def decline(isa: str) -> library.Library:
        raise NotImplementedError(f"no {isa}")

    monkeypatch.setattr(choose, "load", decline)
    choose.best_library.cache_clear()
    with pytest.raises(NotImplementedError, match="no avx512; no avx2"):
        choose.best_library()
    choose.best_library.cache_clear()


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("0", 1)])
def test_threads_can_be_chosen(value: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CPU_THREADS", value)
    assert library.num_threads() == threads


def test_without_a_compiler_nothing_is_built_and_the_reason_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build_library.CannotBuild, match=r"no C\+\+20 compiler is found \(tried no-such-compiler\)"):
        build_library.build(tmp_path, folder=tmp_path / "lib")


def test_headers_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(build_library.CannotBuild, match="FFI headers cannot be read"):
        build_library.ffi_api(tmp_path)
